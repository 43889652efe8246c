"""Progress is shown in a terminal only."""

from dataset.prepare.helpers import prepare_here


def test_progress_is_shown_in_a_terminal_only(source, output, tmp_path, capsys, monkeypatch):
    prepare_here(source, output)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    prepare_here(source, tmp_path / "shown")
    shown = capsys.readouterr().err
    assert "300 documents" in shown
    assert "MB/s" in shown
    assert "100 %" in shown
