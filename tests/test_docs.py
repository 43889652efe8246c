"""What the documentation names exists."""

import re

import pytest
from processes import TESTS

from xlstm_jax.import_utils import resolve_import

ROOT = TESTS.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.*-]*)`")
NAME = re.compile(r"`(xlstm_jax(?:\.\w+)+)(?:\(.*?\))?`")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b|<")
"""In paths to fill in, such as `xlstm_jax/cli/NAME.py`."""


def missing_files(text: str) -> list[str]:
    """Paths in the repository or the package that do not exist; those of runs and data have other roots."""
    missing = []
    for path in FILE.findall(text):
        roots = [root for root in (ROOT, ROOT / "xlstm_jax") if (root / path.split("/")[0]).is_dir()]
        if roots and not PLACEHOLDER.search(path) and not any(list(root.glob(path)) for root in roots):
            missing.append(path)
    return missing


def missing_names(text: str) -> list[str]:
    missing = []
    for name in NAME.findall(text):
        try:
            resolve_import(name)
        except ImportError:
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_names_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    assert missing_files(text) == []
    assert missing_names(text) == []


def test_a_file_or_name_that_does_not_exist_is_noticed():
    assert missing_files("`cli/main.py`, `xlstm_jax/cli/NAME.py`, `outputs/demo/`, `cli/no.py`") == ["cli/no.py"]
    assert missing_names("`xlstm_jax.XLSTM`, `xlstm_jax.models.nothing`") == ["xlstm_jax.models.nothing"]
