"""Training gives the mean over all targets of the batch, whatever the mesh, the padding and the minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from meshes import unboxed_tree
from trainer import runs
from trainer.runs import LENGTH, draw_batch, model_config

from xlstm_jax.models.xlstm import XLSTM
from xlstm_jax.trainer.llm.trainer import LLMTrainer
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig

pytestmark = pytest.mark.slow

ROWS, NUM_STEPS, TOLERANCE = 32, 5, 1e-5
# Momentum of 0 is none, but the optimizer then keeps the gradients of the last step.
SGD = OptimizerConfig(name="sgd", scheduler=SchedulerConfig(lr=0.1), beta1=0.0)
ADAMW = OptimizerConfig(name="adamw", scheduler=SchedulerConfig(lr=0.01), eps=1e-4, weight_decay=0.1)
PLAIN = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.01, eps=1e-4, weight_decay=0.1)}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
MESHES = {"dp8": {"dp": 8}, "fsdp8": {"fsdp": 8}, "dp2-fsdp2-tp2": {"dp": 2, "fsdp": 2, "tp": 2}}
# Each mesh meets each number of minibatches, and each of both a loop and a scan.
CASES = [
    ("one device", 2, False, "sgd"),
    *((mesh, 1, False, "sgd") for mesh in MESHES),
    *((mesh, n, (index + n // 2) % 2 == 0, "sgd") for index, mesh in enumerate(MESHES) for n in (2, 4)),
    *((mesh, n, True, "adamw") for mesh, n in (("dp8", 4), ("fsdp8", 2), ("dp2-fsdp2-tp2", 1))),
]
MODEL = model_config(num_blocks=1)
# What a mean does not depend on, but every program here would be compiled with.
FEW = {"log_grad_norm": False, "log_param_norm": False, "check_for_nan": False}
make_trainer = functools.partial(runs.make_trainer, rows=ROWS, model=MODEL, **FEW)


@functools.cache
def batches():
    return [draw_batch(0, index, rows=ROWS) for index in range(NUM_STEPS)]


@jax.jit
def summed_loss(params, batch):
    """Return the sum of the losses of all targets, and their number."""
    model = XLSTM(MODEL.model_config)
    logits = model.apply({"params": params}, batch.inputs, document_borders=batch.get_document_borders())
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * (batch.targets_segmentation != 0)), jnp.sum(batch.targets_segmentation != 0)


@functools.cache
def expected(optimizer):
    """Train on whole batches without a mesh, with logits and optax alone: losses, first gradients, parameters."""
    tx = PLAIN[optimizer]

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(lambda params: jnp.divide(*summed_loss(params, batch)))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    params = initial_params()
    state, losses, first = tx.init(params), [], None
    for batch in batches():
        params, state, loss, gradients = step(params, state, batch)
        losses.append(float(loss))
        first = jax.device_get(gradients) if first is None else first
    return np.array(losses), first, jax.device_get(params)


@functools.cache
def initial_params():
    return unboxed_tree(make_trainer().state.params)


def assert_close_by_leaf(actual, expected):
    def compare(path, actual, expected):
        error = np.linalg.norm(actual - expected)
        assert error <= TOLERANCE * np.linalg.norm(expected), f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(compare, actual, expected)


@pytest.mark.parametrize(("mesh", "num_minibatches", "use_scan", "optimizer"), CASES)
def test_losses_gradients_and_parameters_are_those_of_the_whole_batch(mesh, num_minibatches, use_scan, optimizer):
    trainer = make_trainer(
        MESHES.get(mesh, {}),
        optimizer=OPTIMIZERS[optimizer],
        gradient_accumulate_steps=num_minibatches,
        gradient_accumulate_scan=use_scan,
        default_train_log_modes=["single"],
    )
    expected_losses, first_gradients, expected_params = expected(optimizer)
    metrics, rows = trainer.init_train_metrics(), []
    for index, batch in enumerate(batches()):
        placed = jax.device_put(batch, NamedSharding(trainer.mesh, trainer.batch_partition_specs))
        trainer.state, metrics = trainer.train_step(trainer.state, placed, metrics)
        metrics, host_metrics = get_metrics(metrics)
        rows.append(host_metrics)
        if not index and optimizer == "sgd":
            assert_close_by_leaf(unboxed_tree(trainer.state.opt_state[0][0].trace), first_gradients)
    np.testing.assert_allclose([row["loss_single"] for row in rows], expected_losses, rtol=TOLERANCE)
    assert_close_by_leaf(unboxed_tree(trainer.state.params), expected_params)

    counts = np.array([np.sum(batch.targets_segmentation != 0) for batch in batches()])
    documents = [np.sum(np.max(batch.inputs_segmentation, axis=1)) for batch in batches()]
    for name, numbers in {
        "tokens_per_batch_mean": counts,
        "num_docs_per_batch_mean": documents,
        "token_utilization_mean": counts / (ROWS * LENGTH),
    }.items():
        np.testing.assert_allclose([row[name] for row in rows], numbers, rtol=1e-6)


def test_a_loss_function_that_is_overridden_as_documented_stays_exact():
    class Scaled(LLMTrainer):
        def loss_function(self, params, apply_fn, batch, rng, train=True, mutable_variables=None):
            return super().loss_function(params, apply_fn, batch, rng, train, mutable_variables)

    trainer = make_trainer({"dp": 2}, optimizer=SGD, trainer_class=Scaled, logger=None, gradient_accumulate_steps=2)
    placed = jax.device_put(batches()[0], NamedSharding(trainer.mesh, trainer.batch_partition_specs))
    state, _ = trainer.train_step(trainer.state, placed, None)
    assert_close_by_leaf(unboxed_tree(state.opt_state[0][0].trace), expected("sgd")[1])


@pytest.mark.parametrize("mesh", ["one device", *MESHES])
def test_an_evaluation_gives_the_mean_over_all_targets(mesh):
    trainer = make_trainer(MESHES.get(mesh, {}))
    metrics = None
    for batch in batches():
        placed = jax.device_put(batch, NamedSharding(trainer.mesh, trainer.batch_partition_specs))
        metrics = trainer.eval_step(trainer.state, placed, metrics)
    losses, counts = zip(*(summed_loss(initial_params(), batch) for batch in batches()), strict=True)
    np.testing.assert_allclose(get_metrics(metrics)[1]["loss"], sum(losses) / sum(counts), rtol=TOLERANCE)
