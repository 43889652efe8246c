"""The command `report` writes one page for all runs that it is given, and says where."""

import argparse

import pytest
from trainer.report.run_folders import write_run

from xlstm_jax.cli import report


def main(*arguments):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args(list(map(str, arguments))))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "a/run", num_steps=20)


def test_the_report_of_a_run_lies_in_its_folder(run, capsys):
    assert main(run) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_report_of_several_runs_lies_in_the_current_folder_and_names_them(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path / "b/run", num_steps=20)
    assert main(run, other) == 0
    assert capsys.readouterr().out == "report.html\n"
    page = (tmp_path / "report.html").read_text()
    assert "a/run" in page
    assert "b/run" in page


def test_the_report_can_lie_anywhere(run, tmp_path):
    assert main(run, "--output", tmp_path / "new/page.html") == 0
    assert (tmp_path / "new/page.html").exists()
    assert not (run / "report.html").exists()


def test_a_folder_without_metrics_is_named_in_one_line(run, tmp_path, capsys):
    assert main(run, tmp_path / "none") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{tmp_path / 'none'} is not the folder of a run" in captured.err
    assert "file_logs/metrics_<mode>.jsonl" in captured.err


def test_a_place_that_cannot_be_written_is_an_error_without_a_traceback(run, capsys):
    assert main(run, "--output", run / "parameters.json/page.html") == 1
    assert "parameters.json" in capsys.readouterr().err
