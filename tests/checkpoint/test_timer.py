"""A checkpoint is due once the last one is old enough."""

import pytest

from xlstm_jax.checkpoint.timer import CheckpointTimer


class Clock:
    """Tells the time and counts how often it was asked."""

    def __init__(self):
        self.seconds = 0.0
        self.num_asked = 0

    def __call__(self):
        self.num_asked += 1
        return self.seconds


@pytest.mark.parametrize("seconds_per_step", [0.1, 1.0, 7.0])
def test_checkpoints_are_due_every_few_minutes(seconds_per_step):
    clock = Clock()
    timer = CheckpointTimer(2.0, now=clock)
    due = []
    for step in range(1, int(1000 / seconds_per_step)):
        clock.seconds += seconds_per_step
        if timer.is_due(step):
            due.append(clock.seconds)
            timer.restart()
    assert len(due) >= 7
    assert all(
        120 <= later - earlier <= 120 + 2 * seconds_per_step for earlier, later in zip([0, *due], due, strict=False)
    )


def test_the_clock_is_asked_at_few_steps():
    clock = Clock()
    timer = CheckpointTimer(10.0, now=clock)
    for step in range(1, 6000):
        clock.seconds += 0.1
        assert not timer.is_due(step)
    assert clock.num_asked < 40


def test_a_new_checkpoint_starts_the_time_anew():
    clock = Clock()
    timer = CheckpointTimer(1.0, now=clock)
    clock.seconds = 50.0
    timer.restart()
    clock.seconds = 70.0
    assert not timer.is_due(1)
    clock.seconds = 111.0
    assert timer.is_due(2)


def test_without_a_limit_none_is_ever_due():
    clock = Clock()
    timer = CheckpointTimer(None, now=clock)
    clock.seconds = 1e9
    assert not timer.is_due(1)
