"""Runs from the command line: composed, trained, stopped, resumed, sampled from, swept over and submitted."""

import contextlib
import fcntl
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from processes import TESTS, wait_until

from xlstm_jax.cli.main import main
from xlstm_jax.cli.shared import header
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.shards.records import ShardError
from xlstm_jax.recipes import compose as compose_module
from xlstm_jax.recipes import run_config
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_config import build_run
from xlstm_jax.recipes.run_vocabulary import read_vocabulary

pytestmark = pytest.mark.slow

TINY = (
    "model.embedding_dim=32",
    "model.num_heads=2",
    "model.num_blocks=2",
    "data=text",
    "data.prepare.sources=[poem.txt]",
    "data.prepare.train_vocab_size=300",
    "data.prepare.validation_share=0.3",
    "data.prepare.max_document_bytes=200",
    "data.prepare.num_workers=0",
    "batch_size=8",
    "context_length=32",
    "num_train_steps=6",
    "scheduler.warmup_steps=2",
    "logger.log_every_n_steps=2",
    "trainer.check_val_every_n_steps=3",
    "callbacks=[default,samples]",
    "callbacks.samples.max_length=16",
)


ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(TESTS.parent)}


def write_poem(folder: Path) -> None:
    lines = [
        f"On day {day} the ship of {day * 7 % 13} sails had {day * 31 % 17} stars above it.\n" for day in range(150)
    ]
    (folder / "poem.txt").write_text("".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder with a text, to run commands in."""
    write_poem(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A folder in which a run was trained, and what was shown; a test that goes on with it takes a copy."""
    folder = tmp_path_factory.mktemp("trained")
    write_poem(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr(header, "gpu_problem", lambda: "a word on GPUs")
        assert main(["train", *TINY, "name=poem", "hydra.run.dir=outputs/here"]) == 0
    return folder, shown.getvalue()


def losses(run: Path) -> list[str]:
    """The rows of the validations of a run, without times."""
    lines = (run / "file_logs/metrics_val.jsonl").read_text().splitlines()
    return [re.sub(r'"epoch_time": [^,}]*', "", line) for line in lines]


def test_a_run_trains_explains_itself_and_says_what_comes_next(trained):
    folder, shown = trained
    words = [
        "devices",
        "8 × cpu",
        "a word on GPUs",
        "chunkwise",
        "parameters",
        "FLOPs per token for MFU",
        "performance",
    ]
    for word in [*words, "memory", "compressors", "primed xz", "estimated"]:
        assert word in shown.split("step 2/6")[0], word
    assert re.search(r"startup \d+\.\d s: .*first step \d.* \(\d+ programs compiled", shown)
    assert re.search(r"val at step 3 .*bits per byte [\d.]+ · gzip [\d.]+ · xz [\d.]+ · primed xz [\d.]+", shown)
    assert "'The ' continued at step 6" in shown
    assert "xlstm-jax generate outputs/here" in shown
    assert "xlstm-jax resume outputs/here num_train_steps=12" in shown
    assert "report  outputs/here/report.html" in shown
    run = folder / "outputs/here"
    for name in ["config.yaml", "environment.json", "parameters.json", "report.html", "output.log", "heartbeat.json"]:
        assert (run / name).is_file(), name
    assert (run / "samples/step_6.txt").is_file()
    assert (run / "file_logs/metrics_train.csv").is_file()
    assert (run / "checkpoints/checkpoint_6").is_dir()
    assert "[INFO]" not in shown  # that is in output.log
    assert build_run(yaml.safe_load((run / "config.yaml").read_text())).num_train_steps == 6


def test_a_longer_resumed_run_and_generated_text(trained, folder, capsys):
    shutil.copytree(trained[0] / "outputs", folder / "outputs")
    assert main(["resume", "latest", "num_train_steps=9"]) == 0
    shown = capsys.readouterr().out
    assert "poem resumes from step 6" in shown
    assert "poem is done at step 9" in shown
    settings = yaml.safe_load((folder / "outputs/here/config.yaml").read_text())
    assert (settings["num_train_steps"], settings["scheduler"]["decay_steps"]) == (9, 9)

    texts = []
    for options in (["-t", "0"], ["-t", "0"], ["-t", "2", "--seed", "3"], ["-t", "2", "--top-k", "1"]):
        assert main(["generate", "outputs/here", "-p", "On day", "-n", "12", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("On day") for text in texts)
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_the_header_says_why_the_kernels_are_not_used(trained):
    assert "the chunkwise form in plain JAX, as this CPU is not a Hopper GPU" in trained[1]


def test_a_run_keeps_what_hydra_says_about_its_start(trained):
    run = trained[0] / "outputs/here/.hydra"
    assert "name=poem" in "".join(yaml.safe_load((run / "overrides.yaml").read_text()))
    assert yaml.safe_load((run / "hydra.yaml").read_text())["hydra"]["mode"] == "RUN"


@pytest.mark.parametrize("command", [["resume", "outputs/here"], ["train", *TINY, "hydra.run.dir=outputs/here"]])
def test_a_run_that_is_refused_leaves_the_settings_as_they_were(command, trained, folder, capsys):
    shutil.copytree(trained[0] / "outputs", folder / "outputs")
    files = [folder / "outputs/here" / name for name in ("config.yaml", ".hydra/config.yaml", ".hydra/overrides.yaml")]
    before = [file.read_bytes() for file in files]
    assert main([*command, "model.embedding_dim=64"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "embedding_dim" in line
    assert "start a new run from its parameters: xlstm-jax train ... init_from=" in line
    assert [file.read_bytes() for file in files] == before


def test_a_folder_in_which_another_process_trains_is_refused(trained, folder, capsys):
    shutil.copytree(trained[0] / "outputs", folder / "outputs")
    with (folder / "outputs/here/.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["resume", "outputs/here", "num_train_steps=8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Another process trains in {folder / 'outputs/here'}")


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(folder, capsys):
    words = [*TINY, "num_train_steps=40", "trainer.check_val_every_n_steps=20"]
    assert main(["train", *words, "hydra.run.dir=whole"]) == 0
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "train", *words, "hydra.run.dir=cut"]
    log = folder / "shown.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT)
        wait_until(lambda: "step 4/40" in log.read_text() or process.poll() is not None, seconds=240)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert re.search(r"Stopped at step \d+ and saved a checkpoint. To resume:\n  xlstm-jax resume cut", log.read_text())
    capsys.readouterr()
    assert main(["resume", "cut"]) == 0
    assert "resumes from step" in capsys.readouterr().out
    assert losses(folder / "cut")[-1] == losses(folder / "whole")[-1]


def test_a_wrong_setting_is_one_line_and_leaves_no_folder(folder, capsys):
    assert main(["train", *TINY, "model.num_blocs=3"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "model.num_blocs: XLSTMConfig has no such field. Did you mean 'num_blocks'?\n"
    assert captured.out == ""
    assert not (folder / "outputs").exists()


def test_data_that_is_not_there_is_one_line(folder, capsys):
    assert main(["train", *TINY, "data.prepare.sources=[none.txt]"]) == 1
    assert "none.txt" in capsys.readouterr().err.splitlines()[0]


def test_a_run_is_composed_and_built_once(folder, monkeypatch):
    composed, built = [], []
    load, build = compose_module._load, run_config.build_run
    monkeypatch.setattr(compose_module, "_load", lambda words: composed.append(words) or load(words))
    monkeypatch.setattr(run_config, "build_run", lambda values: built.append(values) or build(values))
    monkeypatch.setattr("xlstm_jax.recipes.run.build_run", lambda _: pytest.fail("a run was built again"))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("xlstm_jax.recipes.run.initialize_mesh", stop)
    assert main(["train", *TINY]) == 130
    assert (len(composed), len(built)) == (1, 1)


def test_the_settings_of_a_run_are_printed_with_references_resolved(folder, capsys):
    assert main(["train", *TINY, "--cfg", "job"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings == compose(TINY)
    assert not (folder / "outputs").exists()


def test_a_sweep_is_a_run_for_each_value(folder, capsys):
    words = [*TINY[:-2], "num_train_steps=4", "trainer.check_val_every_n_steps=-1"]
    assert main(["train", *words, "trainer.seed=3,5", "-m", "hydra.sweep.dir=swept"]) == 0
    seeds = [yaml.safe_load((folder / f"swept/{n}/config.yaml").read_text())["trainer"]["seed"] for n in (0, 1)]
    assert seeds == [3, 5]
    assert all((folder / f"swept/{n}/checkpoints/checkpoint_4").is_dir() for n in (0, 1))


@pytest.mark.parametrize(("codes", "num_runs", "code"), [([3, 0, 1], 3, 3), ([0, 0, 0], 3, 0), ([0, 130, 0], 2, 130)])
def test_only_a_signal_ends_a_sweep_before_its_last_run(codes, num_runs, code, folder, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("xlstm_jax.cli.train.train_in", lambda *run: started.append(run) or codes[len(started) - 1])
    assert main(["train", "-m", *TINY, "trainer.seed=3,5,7"]) == code
    assert len(started) == num_runs
    lines = capsys.readouterr().out.splitlines()[-num_runs:]
    assert [word for line in lines for word in line.split() if "seed" in word] == [
        f"trainer.seed={seed}" for seed in (3, 5, 7)[:num_runs]
    ]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "a.txt"), ShardError("The shard is cut.")])
def test_an_error_of_data_or_disk_during_training_is_one_line(error, trained, folder, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    shutil.copytree(trained[0] / "outputs", folder / "outputs")
    monkeypatch.setattr("xlstm_jax.recipes.run.Run.compile", fail)
    assert main(["resume", "latest", "num_train_steps=9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line in ("a.txt: No space left on device.", "The shard is cut.")


def test_every_run_of_a_sweep_is_checked_before_the_first_one_starts(folder, capsys, monkeypatch):
    monkeypatch.setattr("xlstm_jax.cli.train.train_in", lambda *_: pytest.fail("a run was started"))
    assert main(["train", "-m", *TINY, "scheduler.lr=1e-3,fast"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "Run 1 of the sweep: scheduler.lr: a number is needed, not 'fast'.\n"
    assert captured.out == ""
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.run.dir=poem.txt/run", "The folder poem.txt/run cannot be made (Not a directory)"),
        ("model=null", "model: a choice is needed, not null"),
    ],
)
def test_what_hydra_cannot_start_is_one_line(word, message, folder, capsys):
    assert main(["train", *TINY, word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("prepare_data", "Start again with:  xlstm-jax resume 'my run'"),
        ("initialize_mesh", "with the same command, and in this folder with:  'hydra.run.dir=my run'"),
    ],
)
def test_a_run_that_was_stopped_at_its_start_says_how_to_begin_again(where, advice, folder, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"xlstm_jax.recipes.run.{where}", stop)
    assert main(["train", *TINY, "hydra.run.dir=my run"]) == 130
    assert advice in capsys.readouterr().out
    assert (folder / "my run/config.yaml").exists() == ("resume" in advice)


def test_a_run_that_diverges_has_a_code_of_its_own(folder, capsys):
    assert main(["train", *TINY, "num_train_steps=20", "scheduler.lr=1e30", "optimizer.grad_clip_norm=null"]) == 3
    assert "stopped at a bad step" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["resume", "generate"])
def test_a_folder_without_a_run_is_one_line(command, folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a text"))
    assert main([command, str(folder)]) == 2
    assert f"There is no run in {folder} or below it" in capsys.readouterr().err
    assert main([command, "latest"]) == 2
    assert "There is no run in outputs or below it" in capsys.readouterr().err


def test_a_sweep_can_be_submitted_as_jobs(folder):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [*TINY[:-2], "num_train_steps=4", "trainer.check_val_every_n_steps=-1"]
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "train", "-m", *words, "hydra/launcher=submitit_local"]
    subprocess.run([*command, "hydra.sweep.dir=jobs"], check=True, timeout=300, capture_output=True, env=ENVIRONMENT)
    assert (folder / "jobs/0/checkpoints/checkpoint_4").is_dir()


def test_the_slurm_launcher_asks_for_time_to_save(folder, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert main(["train", "launcher=slurm", "--cfg", "hydra"]) == 0
    launcher = yaml.safe_load(capsys.readouterr().out)["hydra"]["launcher"]
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert launcher["signal_delay_s"] == 120


@pytest.mark.parametrize("wrong", ["data.prepare.sources=[missing.txt]", "parallel.model_axis_size=3"])
def test_a_rejected_run_leaves_no_folder(wrong, folder):
    assert main(["train", *TINY, wrong]) != 0
    assert not (folder / "outputs").exists()


def test_a_rejected_run_leaves_what_was_in_its_folder(folder):
    (folder / "mine").mkdir()
    (folder / "mine/notes.txt").touch()
    assert main(["train", *TINY, "data.prepare.sources=[missing.txt]", "hydra.run.dir=mine"]) == 1
    assert [path.name for path in (folder / "mine").iterdir()] == ["notes.txt"]


def test_a_run_that_is_rejected_once_its_data_is_prepared_can_be_resumed(folder, monkeypatch):
    def fail(*_):
        raise ValueError("nothing to measure")

    monkeypatch.setattr("xlstm_jax.recipes.run._measure_validation", fail)
    assert main(["train", *TINY, "hydra.run.dir=mine"]) == 1
    assert (folder / "mine/config.yaml").is_file()
    assert (folder / "mine/data/train/manifest.json").is_file()


PREPARED = {"train_vocab_size": 340, "validation_share": 0.3, "max_document_bytes": 200, "num_workers": 0}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A text as shards of a tokenizer that was trained on it."""
    folder = tmp_path_factory.mktemp("shards")
    write_poem(folder)
    prepare(folder / "poem.txt", folder / "mine", **PREPARED)
    return folder / "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.tokenizer_path=byte"], "data.tokenizer_path: tokenizer 'byte', digest "),
        (["model.vocab_size=320"], "data: there are 340 token ids ("),
        (["-m", "model.vocab_size=384,320"], "Run 1 of the sweep: data: there are 340 token ids ("),
    ],
    ids=["another tokenizer", "too few ids", "a sweep"],
)
def test_a_model_that_does_not_fit_the_shards_is_refused_before_anything_starts(words, message, shards, folder, capsys):
    assert main(["train", "data=prepared", f"data.data_path={shards}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not (folder / "outputs").exists()


def test_a_run_is_not_resumed_with_fewer_ids_than_its_data_has(shards, folder, capsys):
    (folder / "run").mkdir()
    settings = compose(["data=prepared", f"data.data_path={shards}"])
    (folder / "run/config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["resume", "run", "model.vocab_size=320"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data: there are 340 token ids (")


def test_data_whose_vocabulary_shows_late_is_refused_before_training(shards, folder, capsys, monkeypatch):
    monkeypatch.setattr(run_config, "is_available_offline", lambda _: False)
    words = ["model.embedding_dim=16", "model.num_heads=2", "model.num_blocks=1", "batch_size=8", "context_length=16"]
    assert main(["train", "data=prepared", f"data.data_path={shards}", "model.vocab_size=320", *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train: there are 340 token ids (")
    assert not (folder / "outputs").exists()


def test_a_run_keeps_the_vocabulary_that_it_was_trained_on(trained):
    run = trained[0] / "outputs/here"
    manifest = read_manifest(run / "data/train")
    vocabulary = read_vocabulary(run)
    assert (vocabulary.size, vocabulary.digest) == (manifest.vocab_size, manifest.tokenizer_digest)
    assert vocabulary.encoder.tokenizer_path == str(run / "data/tokenizer")
