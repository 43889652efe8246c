"""Settings can be looked up on the command line and in the reference."""

import pytest
from processes import TESTS

from xlstm_jax.cli.main import main
from xlstm_jax.cli.settings import render_page


def test_the_page_of_all_settings_is_up_to_date():
    page = TESTS.parent / "docs/reference/settings.md"
    assert page.read_text() == f"{render_page()}\n", f"xlstm-jax settings --markdown > {page}"


def test_a_key_shows_type_default_description_and_where_it_is_set(capsys):
    assert main(["settings", "model.chunk_size"]) == 0
    shown = capsys.readouterr().out
    assert "default  64" in shown
    assert "type     int" in shown
    assert "XLSTMConfig" in shown


def test_a_group_shows_all_its_settings(capsys):
    assert main(["settings", "parallel"]) == 0
    shown = capsys.readouterr().out
    assert "parallel.fsdp_axis_size = 1" in shown
    assert "Set in parallel=fsdp" in shown


def test_an_unknown_key_is_one_line_with_a_suggestion(capsys):
    assert main(["settings", "lr"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "lr: there is no such setting or group. Did you mean 'scheduler.lr'?\n"
    assert captured.out == ""


@pytest.mark.parametrize("word", ["scheduler", "scheduler=cosine"])
def test_the_help_of_a_group_shows_its_choices_and_settings(word, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help", word])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "cosine           A linear warm-up" in shown
    assert "scheduler.lr = required" in shown


def test_the_help_of_an_unknown_group_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help", "schedulr"])
    assert stop.value.code == 2
    assert "Did you mean 'scheduler'?" in capsys.readouterr().err
