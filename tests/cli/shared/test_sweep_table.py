"""A sweep ends with a line for each of its runs."""

import json
from pathlib import Path

from xlstm_jax.cli.shared.sweep_table import SweepRun, describe_sweep


def write_metrics(folder: Path, mode: str, **metrics: float) -> None:
    file = folder / f"file_logs/metrics_{mode}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"log_step": 4, "log_epoch": 1, **metrics}) + "\n")


def test_a_run_is_a_line_with_the_settings_that_differ_its_results_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "swept/0", "train", loss=2.5)
    write_metrics(tmp_path / "swept/0", "val", loss=2.25, perplexity=9.0)
    write_metrics(tmp_path / "swept/1", "train", loss=12345.678)
    overrides = [[f"++scheduler.lr={lr}", "experiment=demo", f"trainer.seed={seed}"] for seed, lr in enumerate("1239")]
    codes = [0, 3, 1, 130]
    runs = [SweepRun(tmp_path / f"swept/{number}", overrides[number], code) for number, code in enumerate(codes)]
    header, *lines = describe_sweep(runs).splitlines()
    assert header.split() == ["run", "settings", "step", "val", "loss", "train", "loss", "status"]
    assert [line.split() for line in lines] == [
        ["swept/0", "scheduler.lr=1", "trainer.seed=0", "4", "2.25", "2.5", "done"],
        ["swept/1", "scheduler.lr=2", "trainer.seed=1", "4", "–", "1.235e+04", "bad", "step"],
        ["swept/2", "scheduler.lr=3", "trainer.seed=2", "–", "–", "–", "failed"],
        ["swept/3", "scheduler.lr=9", "trainer.seed=3", "–", "–", "–", "stopped", "(130)"],
    ]
    assert len({line.index("trainer") for line in lines}) == 1


def test_a_sweep_of_one_run_shows_all_its_settings(tmp_path):
    assert "name=a seed=1" in describe_sweep([SweepRun(tmp_path, ["name=a", "++seed=1"], 0)])
