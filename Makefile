# Set up and run everything. Needs Python 3.11 or newer, and make.
#
#   make demo     install into .venv, run the example
#   make check    lint and the quick tests: the loop while you work
#   make test     install the test tools, run the tests       TESTS="tests/cli -k version" runs some
#   make lint     formatting, lint, types, layers
#   make docs     the documentation site, into site/
#   make drills   kill runs, damage files, call everything wrongly       DRILLS="kills --count 20" runs some
#   make bench    the benchmarks
#   make parity   compare with the public implementations, in .venv-parity
#   make clean    remove whatever the above made
#
# Another interpreter or environment: make PYTHON=python3.12 VENV=.venv-3.12 test
# Torch for CPUs, where pip would take the one for GPUs: set PIP_EXTRA_INDEX_URL to an index that has it.

PYTHON ?= python3
VENV ?= .venv
TESTS ?=
DRILLS ?=
WORKERS ?= logical

BIN := $(VENV)/bin
# Modules are compiled when they are imported: all of them, used or not, take as long as the rest of an installation.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test-env parity-env demo check test lint docs drills bench parity clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed

test-env: $(VENV)/.installed-test

parity-env: $(VENV)/.installed-parity

demo: install
	@$(BIN)/xlstm-jax train experiment=demo

test: test-env
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=4 --dist=worksteal --durations=10 $(TESTS)

check: lint
	@$(MAKE) --no-print-directory test TESTS='-m "not slow and not gpu" $(TESTS)'

lint: test-env
	@status=0; for check in "ruff check" "ruff format --check" "basedpyright --pythonpath $(BIN)/python" \
	    "lint-imports --no-logo"; do $(BIN)/$$check || status=1; done; exit $$status

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

drills: test-env
	@PYTHONPATH=tests $(BIN)/python -m drills $(DRILLS)

bench: install
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

parity:
	@$(MAKE) --no-print-directory VENV=$(VENV)-parity TESTS="$(or $(TESTS),tests/parity)" parity-env test

clean:
	@rm -rf $(VENV) $(VENV)-parity site dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than pyproject.toml once its packages are installed; then pip is not asked again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing xlstm_jax into $(VENV)"
	@$(PIP) --editable .
	@touch $@

# First and by itself: once a build for CPUs is there, the extra is content with it.
$(VENV)/.torch: | $(BIN)/python
	@echo "Installing torch into $(VENV)"
	@$(PIP) $$(grep -o 'torch==[0-9.]*' pyproject.toml)
	@touch $@

$(VENV)/.installed-parity: | $(VENV)/.torch

INSTALLED := $(addprefix $(VENV)/.installed-,test docs parity)
$(INSTALLED): $(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing xlstm_jax and its extra '$*' into $(VENV)"
	@$(PIP) --editable '.[$*]'
	@touch $(VENV)/.installed $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "xlstm_jax needs Python 3.11 or newer; '$(PYTHON)' says: $$($(PYTHON) --version 2>&1 | tail -n 1)"; \
	    echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
