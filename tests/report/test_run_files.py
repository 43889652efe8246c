"""The folder of a run is read as it is, whatever is missing or torn."""

import json

import pytest
from report.run_folders import write_rows, write_run

from xlstm_jax.report.curves import Curve
from xlstm_jax.report.run_files import parse_samples, read_run, read_runs
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.logger.base_logger import Logger


def test_metrics_alone_are_a_run(tmp_path):
    write_rows(tmp_path, "train", {1: {"loss_mean": 2.0}})
    run = read_run(tmp_path)
    assert run.metrics == {"train": {"loss_mean": Curve([1], [2.0])}}
    assert (run.name, run.last_step, run.status) == (tmp_path.name, 1, "running")
    assert not any((run.facts, run.configs, run.samples, run.starts, run.references, run.parameters))


def test_a_torn_line_is_left_out(tmp_path):
    path = write_rows(tmp_path, "train", {1: {"loss": 2.0}, 2: {"loss": 1.0}})
    path.write_text(path.read_text()[:-5])
    assert read_run(tmp_path).metrics["train"]["loss"] == Curve([1], [2.0])


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    path = write_rows(tmp_path, "train", {1: {"loss": 2.0}})
    path.write_text('[1]\n7\n{}\n{"log_step": null, "log_epoch": 0}\n' + path.read_text())
    assert read_run(tmp_path).metrics["train"]["loss"] == Curve([1], [2.0])


def test_lines_that_are_no_rows_are_logged(tmp_path, caplog):
    (tmp_path / "file_logs").mkdir()
    file = tmp_path / "file_logs/metrics_train.jsonl"
    file.write_text('{"log_step": 1, "log_epoch": 1, "loss": 2.0}\ngarbage\n' + "[" * 100_000 + '\n{"log_step": 2')
    assert read_run(tmp_path).metrics["train"]["loss"].steps == [1]
    assert caplog.messages == [f"Left out what is no row of metrics in {file}: 2 lines, the first is 2."]


def test_values_that_are_not_finite_are_gaps_and_those_that_are_no_numbers_are_left_out(tmp_path):
    row = {"nan": float("nan"), "null": None, "infinite": float("inf"), "text": "a", "array": [1, 2], "flag": True}
    write_rows(tmp_path, "train", {1: row})
    assert read_run(tmp_path).metrics["train"] == {
        **dict.fromkeys(("nan", "null", "infinite"), Curve([1], [None])),
        "flag": Curve([1], [1.0]),
    }


def test_a_step_that_was_logged_twice_counts_as_it_was_logged_last(tmp_path):
    path = write_rows(tmp_path, "train", {2: {"loss": 2.0}, 5: {"loss": 1.0}})
    again = {"log_step": 2, "log_epoch": 1, "loss": 3.0}
    path.write_text(path.read_text() + json.dumps(again) + "\n")
    assert read_run(tmp_path).metrics["train"]["loss"] == Curve([2, 5], [3.0, 1.0])


def test_rows_are_known_by_their_order_not_by_the_names_of_steps_and_epochs(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/metrics_val%2Fa.jsonl").write_text('{"my_step": 3, "my_epoch": 1, "loss": 1.5}\n')
    assert read_run(tmp_path).metrics == {"val/a": {"loss": Curve([3], [1.5])}}


def test_sizes_are_facts_and_not_curves(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert (run.facts["num_train_steps"], run.facts["num_params"], run.facts["num_devices"]) == (1000, 1234, 8)
    assert set(run.metrics) == {"train", "val", "val_extended"}


@pytest.mark.parametrize("file", ["environment.json", "parameters.json", "file_logs/config.json", "heartbeat.json"])
@pytest.mark.parametrize("content", ['{"starts": [', '"text"', "[[1]]", '{"starts": 3, "references": 4}'])
def test_a_file_that_is_torn_or_not_ours_reads_as_empty(tmp_path, file, content):
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(content)
    run = read_run(folder)
    assert run.last_step == 400
    if file == "environment.json":
        assert run.starts == []
        assert run.references == {}


def test_all_configs_are_read(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("data:\n  name: wiki\n")
    assert read_run(folder).configs == {
        "config.yaml": {"data": {"name": "wiki"}},
        "file_logs/config.json": {"optimizer": {"lr": 0.01, "name": "adamw"}, "seed": 0},
    }


class Echo:
    """A trainer whose model says what the callback for samples is to write."""

    def __init__(self, path):
        self.log_path, self.logger = path, Logger(None)

    def get_generate_fn(self, **options):
        return None


@pytest.mark.parametrize(
    "texts",
    [
        [("Once", " upon\n\na time\n")],
        [("a'b", "x"), ('say "hi"', ""), ("both ' and \"", "\n"), ("line\nbreak", "--- not a prompt\n")],
    ],
)
def test_samples_are_read_as_they_were_written(tmp_path, monkeypatch, texts):
    write_rows(tmp_path, "train", {1: {"loss": 2.0}})
    callback = TextSamplesConfig(prompts=["unused"]).create(Echo(tmp_path))
    monkeypatch.setattr(callback, "generate", lambda: texts)
    callback.write(30)
    (samples,) = read_run(tmp_path).samples
    assert (samples.step, samples.texts) == (30, texts)


def test_samples_come_in_the_order_of_steps_and_are_cut_if_they_are_long(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "samples/step_1000.txt").write_text("--- 'a'\n" + "x" * 10_000 + "\n")
    (folder / "samples/notes.txt").write_text("--- 'a'\nb\n")
    samples = read_run(folder).samples
    assert [of_step.step for of_step in samples] == [100, 200, 1000]
    assert samples[-1].texts == [("a", "x" * 4000 + " …")]
    assert parse_samples("no prompt") == []


LOG = "[time] - Starting epoch 1 at step 0 in mode train.\n"


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (LOG, "running"),
        (f"{LOG}[time] - The run ended with status success.\nmore\n", "finished"),
        (f"{LOG}[time] - The run ended with status interrupted.\n", "interrupted"),
        (f"{LOG}[time] - The run ended with status error.\n", "failed"),
        (f"{LOG}[time] - The run ended with status nan.\n{LOG}", "running"),
    ],
)
def test_without_a_record_of_starts_the_log_says_how_the_run_ended(tmp_path, log, status):
    write_rows(tmp_path, "train", {1: {"loss": 2.0}})
    (tmp_path / "output.log").write_text(log)
    assert read_run(tmp_path).status == status


@pytest.mark.parametrize(("recorded", "status"), [(None, "running"), ("nan", "diverged"), ("success", "finished")])
def test_the_last_start_says_how_the_run_ended(tmp_path, recorded, status):
    write_rows(tmp_path, "train", {1: {"loss": 2.0}})
    starts = [{"status": "interrupted"}, {"status": recorded}]
    (tmp_path / "environment.json").write_text(json.dumps({"starts": starts}))
    assert read_run(tmp_path).status == status


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / name for name in ("a/one/run", "b/one/run", "b/two/run", "alone")]
    for folder in folders:
        write_rows(folder, "train", {1: {"loss": 2.0}})
    names = [run.name for run in read_runs([*folders, folders[0] / "../run"])]
    assert names == ["a/one/run", "b/one/run", "two/run", "alone"]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} is not the folder of a run.*file_logs/metrics_<mode>\.jsonl"):
        read_run(tmp_path)
