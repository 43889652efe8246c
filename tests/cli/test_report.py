"""The command `report` writes one page for all runs that it is given, and says where."""

import argparse
import os

import pytest
from report.run_folders import write_run

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


def test_what_is_no_run_is_skipped_with_a_line_that_names_it(run, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    assert main(run, tmp_path / "none", tmp_path / "b") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{run / 'report.html'}\n"
    missing, empty = captured.err.splitlines()
    assert missing == f"Skipped: There is no folder {tmp_path / 'none'}: give the folder of a run, or `latest`."
    assert empty.startswith(f"Skipped: There is no run in {tmp_path / 'b'} or below it")


def test_without_any_run_there_is_no_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main("none", "nothing") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 2)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["latest", "outputs/demo", "outputs"])
def test_the_latest_run_of_a_folder_can_be_meant(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index, time in enumerate((200, 300, 100)):
        folder = write_run(tmp_path / f"outputs/demo/{index}", num_steps=20)
        (folder / "config.yaml").write_text("name: demo")
        for file in folder.rglob("*"):
            os.utime(file, (time, time))
    assert main(name) == 0
    assert capsys.readouterr().out.strip().endswith("outputs/demo/1/report.html")


def test_a_place_that_cannot_be_written_is_an_error_without_a_traceback(run, capsys):
    assert main(run, "--output", run / "parameters.json/page.html") == 1
    assert "parameters.json" in capsys.readouterr().err
