"""Each second of a run is counted once, for what it went into."""

import json

import pytest

from xlstm_jax.trainer.run.clock import Clock, Heartbeat


class Time:
    """A time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time):
    clock = Clock(now=time)
    clock.start()
    return clock


def test_time_that_nobody_claims_is_useful(clock, time):
    time.now += 3
    with clock.measure("data"):
        time.now += 1
    assert clock.shares()["goodput"] == 3 / 4
    assert clock.shares()["lost_data"] == 1 / 4


def test_an_inner_activity_is_not_counted_for_the_outer(clock, time):
    with clock.measure("evaluation") as outer:
        time.now += 2
        with clock.measure("checkpoint"):
            time.now += 5
        time.now += 1
    assert outer.seconds == 3
    assert (clock.seconds["evaluation"], clock.seconds["checkpoint"], clock.elapsed) == (3, 5, 8)


def test_an_activity_can_turn_out_to_be_another(clock, time):
    with clock.measure("data") as span:
        time.now += 2
        span.activity = "step"
    assert clock.shares()["goodput"] == 1


def test_the_time_of_training_is_that_of_steps_and_of_waiting_for_data(clock, time):
    time.now += 1
    for activity, seconds in [("data", 2), ("compile", 10), ("checkpoint", 20), ("evaluation", 30), ("restart", 40)]:
        with clock.measure(activity):
            time.now += seconds
    assert clock.training_seconds == 3


def test_time_counts_even_if_an_activity_fails(clock, time):
    def fail():
        time.now += 2
        raise RuntimeError

    with pytest.raises(RuntimeError), clock.measure("checkpoint"):
        fail()
    assert clock.seconds["checkpoint"] == 2


def test_outside_of_a_run_only_activities_count(time):
    clock = Clock(now=time)
    time.now += 50
    with clock.measure("restart"):
        time.now += 2
    time.now += 50
    clock.start()
    time.now += 1
    clock.stop()
    time.now += 50
    assert (clock.seconds["restart"], clock.seconds["step"], clock.elapsed) == (2, 1, 3)


def test_a_clock_goes_on_and_counts_what_is_done_twice_as_lost(clock, time):
    time.now += 7
    with clock.measure("restart"):
        time.now += 2
        clock.resume({"step": 30.0, "compile": 10.0}, lost=20.0)
        time.now += 1
    assert clock.seconds["restart"] == 23
    assert clock.seconds["step"] == 30
    assert clock.elapsed == 63


def test_a_heartbeat_says_how_far_a_run_is(tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat.json")
    heartbeat.beat(7, 12.5)
    heartbeat.beat(8, 12.6)  # within a second of the last one
    assert (heartbeat.read()["step"], heartbeat.read()["elapsed"]) == (7, 12.5)
    assert json.loads((tmp_path / "heartbeat.json").read_text())["time"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


def test_a_heartbeat_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "heartbeat.json.tmp").mkdir()
    heartbeat = Heartbeat(tmp_path / "heartbeat.json")
    for step in range(3):
        heartbeat._last = -100.0
        heartbeat.beat(step, 1.0)
    assert caplog.text.count("could not be written") == 1


def test_a_heartbeat_may_have_no_file_or_a_broken_one(tmp_path):
    (tmp_path / "heartbeat.json").write_text("{")
    for path in (None, tmp_path / "absent.json", tmp_path / "heartbeat.json"):
        assert Heartbeat(path).read() == {}
    Heartbeat(None).beat(1, 1.0)
