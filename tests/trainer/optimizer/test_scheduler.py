"""Learning-rate schedules: their pieces, joints and configs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.optimizer import SchedulerConfig, build_lr_scheduler

NAMES = ("constant", "linear", "cosine_decay", "exponential_decay", "warmup_stable_decay")
LONGEST = 90
"""More steps than any random schedule has: one length for all, so that JAX compiles once."""


@st.composite
def configs(draw) -> SchedulerConfig:
    name = draw(st.sampled_from(NAMES))
    level = name in ("constant", "warmup_stable_decay")
    lr = draw(st.floats(1e-6, 1.0))
    warmup = draw(st.integers(0, 25))
    main = draw(st.integers(0 if level else 1, 25))
    cooldown = draw(st.integers(1 if name == "warmup_stable_decay" else 0, 25))
    return SchedulerConfig(
        lr=lr,
        name=name,
        decay_steps=warmup + main + cooldown,
        end_lr_factor=None if level else draw(st.floats(0.01, 1.5)),
        warmup_steps=warmup,
        cooldown_steps=cooldown,
        cooldown_lr=draw(st.just(0.0) | st.floats(0.01, 1.0)) * lr,
    )


def values(config: SchedulerConfig) -> np.ndarray:
    """Return the learning rate of the first `LONGEST` steps."""
    steps = jnp.arange(LONGEST)
    return np.asarray(jnp.broadcast_to(build_lr_scheduler(config)(steps), steps.shape), np.float64)


def end_of_main_part(config: SchedulerConfig) -> float:
    return config.lr if config.end_lr_factor is None else config.lr * config.end_lr_factor


def steepest(config: SchedulerConfig) -> np.ndarray:
    """Return the largest change that each of the steps may make if the pieces meet at the joints."""
    start, end = config.lr, end_of_main_part(config)
    cooldown_start = (config.decay_steps or 0) - config.cooldown_steps
    main = cooldown_start - config.warmup_steps
    slope = {
        "linear": lambda: abs(start - end) / main,
        "cosine_decay": lambda: math.pi / 2 * abs(start - end) / main,
        "exponential_decay": lambda: max(start, end) * abs(math.log(end / start)) / main,
    }.get(config.name, lambda: 0.0)()
    distance = abs(end - config.cooldown_lr)
    cooldown_slope = distance / math.sqrt(config.cooldown_steps) if config.name == "warmup_stable_decay" else None
    bound = np.zeros(LONGEST - 1)
    if config.decay_steps and config.cooldown_steps:
        bound[cooldown_start:] = cooldown_slope or distance / config.cooldown_steps
        bound[config.decay_steps :] = 0.0
    elif config.name == "exponential_decay":
        bound[config.warmup_steps :] = slope if end <= start else np.inf
    bound[config.warmup_steps : max(cooldown_start, config.warmup_steps)] = slope
    bound[: config.warmup_steps] = start / max(config.warmup_steps, 1)
    return bound


@given(configs())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_schedule_jumps_at_a_joint(config):
    change = np.abs(np.diff(values(config)))
    assert np.all(change <= steepest(config) * (1 + 1e-4) + 1e-6 * max(config.lr, end_of_main_part(config)))


@given(configs())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_schedule_has_the_stated_value_at_each_joint(config):
    rate = values(config)
    assert np.all(rate >= 0)
    if config.warmup_steps:
        assert rate[0] == 0
    assert_close(rate[config.warmup_steps], config.lr if config.decay_steps != config.warmup_steps else rate[-1])
    if config.decay_steps:
        assert_close(rate[config.decay_steps - config.cooldown_steps], end_of_main_part(config))
    if config.cooldown_steps:
        assert_close(rate[config.decay_steps :], np.full(LONGEST - config.decay_steps, config.cooldown_lr))
    elif config.name != "exponential_decay":
        tail = rate[config.decay_steps or config.warmup_steps :]
        assert_close(tail, np.full_like(tail, end_of_main_part(config)))


EXAMPLE = SchedulerConfig(
    lr=0.1, name="linear", decay_steps=100, end_lr=0.02, warmup_steps=10, cooldown_steps=40, cooldown_lr=0.01
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {5: 0.05, 35: 0.1, 60: 0.1, 80: 0.055, 100: 0.01, 1000: 0.01}),
        ("linear", {5: 0.05, 35: 0.06, 60: 0.02, 80: 0.015, 100: 0.01, 1000: 0.01}),
        ("cosine_decay", {5: 0.05, 35: 0.06, 22.5: 0.02 + 0.08 * (0.5 + math.sqrt(0.125)), 60: 0.02, 80: 0.015}),
        ("exponential_decay", {5: 0.05, 35: 0.1 * math.sqrt(0.2), 60: 0.02, 80: 0.015, 100: 0.01}),
    ],
)
def test_the_main_part_follows_its_name(name, expected):
    schedule = build_lr_scheduler(dataclasses.replace(EXAMPLE, name=name))
    assert_close({step: schedule(step) for step in expected}, expected)


def test_warmup_stable_decay_cools_down_as_one_minus_the_square_root():
    config = dataclasses.replace(EXAMPLE, name="warmup_stable_decay", end_lr=None)
    schedule = build_lr_scheduler(config)
    expected = {5: 0.05, 10: 0.1, 60: 0.1, 70: 0.01 + 0.09 * 0.5, 60 + 40 * 0.81: 0.01 + 0.09 * 0.1, 100: 0.01}
    assert_close({step: schedule(step) for step in expected}, expected)


def test_exponential_decay_without_a_cool_down_goes_on_after_its_end():
    schedule = build_lr_scheduler(SchedulerConfig(lr=1.0, name="exponential_decay", decay_steps=10, end_lr_factor=0.5))
    assert_close([schedule(step) for step in (0, 10, 20, 30)], [1.0, 0.5, 0.25, 0.125])


@pytest.mark.parametrize("name", ["linear", "cosine_decay"])
def test_a_decay_with_no_stated_end_goes_to_zero(name):
    schedule = build_lr_scheduler(SchedulerConfig(lr=0.1, name=name, decay_steps=20))
    assert schedule(20) == 0
    assert schedule(19) > 0


def test_a_constant_schedule_needs_no_end():
    schedule = build_lr_scheduler(SchedulerConfig(lr=0.1, warmup_steps=4, decay_steps=None))
    assert_close([schedule(step) for step in (0, 1, 4, 10**6)], [0.0, 0.025, 0.1, 0.1])


@pytest.mark.parametrize("name", NAMES)
def test_a_traced_step_gives_the_same_learning_rate_as_a_python_integer(name):
    level = name in ("constant", "warmup_stable_decay")
    schedule = build_lr_scheduler(dataclasses.replace(EXAMPLE, name=name, end_lr=None if level else 0.02))
    traced = jax.jit(schedule)
    for step in (0, 7, 10, 33, 60, 61, 99, 100, 250):
        assert_close(traced(jnp.int32(step)), schedule(step))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_the_two_ways_to_give_the_end_must_agree(name):
    with pytest.raises(ConfigError, match="disagree"):
        SchedulerConfig(lr=0.1, name=name, decay_steps=10, end_lr=0.1, end_lr_factor=0.1)
    with pytest.raises(ConfigError, match="disagree"):
        SchedulerConfig(lr=0.1, name=name, decay_steps=10, end_lr=0.0101, end_lr_factor=0.1)
    SchedulerConfig(lr=3e-4, name=name, decay_steps=10, end_lr=3e-5, end_lr_factor=0.1)


def test_end_lr_and_its_factor_mean_the_same():
    by_value, by_factor = (
        build_lr_scheduler(SchedulerConfig(lr=0.2, name="cosine_decay", decay_steps=10, **end))
        for end in ({"end_lr": 0.05}, {"end_lr_factor": 0.25})
    )
    assert_close(by_value(7), by_factor(7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"cooldown_steps": -3}, "cooldown_steps is -3"),
        ({"decay_steps": -5}, "decay_steps is -5"),
        ({"cooldown_lr": -1e-3}, "cooldown_lr is -0.001"),
        ({"name": "linear", "decay_steps": 10, "end_lr": -1.0}, "end_lr is -1.0"),
        ({"name": "linear", "decay_steps": 10, "end_lr_factor": -0.1}, "end_lr_factor is -0.1"),
        (
            {"decay_steps": 10, "warmup_steps": 6, "cooldown_steps": 5},
            "warmup_steps 6 plus cooldown_steps 5 are more than decay_steps 10",
        ),
        ({"cooldown_steps": 5}, "must have an end"),
        ({"name": "linear"}, "must have an end"),
        ({"name": "cosine_decay", "decay_steps": None}, "must have an end"),
        ({"name": "exponential_decay", "end_lr_factor": 0.1}, "must have an end"),
        ({"name": "exponential_decay", "decay_steps": 10}, "must be positive"),
        ({"name": "exponential_decay", "decay_steps": 10, "lr": 0.0, "end_lr": 0.1}, "must be positive"),
        ({"name": "warmup_stable_decay", "decay_steps": 10}, "cooldown_steps > 0"),
        ({"name": "warmup_stable_decay", "decay_steps": 10, "cooldown_steps": 5, "end_lr": 0.1}, "cooldown_lr instead"),
        ({"name": "linear", "decay_steps": 10, "warmup_steps": 4, "cooldown_steps": 6}, "leave no step"),
        ({"name": "cosine"}, "Did you mean 'cosine_decay'"),
    ],
)
def test_an_impossible_schedule_is_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{"lr": 0.1, **fields})
