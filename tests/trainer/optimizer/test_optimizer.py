"""Optimizers from configs: their rules, weight decay and states."""

import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from tolerances import assert_close
from trainer.optimizer.layouts import COMPILER_OPTIONS, flat, nested, params_and_gradients, random_tree, run_steps

from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer, get_eval_params
from xlstm_jax.trainer.optimizer.ademamix import alpha_scheduler, beta3_scheduler
from xlstm_jax.trainer.optimizer.optimizer import OPTIMIZERS, build_gradient_transformations, build_optimizer_function
from xlstm_jax.trainer.optimizer.sharded import scale_by_trust_ratio_sharded

pytestmark = pytest.mark.slow

MOVING = tuple(name for name in OPTIMIZERS if name != "none")
NO_BIAS = ["bias"]


def learning_rate(step):
    return 0.1 - 0.009 * step


def decays(params):
    return nested({name: not any(word in name for word in NO_BIAS) for name in flat(params)})


def matrix_axes(params):
    """Return the axes of the matrices among the parameters as optax's Muon wants them."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)
    return nested({name: axes if name.endswith("kernel") else None for name in flat(params)})


MOMENTS = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
DECAY = {"weight_decay": 0.1, "mask": decays}
MUON = {"beta": 0.8, "adam_b1": 0.8, "adam_b2": 0.95, "eps": 1e-6, "consistent_rms": 0.2}
SLOW_MOMENTUM = {"b3": beta3_scheduler(0.99, 0.8, 10), "alpha": alpha_scheduler(4.0, 0.0, 10)}

OPTAX = {
    "adam": optax.adam(learning_rate, **MOMENTS),
    "adam nesterov": optax.adam(learning_rate, **MOMENTS, nesterov=True),
    "adam decay": optax.adamw(learning_rate, **MOMENTS, **DECAY),
    "adamw": optax.adamw(learning_rate, **MOMENTS, weight_decay=0.0),
    "adamw decay": optax.adamw(learning_rate, **MOMENTS, **DECAY),
    "adamw nesterov decay": optax.adamw(learning_rate, **MOMENTS, **DECAY, nesterov=True),
    "sgd": optax.sgd(learning_rate, momentum=0.8),
    "sgd nesterov": optax.sgd(learning_rate, momentum=0.8, nesterov=True),
    "nadam": optax.nadam(learning_rate, **MOMENTS),
    "nadam decay": optax.nadamw(learning_rate, **MOMENTS, **DECAY),
    "nadamw decay": optax.nadamw(learning_rate, **MOMENTS, **DECAY),
    "adamax": optax.adamax(learning_rate, **MOMENTS),
    "adamax decay": optax.adamaxw(learning_rate, **MOMENTS, **DECAY),
    "adamaxw decay": optax.adamaxw(learning_rate, **MOMENTS, **DECAY),
    "radam": optax.radam(learning_rate, **MOMENTS),
    "radam nesterov": optax.radam(learning_rate, **MOMENTS, nesterov=True),
    "lamb": optax.lamb(learning_rate, **MOMENTS),
    "lamb decay": optax.lamb(learning_rate, **MOMENTS, **DECAY),
    "lion decay": optax.lion(learning_rate, b1=0.8, b2=0.95, **DECAY),
    "ademamix decay": optax.contrib.ademamix(learning_rate, **MOMENTS, **SLOW_MOMENTUM, **DECAY),
    "schedule_free_adamw": optax.contrib.schedule_free_adamw(learning_rate, **MOMENTS),
    "muon": optax.contrib.muon(learning_rate, **MUON, nesterov=False, muon_weight_dimension_numbers=matrix_axes),
    "muon nesterov": optax.contrib.muon(
        learning_rate, **MUON, nesterov=True, muon_weight_dimension_numbers=matrix_axes
    ),
}
"""The optimizers of optax, by our names and the options they are built with."""


def build_like_optax(case: str) -> optax.GradientTransformation:
    name, *options = case.split()
    config = OptimizerConfig(
        name=name,
        scheduler=SchedulerConfig(lr=0.1, name="linear", decay_steps=10, end_lr=0.01),
        beta1=0.8,
        beta2=0.95,
        beta3=0.99,
        alpha=4.0,
        eps=1e-6,
        weight_decay=0.1 if "decay" in options else 0.0,
        weight_decay_exclude=NO_BIAS if "decay" in options else None,
        nesterov="nesterov" in options,
        # optax's LAMB has one ratio for each leaf.
        stacked_params=["block_stack"] if name == "muon" else [],
    )
    return build_optimizer(config)[0]


@pytest.mark.parametrize("case", OPTAX)
def test_updates_are_those_of_optax(case):
    def run_both(params, gradients):
        return tuple(run_steps(optimizer, params, gradients) for optimizer in (build_like_optax(case), OPTAX[case]))

    assert_close(*jax.jit(run_both, compiler_options=COMPILER_OPTIONS)(*map(a_few_leaves, params_and_gradients())))


def a_few_leaves(tree):
    names = (
        "token_embedding.embedding",
        "block_stack.block.up.kernel",
        "block_stack.block.up.bias",
        "projection.kernel",
    )
    return nested({name: flat(tree)[name] for name in names})


@pytest.mark.parametrize("case", [case for case in OPTAX if not case.startswith("muon")])
def test_without_clipping_the_first_entry_of_the_state_is_that_of_optax(case):
    params = {"kernel": jnp.ones((2, 3))}
    actual, expected = build_like_optax(case).init(params), OPTAX[case].init(params)
    assert len(actual) == 1
    assert jax.tree.structure(actual[0]) == jax.tree.structure(expected)


def test_the_moments_and_the_step_of_the_schedule_are_found_where_they_are_documented():
    params = {"kernel": jnp.ones((2, 3))}
    for name, schedule_index in (("adam", 1), ("adamw", 2)):
        optimizer, _ = build_optimizer(OptimizerConfig(name=name))
        _, state = optimizer.update(params, optimizer.init(params), params)
        assert_close(state[0][0].mu, {"kernel": jnp.full((2, 3), 0.1)})
        assert_close(state[0][0].nu, {"kernel": jnp.full((2, 3), 0.001)})
        assert state[0][0].count == 1
        assert state[0][schedule_index].count == 1


def test_clipping_stands_before_the_optimizer():
    config = OptimizerConfig(name="adam", grad_clip_norm=1.0, grad_clip_value=0.5)
    before, after = build_gradient_transformations(config)
    assert (len(before), len(after)) == (2, 0)
    state = build_optimizer(config)[0].init({"kernel": jnp.ones(2)})
    assert len(state) == 3
    assert state[2][0].count == 0


def decay_steps(name: str, num_steps: int = 1, **fields) -> list[dict]:
    """Return the updates of steps with a learning rate of 1, a weight decay of 0.1 and no gradient."""
    config = OptimizerConfig(name=name, scheduler=SchedulerConfig(lr=1.0), weight_decay=0.1, **fields)
    optimizer, _ = build_optimizer(config)
    params = {"layer": {"kernel": jnp.full((2, 3), 2.0), "bias": jnp.full(3, 2.0)}}
    zeros, state, all_updates = jax.tree.map(jnp.zeros_like, params), optimizer.init(params), []
    for _ in range(num_steps):
        updates, state = optimizer.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
        all_updates.append(updates["layer"])
    return all_updates


@pytest.mark.parametrize("name", [name for name in MOVING if name != "lamb"])
def test_without_a_gradient_weights_shrink_by_decay_times_learning_rate(name):
    (update,) = decay_steps(name)
    assert_close(update, {"kernel": jnp.full((2, 3), -0.2), "bias": jnp.full(3, -0.2)})


def test_the_trust_ratio_of_lamb_scales_the_decay():
    (update,) = decay_steps("lamb")
    assert_close(update, {"kernel": jnp.full((2, 3), -2.0), "bias": jnp.full(3, -2.0)})


@pytest.mark.parametrize("name", [name for name in MOVING if name not in ("lamb", "schedule_free_adamw")])
def test_decay_does_not_enter_the_momentum(name):
    _, second = decay_steps(name, num_steps=2)
    assert_close(second["kernel"], jnp.full((2, 3), -0.18))


@pytest.mark.parametrize(
    "mask",
    [
        {"weight_decay_exclude": ["bias"]},
        {"weight_decay_include": [r"layer\.kernel$"]},
        {"weight_decay_exclude": ["bias"], "weight_decay_include": ["layer"]},
    ],
)
@pytest.mark.parametrize("name", MOVING)
def test_only_parameters_that_the_mask_names_decay(name, mask):
    (update,) = decay_steps(name, **mask)
    assert jnp.all(update["kernel"] < 0)
    assert jnp.all(update["bias"] == 0)


def test_the_trust_ratio_asks_for_the_parameters():
    rule = scale_by_trust_ratio_sharded([])
    with pytest.raises(ValueError, match="needs the parameters"):
        rule.update({"kernel": jnp.ones(3)}, rule.init({"kernel": jnp.ones(3)}))


def test_none_keeps_parameters_as_they_are():
    optimizer, schedule = build_optimizer(OptimizerConfig(name="none", weight_decay=0.1))
    params = random_tree(0)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert_close(updates, jax.tree.map(jnp.zeros_like, params))
    assert schedule(0) == 1e-3


def test_sgd_without_momentum_follows_the_gradient():
    optimizer = build_optimizer_function(OptimizerConfig(name="sgd", beta1=None), 0.5)
    params = random_tree(0)
    state = optimizer.init(params)
    assert not jax.tree.leaves(state)
    assert_close(optimizer.update(params, state, params)[0], jax.tree.map(lambda x: -0.5 * x, params))


@pytest.mark.parametrize("name", MOVING)
def test_a_step_keeps_the_data_types_of_the_state(name):
    optimizer, _ = build_optimizer(OptimizerConfig(name=name, weight_decay=0.1, grad_clip_norm=1.0))
    params = optax.tree.cast(random_tree(0), jnp.bfloat16)
    before = jax.eval_shape(optimizer.init, params)
    _, after = jax.eval_shape(optimizer.update, params, before, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)


@functools.cache
def minimize(name: str):
    """Return the loss before and after some steps on a quadratic, and if the last state was donated."""
    optimizer, _ = build_optimizer(OptimizerConfig(name=name, scheduler=SchedulerConfig(lr=0.1), grad_clip_norm=10.0))
    target = {"kernel": jax.random.normal(jax.random.key(0), (4, 3)), "bias": jnp.array([1.0, -2.0, 3.0])}

    def loss(params):
        return optax.tree.norm(optax.tree.sub(params, target), squared=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.ones_like, target)
    start, state = float(loss(params)), optimizer.init(params)
    for _ in range(60):
        previous = params, state
        params, state = step(params, state)
    donated = all(leaf.is_deleted() for leaf in jax.tree.leaves(previous))
    return start, float(loss(get_eval_params(state, params))), donated


@pytest.mark.parametrize("name", MOVING)
def test_an_optimizer_brings_a_quadratic_down(name):
    start, end, _ = minimize(name)
    assert end < 0.2 * start


@pytest.mark.parametrize("name", MOVING)
def test_parameters_and_state_can_be_donated(name):
    assert minimize(name)[2]
