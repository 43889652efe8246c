"""What commands print to be copied can be copied."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from rich.panel import Panel
from rich.table import Table

from xlstm_jax.cli.shared.header import describe_end
from xlstm_jax.cli.shared.screen import as_command, as_value, describe_error, print_out


def test_a_command_is_what_a_shell_reads_as_its_words():
    words = ["resume", Path("my runs/größe"), "callbacks=[default]", "name=it's mine"]
    assert shlex.split(as_command(*words)) == ["xlstm-jax", *map(str, words)]


def test_a_table_is_wider_than_the_terminal_if_a_word_needs_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, number = "/a/long/path" * 9, "1,234,567,890"
    table = Table.grid(padding=(0, 2))
    table.add_row("folder", path)
    table.add_row("words", f"{'word ' * 40}{number}")
    for content in (table, Panel(table, title="a run")):
        print_out(content)
        shown = capsys.readouterr().out
        assert path in shown
        assert number in shown
        assert max(map(len, shown.splitlines())) <= len(path) + 30  # Sentences are wrapped.
    print_out("a line " * 20)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        *("out", "/x/y-z.1", "my runs", "größe", "it's", "a,b", "[x]", "a=b", "12", "1e5", ".5", "null", "True", ""),
        *("C:\\x", "${a}", "tail\\", "both\\'s", "~/here", "$HOME"),
    ],
)
def test_a_value_is_read_by_hydra_as_the_text_that_it_is(text):
    override = OverridesParser.create().parse_override(f"++key={as_value(text)}")
    value = override.value()
    assert (value.text if isinstance(value, QuotedString) else value) == text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory."),
        (OSError("by a library"), "by a library"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_is_one_line_without_the_name_of_its_class(error, line):
    assert describe_error(error) == line


def test_the_commands_after_a_run_can_be_copied(tmp_path, monkeypatch, unchecked_shapes):
    monkeypatch.chdir(tmp_path)
    callback = SimpleNamespace(prompts=["It's a\nlong „way“ "])
    run = SimpleNamespace(
        folder=tmp_path / "my runs/größe",
        trainer=SimpleNamespace(status="success", global_step=4),
        config=SimpleNamespace(name="mine", num_train_steps=4, trainer=SimpleNamespace(callbacks=[callback])),
    )
    shown = shlex.split(describe_end(run).split("Next:\n")[1])
    assert shown[:5] == ["xlstm-jax", "generate", "my runs/größe", "--prompt", callback.prompts[0]]
    assert shown[5:9] == ["xlstm-jax", "resume", "my runs/größe", "num_train_steps=8"]
