"""The time of a start is divided between phases that add up to it."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from xlstm_jax.utils.startup import Startup, describe_startup


class Time:
    """A time that passes when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def now():
    return Time()


def test_phases_add_up_to_the_time_since_the_process_began(now):
    startup = Startup(now)
    startup.begin(seconds_ago=5.0)
    for phase, seconds in [("imports", 1), ("data", 2), ("first step", 3), ("data", 4)]:
        now.now += seconds
        startup.end(phase)
    metrics = startup.finish()
    phases = {name: metrics[name] for name in metrics if name.startswith("startup_") and name != "startup_seconds"}
    assert phases == {"startup_imports": 6, "startup_data": 6, "startup_first_step": 3}
    assert metrics["startup_seconds"] == 15


def test_nothing_is_measured_before_the_begin_or_after_the_end(now):
    startup = Startup(now)
    startup.end("imports")
    assert startup.finish() == {}
    startup.begin()
    startup.finish()
    startup.end("imports")
    assert startup.finish() == {}


def test_a_second_start_begins_with_no_phases(now):
    startup = Startup(now)
    startup.begin()
    startup.end("imports")
    startup.begin()
    assert "startup_imports" not in startup.finish()


def test_programs_are_counted_and_those_from_the_cache_too(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    startup = Startup()
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        startup.begin()
        jax.jit(lambda x: x * 3 + 17)(jnp.ones(7)).block_until_ready()
        metrics = startup.finish()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert metrics["num_programs"] >= 1
    assert metrics["compile_seconds"] > 0
    assert metrics["num_cache_hits"] <= metrics["num_programs"]


def test_the_line_names_phases_of_some_length_and_the_cache():
    metrics = {
        "startup_imports": 3.21,
        "startup_first_step": 1.0,
        "startup_callbacks": 0.01,
        "startup_seconds": 4.22,
        "num_programs": 13,
        "compile_seconds": 2.5,
    }
    line = describe_startup(metrics)
    assert line == "startup 4.2 s: imports 3.2, first step 1.0 (13 programs compiled in 2.5 s, no compilation cache)"
    assert describe_startup(metrics | {"num_cache_hits": 12}).endswith("in 2.5 s, 12 from the compilation cache)")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not report when a process began")
def test_the_age_of_a_process_counts_from_its_start():
    code = (
        "import time; time.sleep(1.0)\n"
        "from xlstm_jax.utils.startup import seconds_since_process_start\n"
        "import sys; sys.stdout.write(str(seconds_since_process_start()))"
    )
    begin = time.perf_counter()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 1.0 < age < time.perf_counter() - begin + 0.1
