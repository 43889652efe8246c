"""Runs that are compared are called by their names and by what is different about them."""

import pytest
import yaml
from report.run_folders import write_run

from xlstm_jax.report.labels import with_labels
from xlstm_jax.report.page import build_page
from xlstm_jax.report.run_files import read_run, read_runs


def write(folder, settings):
    write_run(folder, num_steps=20)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (
            [{"name": "demo", "scheduler": {"lr": 0.1}}, {"name": "demo", "scheduler": {"lr": 0.2}}],
            ["demo · lr=0.1", "demo · lr=0.2"],
        ),
        ([{"name": "one", "a": 1}, {"name": "two", "a": 1}], ["one", "two"]),
        ([{"name": "demo"}, {"name": "demo"}], ["demo (0)", "demo (1)"]),
        (
            [{"name": "demo", "a": {"x": 1}, "b": {"x": 1}}, {"name": "demo", "a": {"x": 2}}],
            ["demo · a.x=1 · b.x=1", "demo · a.x=2 · b.x=–"],
        ),
    ],
    ids=["a setting", "names", "nothing", "two settings of the same name"],
)
def test_compared_runs_are_labelled_by_name_and_by_the_settings_that_differ(tmp_path, settings, labels):
    folders = [write(tmp_path / str(index), each) for index, each in enumerate(settings)]
    assert [run.name for run in with_labels(read_runs(folders))] == labels


def test_the_labels_are_those_of_the_page(tmp_path):
    folders = [write(tmp_path / str(lr), {"name": "demo", "lr": lr}) for lr in (1, 2)]
    page = build_page(read_runs(folders))
    assert "demo · lr=1" in page.split("<nav")[1].split("</nav>")[0]


@pytest.mark.parametrize(("status", "refreshes"), [("running", True), ("finished", False)])
def test_the_page_of_a_run_is_loaded_anew_only_while_it_runs(tmp_path, status, refreshes):
    folder = write_run(tmp_path / "run", num_steps=20)
    if status == "running":
        (folder / "environment.json").unlink()
    run = read_run(folder)
    assert run.status == status
    assert ('http-equiv="refresh"' in build_page([run])) == refreshes
