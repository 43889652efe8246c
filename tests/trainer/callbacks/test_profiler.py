"""Traces are taken when they are due, and none stays open."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.callbacks import JaxProfilerConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def calls(monkeypatch):
    """What the profiler of JAX is asked to do, and when devices are waited for."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(jax, "block_until_ready", lambda x: calls.append("wait"))
    return calls


def make_profiler(path, **options):
    trainer = SimpleNamespace(log_path=path, state=SimpleNamespace(step=jnp.zeros(())))
    options = {"profile_first_step": 2, "profile_n_steps": 3, "profile_every_n_minutes": -1} | options
    profiler = JaxProfilerConfig(**options).create(trainer)
    profiler.on_training_start()
    return profiler


def take_steps(profiler, calls, steps):
    """Call the hook of steps; return after which of them a trace started or stopped."""
    events = []
    for step in steps:
        calls.clear()
        profiler.on_training_step({}, 1, step)
        events += [(call, step) for call in calls if call != "wait"]
    return events


def test_a_trace_holds_the_steps_after_the_first_one(tmp_path, calls):
    assert take_steps(make_profiler(tmp_path), calls, range(1, 20)) == [("start", 2), ("stop", 5)]


def test_a_trace_follows_another_after_some_minutes(tmp_path, calls, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    profiler = make_profiler(tmp_path, profile_every_n_minutes=2)
    events = []
    for step in range(1, 14):
        now[0] += 30.0
        events += take_steps(profiler, calls, [step])
    assert events == [("start", 2), ("stop", 5), ("start", 9), ("stop", 12)]


def test_with_no_minutes_in_between_traces_follow_at_once(tmp_path, calls):
    profiler = make_profiler(tmp_path, profile_every_n_minutes=0, profile_n_steps=1)
    events = take_steps(profiler, calls, range(1, 6))
    assert events == [("start", 1), ("stop", 2), ("start", 3), ("stop", 4), ("start", 5)]


@pytest.mark.parametrize(
    "end",
    [
        lambda profiler: profiler.on_training_epoch_end({}, 1),
        lambda profiler: profiler.on_validation_epoch_start(epoch_idx=1, step_idx=3),
        lambda profiler: profiler.finalize("error"),
    ],
    ids=["epoch", "validation", "run"],
)
def test_a_trace_ends_with_what_it_is_part_of(tmp_path, calls, end):
    profiler = make_profiler(tmp_path)
    take_steps(profiler, calls, range(1, 4))
    calls.clear()
    end(profiler)
    end(profiler)
    assert calls == ["wait", "stop"]
    assert take_steps(profiler, calls, range(4, 9)) == []


def test_a_trace_starts_when_the_devices_are_done(tmp_path, calls):
    make_profiler(tmp_path).on_training_step({}, 1, 2)
    assert calls == ["wait", "start"]


def test_a_trace_ends_even_if_the_state_is_lost(tmp_path, calls, monkeypatch):
    profiler = make_profiler(tmp_path)
    take_steps(profiler, calls, range(1, 4))
    monkeypatch.undo()
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profiler.trainer.state.step.delete()
    profiler.finalize("error")
    assert calls == ["stop"]


def test_a_trace_that_somebody_else_has_open_does_not_end_the_run(tmp_path, calls, monkeypatch, caplog):
    def fail(path):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    assert take_steps(make_profiler(tmp_path), calls, range(1, 9)) == []
    assert "no trace after step 2" in caplog.text


def test_only_the_first_process_is_traced(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert take_steps(make_profiler(tmp_path), calls, range(1, 9)) == []
    assert take_steps(make_profiler(tmp_path, main_process_only=False), calls, range(1, 9)) != []


def assert_no_trace_is_open():
    with pytest.raises(RuntimeError, match="No profile"):
        jax.profiler.stop_trace()


def test_a_run_with_several_traces_writes_them_for_tensorboard(tmp_path):
    config = JaxProfilerConfig(profile_first_step=1, profile_n_steps=1, profile_every_n_minutes=0)
    trainer = make_regression(tmp_path, callbacks=[config])
    trainer.train_model(draw_batches(3), draw_batches(1), num_epochs=2)
    assert list(tmp_path.glob("tensorboard/plugins/profile/*/*.trace.json.gz"))
    assert_no_trace_is_open()


def test_a_run_that_fails_leaves_no_trace_open(tmp_path):
    trainer = make_regression(tmp_path, callbacks=[JaxProfilerConfig(profile_first_step=1)])

    def lose_the_disk():
        yield from draw_batches(2)
        raise OSError("The disk is gone.")

    with pytest.raises(OSError, match="The disk is gone"):
        trainer.train_model(lose_the_disk(), num_train_steps=9)
    assert list(tmp_path.glob("tensorboard/plugins/profile/*/*.trace.json.gz"))
    assert_no_trace_is_open()


def test_a_profiler_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="log_path"):
        make_profiler(None)


def test_a_trace_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match="profile_n_steps is 0"):
        JaxProfilerConfig(profile_n_steps=0)


def test_the_config_has_the_documented_defaults():
    assert JaxProfilerConfig().to_dict() == {
        "every_n_epochs": -1,
        "every_n_steps": -1,
        "main_process_only": True,
        "profile_every_n_minutes": 60,
        "profile_first_step": 10,
        "profile_n_steps": 5,
        "profile_log_dir": "tensorboard",
    }
