"""A run that hangs ends, and says where it was; one that gets on does not."""

import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.callbacks.watchdog import HANG_EXIT_CODE, HangWatchdogConfig

pytestmark = pytest.mark.slow

SETUP = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from xlstm_jax.trainer.callbacks.watchdog import HangWatchdogConfig
from xlstm_jax.trainer.logger.cmd_logging import setup_logging

setup_logging(Path(sys.argv[1]) / "output.log")
trainer = SimpleNamespace(log_path=Path(sys.argv[1]), global_step=3)
watchdog = HangWatchdogConfig(
    deadline_minutes=1.0 / 60, first_deadline_minutes=30.0, validation_deadline_minutes=4.0 / 60
).create(trainer)

def wait_for_a_device_that_is_gone():
    time.sleep(60)

watchdog.on_training_start()
watchdog.on_training_epoch_start(1)
"""


def run(path, code):
    """Run the hooks of a training in a process of their own."""
    script = SETUP + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)


def test_a_run_that_hangs_leaves_with_a_code_and_the_stacks_of_its_threads(tmp_path):
    process = run(
        tmp_path,
        """
        watchdog.on_training_step({}, 1, 3)
        wait_for_a_device_that_is_gone()
        """,
    )
    assert process.returncode == HANG_EXIT_CODE, process.stderr
    (report,) = tmp_path.glob("hang_*.txt")
    assert "wait_for_a_device_that_is_gone" in report.read_text()
    assert "wait_for_a_device_that_is_gone" in process.stderr
    log = (tmp_path / "output.log").read_text()
    assert "CRITICAL" in log
    assert "after step 3: the run hangs" in log


def test_a_run_that_gets_on_is_left_alone(tmp_path):
    process = run(
        tmp_path,
        """
        time.sleep(1.5)  # The first step is compiled.
        for step in range(15):
            watchdog.on_training_step({}, 1, step)
            time.sleep(0.1)
        watchdog.on_training_epoch_end({}, 1)
        watchdog.on_validation_epoch_start(epoch_idx=1, step_idx=15)
        time.sleep(1.5)
        watchdog.on_validation_epoch_end({}, epoch_idx=1, step_idx=15)
        time.sleep(1.5)  # Other callbacks have their turn.
        watchdog.on_training_step({}, 2, 16)
        watchdog.finalize("error")
        time.sleep(1.5)
        print("done")
        """,
    )
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
    assert not list(tmp_path.glob("hang_*.txt"))


def test_a_validation_that_hangs_is_noticed(tmp_path):
    process = run(
        tmp_path,
        """
        watchdog.on_training_step({}, 1, 3)
        watchdog.on_validation_epoch_start(epoch_idx=1, step_idx=3)
        wait_for_a_device_that_is_gone()
        """,
    )
    assert process.returncode == HANG_EXIT_CODE, process.stderr


def watching_threads():
    return [thread for thread in threading.enumerate() if thread.name == "hang watchdog"]


def test_nobody_watches_after_a_run_that_failed():
    trainer = make_regression(callbacks=[HangWatchdogConfig(), HangWatchdogConfig()])

    def fail(metrics, epoch, step):
        assert len(watching_threads()) == 2
        raise RuntimeError("broken")

    trainer.callbacks[1].on_training_step = fail
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train_model(draw_batches(2), num_epochs=1)
    assert watching_threads() == []


def test_a_second_run_is_watched_by_one_thread():
    watchdog = HangWatchdogConfig().create(SimpleNamespace())
    for _ in range(2):
        watchdog.on_training_start()
        assert len(watching_threads()) == 1
    watchdog.finalize("success")
    assert watching_threads() == []


@pytest.mark.parametrize("name", ["deadline_minutes", "first_deadline_minutes", "validation_deadline_minutes"])
def test_a_deadline_in_the_past_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0.0, but has to be positive"):
        HangWatchdogConfig(**{name: 0.0})
