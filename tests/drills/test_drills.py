"""Short versions of the drills: a few drawn cases of each. `make drills` runs all of them."""

import contextlib
import random

import pytest
from drills import bad_calls, bad_shards, bad_sources, bad_tokenizers, commands, damage, kills
from drills.interrupted_command import CommandServer
from drills.kills import Kill, KilledRun
from drills.outcomes import Outcome, Result, error_of_traceback, faults, judge_output, run_case, table

pytestmark = pytest.mark.slow

COUNTS = {bad_calls: 60, bad_shards: 12, bad_sources: 15, bad_tokenizers: 8, commands: 10, damage: 4}
KILL = Kill("deletion", "SIGKILL", 20)
"""Before step 36, so that the resumed run validates again before it ends."""


@pytest.mark.parametrize("drill", COUNTS, ids=lambda drill: drill.__name__.removeprefix("drills."))
def test_nothing_bad_is_a_traceback_a_hang_or_silently_wrong(drill, tmp_path, unchecked_shapes):
    results = drill.drill(tmp_path, count=COUNTS[drill], seed=0)
    assert len(results) >= COUNTS[drill]
    assert faults(results) == []


def test_a_run_that_is_killed_while_it_deletes_a_checkpoint_ends_as_one_that_was_not(tmp_path):
    with contextlib.closing(CommandServer(kills.environment(tmp_path))) as server:
        reference = KilledRun(tmp_path / "reference", server)
        assert reference.start(None)[0] == 0
        results = kills.kill_and_compare(KilledRun(tmp_path / "killed", server), reference, [KILL])
    assert [result.outcome for result in results] == [Outcome.OK]


def test_kills_are_drawn_from_all_phases():
    phases = {Kill.draw(random.Random(0), phase).phase for phase in [*kills.PHASES, *kills.TIMES]}
    assert phases == {*kills.PHASES, *kills.TIMES}


def hang():
    while True:
        pass


def fail():
    raise AttributeError("no attribute")


@pytest.mark.parametrize(("run", "outcome"), [(hang, Outcome.HANG), (fail, Outcome.TRACEBACK)])
def test_a_case_that_hangs_or_fails_is_a_fault(run, outcome, monkeypatch):
    monkeypatch.setattr("drills.outcomes.SECONDS_PER_CASE", 0.2)
    result = run_case("bad", run)
    assert (result.outcome, result.is_fault) == (outcome, True)


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (2, "width is 3, but must be even.", Outcome.REPORTED),
        (0, "", Outcome.WRONG),
        (1, "width is 3, but must be even.", Outcome.TRACEBACK),
        (2, "Traceback (most recent call last):\nValueError: width", Outcome.TRACEBACK),
        (2, "something is wrong", Outcome.TRACEBACK),
        (2, "width\n" * 5, Outcome.TRACEBACK),
    ],
)
def test_what_a_command_prints_is_classified(code, output, outcome):
    assert judge_output("a command", code, output, {2}, "width").outcome is outcome


def test_the_error_of_a_traceback_is_found():
    output = 'Traceback (most recent call last):\n  File "a.py", line 1\n    f()\nKeyError: 3\nStopped.'
    assert error_of_traceback(output) == "KeyError: 3"


def test_the_table_counts_cases_and_names_faults():
    results = [Result("good", Outcome.OK), Result("bad", Outcome.HANG, "no result")]
    lines = table({"calls": results}).splitlines()
    assert lines[1].split() == ["calls", "2", "1", "0", "0", "1", "0"]
    assert lines[2] == "calls: bad: hang: no result"


@pytest.mark.parametrize(
    ("found", "expected", "paths"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, []),
        ({"a": [1, 3]}, {"a": [1, 2]}, ["/a/1"]),
        ({"a": [1]}, {"a": [1, 2], "b": 0}, ["/a/1", "/b"]),
    ],
)
def test_differences_of_runs_are_found_by_their_paths(found, expected, paths):
    assert [path for path, _, _ in kills.find_differences(found, expected)] == paths
