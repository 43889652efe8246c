"""Every command that README and the tutorials tell readers to type is typed here, with small sizes.

The lines of all blocks marked `bash` of a page are one script, which runs in a folder with nothing but the examples.
`xlstm-jax` is the real command; what it trains is made small by overrides that come last, and `make demo` is what the
Makefile makes of it; where the next line says that too, it is typed once.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TESTS

pytestmark = pytest.mark.slow

ROOT = TESTS.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SMALL = (
    "model.embedding_dim=32",
    "model.num_heads=2",
    "batch_size=8",
    "context_length=32",
    "num_train_steps=8",
    "scheduler.warmup_steps=1",
    "scheduler.cooldown_steps=0",
    "trainer.check_val_every_n_steps=4",
    "logger.log_every_n_steps=2",
    "++data.validation.max_steps_per_epoch=2",
)
# What makes tests compile quickly; how many devices there are, a page says itself.
QUICK = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
SHIM = f"""#!{sys.executable}
import os, sys
os.environ["XLA_FLAGS"] = "{QUICK} " + os.environ["XLA_FLAGS"]
from xlstm_jax.cli.main import main
small = {SMALL} if sys.argv[1:2] == ["train"] and "--cfg" not in sys.argv else ()
here = ["++data.prepare.num_workers=0"] if small and "data=prepared" not in sys.argv else ()
longer = ["num_train_steps=12"] if sys.argv[1:2] == ["resume"] else ()
sys.exit(main([*sys.argv[1:], *small, *here, *longer]))
"""

PYTHON = f"""#!/bin/sh
case "$1 $*" in *--steps*) small= ;; examples/*) small="--steps 4" ;; esac
XLA_FLAGS="{QUICK} $XLA_FLAGS" exec {shlex.quote(sys.executable)} "$@" $small
"""


DEMO = re.search(r"^demo:.*\n\t@\$\(BIN\)/(.*\n)", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands(page: Path) -> str:
    assert DEMO, "the Makefile has no command for the demo"
    script = "".join(BLOCK.findall(page.read_text(encoding="utf-8"))).replace("make demo\n", DEMO[1])
    return "".join(line for line, _ in itertools.groupby(script.splitlines(keepends=True)))


def run(script: str, folder: Path) -> subprocess.CompletedProcess:
    programs = folder.parent / f"{folder.name}-bin"
    programs.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, content in {"xlstm-jax": SHIM, "python": PYTHON}.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "",
        "COLUMNS": "100",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(page, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    result = run(commands(page), folder)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_command_that_fails_is_noticed(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("xlstm-jax train model.num_blocs=3\ntrue\n", tmp_path / "empty").returncode == 2


def test_commands_stand_in_blocks_that_are_run():
    """A block without a mark, or with another one for a shell, would not be."""
    for page in PAGES:
        marks = re.findall(r"^```(\S*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(marks) <= {"bash", "python", "text", "console", "yaml"}, page
        for block in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert not block.startswith(("xlstm-jax ", "make ", "pip ")), (page, block)


def test_the_python_of_the_readme_runs(unchecked_shapes):
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(block, names)
    assert names["logits"].shape == (1, 1, 256)
