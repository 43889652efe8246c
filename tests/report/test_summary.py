"""The key numbers of a run are those of its files."""

import json

import pytest
from report.run_folders import write_rows, write_run

from xlstm_jax.report.run_files import read_run
from xlstm_jax.report.summary import compact, config_differences, duration, key_numbers


def numbers(folder):
    return {number.label: (number.text, number.note) for number in key_numbers(read_run(folder))}


def test_the_best_validation_and_the_last_training_loss_count(tmp_path):
    write_rows(tmp_path, "train", {1: {"loss_mean": 1.0}, 2: {"loss_mean": 2.0}, 3: {"loss_mean": None}})
    write_rows(tmp_path, "val", {1: {"loss": 3.0}, 2: {"loss": 1.5}, 3: {"loss": 1.75}})
    assert numbers(tmp_path) == {
        "Training loss": ("2.000", "last"),
        "Validation loss": ("1.500", "best, at step 2; last 1.750"),
    }


def test_bits_per_byte_stand_beside_those_of_compressors(tmp_path):
    text, note = numbers(write_run(tmp_path / "run"))["Validation bits per byte"]
    assert float(text) < 2
    assert "gzip\u00a02.11 · xz\u00a01.6" in note


def test_speed_and_sizes_are_told(tmp_path):
    found = numbers(write_run(tmp_path / "run"))
    assert found["Tokens seen"] == ("400k", "324 per parameter")
    assert found["Time"] == ("7 min", "")
    assert found["Tokens per second"] == ("1.003k", "MFU 40.0%, 6N-MFU 50.0%")
    assert found["Goodput"] == ("97.6%", "compile took 2.4%")
    assert found["Parameters"] == ("1.234k", "in 1 array")
    assert found["Devices"] == ("8", "")


def test_configs_differ_where_their_values_do(tmp_path):
    folders = [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    config = json.loads((folders[1] / "file_logs/config.json").read_text())
    (folders[1] / "file_logs/config.json").write_text(json.dumps(config | {"more": [1, 2]}))
    runs = [read_run(folder) for folder in folders]
    assert config_differences(runs) == {"optimizer.lr": ["0.1", "0.2"], "more": [None, "[1, 2]"]}
    assert config_differences(runs[:1] * 2) == {}


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.00012, "0.00012"), (12.345, "12.35"), (999.96, "1k"), (1.31e9, "1.31B")]
)
def test_a_number_is_written_with_the_letter_of_its_size(number, text):
    assert compact(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.23, "1.2 s"), (59, "59 s"), (90, "2 min"), (7500, "2 h 05 min"), (86400 * 3 + 3600, "3 d 1 h")],
)
def test_a_duration_is_written_as_one_reads_it(seconds, text):
    assert duration(seconds) == text
