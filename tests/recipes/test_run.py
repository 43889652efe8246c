"""The folder of a run: which one is the latest, and who may train in it."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.recipes.lock import locked
from xlstm_jax.recipes.run import _check_monitored, _check_tokenizer_of_source, _load_state, find_latest
from xlstm_jax.recipes.run_vocabulary import write_vocabulary
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.metrics import update_metrics


def make_run(folder, time, *, has_checkpoint):
    (folder / "checkpoints/checkpoint_2" if has_checkpoint else folder).mkdir(parents=True)
    (folder / "config.yaml").touch()
    os.utime(folder / "config.yaml", (time, time))


def test_the_latest_run_is_one_that_has_checkpoints(tmp_path):
    make_run(tmp_path / "old", 1, has_checkpoint=True)
    make_run(tmp_path / "new", 2, has_checkpoint=True)
    make_run(tmp_path / "never_started", 3, has_checkpoint=False)
    assert find_latest(tmp_path) == tmp_path / "new"


def test_without_any_checkpoint_the_latest_run_is_that_of_the_latest_file(tmp_path):
    make_run(tmp_path / "old", 1, has_checkpoint=False)
    make_run(tmp_path / "new", 2, has_checkpoint=False)
    assert find_latest(tmp_path) == tmp_path / "new"


def test_a_folder_is_for_one_run_at_a_time(tmp_path):
    refused = pytest.raises(ConfigError, match=f"Another process trains in {tmp_path}")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_file_system_without_locks_does_not_hinder_a_run(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with locked(tmp_path):
        pass


class LoadingTrainer:
    """Stands for a trainer at a step; validation data of another run do not fit."""

    global_step = 4

    def __init__(self, problem=None):
        self.problem, self.loaded = problem, {}

    def load_model(self, step, raise_if_not_found):
        pass

    def load_data_loaders(self, step, **loaders):
        if self.problem and "val_loader" in loaders:
            raise ValueError(self.problem)
        self.loaded |= loaders


def test_a_run_resumes_with_all_its_loaders_where_they_were(unchecked_shapes):
    trainer = LoadingTrainer()
    _load_state(trainer, None, "train", {"a": "val"}, -1)
    assert trainer.loaded == {"train_loader": "train", "val_loader": {"a": "val"}}


@pytest.mark.parametrize(
    ("init_optimizer", "source"),
    [(False, "parameters of other/run, step 30"), (True, "parameters and optimizer state of other/run, step 30")],
)
def test_a_run_that_starts_from_another_one_reports_what_it_loaded(init_optimizer, source, unchecked_shapes):
    trainer, config = LoadingTrainer(), SimpleNamespace(init_from=Path("other/run"), init_optimizer=init_optimizer)
    trainer.global_step = 0
    trainer.load_pretrained_model = lambda path, load_optimizer: 30
    assert _load_state(trainer, config, "train", "val", -1) == source


def test_a_run_that_starts_from_one_with_another_tokenizer_is_refused(tmp_path):
    write_vocabulary(tmp_path, Vocabulary(300, "the earlier run", None, "a" * 64))
    _check_tokenizer_of_source(tmp_path, Vocabulary(300, "the data", None, "a" * 64))
    _check_tokenizer_of_source(tmp_path / "without", Vocabulary(300, "the data", None, "b" * 64))
    with pytest.raises(ConfigError, match="is another tokenizer than"):
        _check_tokenizer_of_source(tmp_path, Vocabulary(300, "the data", None, "b" * 64))


def test_a_run_that_resumes_with_other_validation_data_says_so(caplog, unchecked_shapes):
    trainer = LoadingTrainer("This state belongs to other data")
    _load_state(trainer, None, "train", "val", -1)
    assert trainer.loaded == {"train_loader": "train"}
    assert "other validation data, which starts from its beginning: This state belongs to other data" in caplog.text


def monitoring(monitor):
    """Stand for a trainer whose validations report a loss."""
    return SimpleNamespace(
        trainer_config=SimpleNamespace(callbacks=[ModelCheckpointConfig(monitor=monitor)]),
        init_eval_metrics=lambda: update_metrics(None, {"loss": {"value": 1.0, "count": 1}}, ("mean_nopostfix",)),
        get_metric_postprocess_fn=lambda: dict,
    )


def test_a_metric_that_no_validation_reports_is_not_monitored(unchecked_shapes):
    _check_monitored(monitoring("loss"), "loader")
    _check_monitored(monitoring("dclm_loss"), {"dclm": "loader"})
    _check_monitored(monitoring("los"), None)
    with pytest.raises(ConfigError, match=r"to monitor 'los', but validations report epoch_time, loss: .*'loss'\?"):
        _check_monitored(monitoring("los"), "loader")
