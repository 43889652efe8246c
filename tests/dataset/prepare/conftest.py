"""The source and the output of most tests of `prepare`."""

import pytest
from dataset.prepare.helpers import TEXTS, json_lines


@pytest.fixture
def source(tmp_path):
    """A file of documents."""
    file = tmp_path / "source.jsonl"
    file.write_text(json_lines(TEXTS))
    return file


@pytest.fixture
def output(tmp_path):
    """The output folder."""
    return tmp_path / "output"
