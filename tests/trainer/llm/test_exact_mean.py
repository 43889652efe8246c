"""Steps of training give the mean over all targets of the batch, whatever the mesh, the padding and the minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AXES, make_mesh, on_mesh, specs_of, unboxed_tree

from xlstm_jax.common_types import TrainState
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.base.steps import StepLogging, eval_step, train_step
from xlstm_jax.trainer.llm.loss import count_targets, next_token_loss
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig

ROWS, LENGTH, NUM_STEPS = 32, 12, 5
MODEL = XLSTM(
    XLSTMConfig(
        vocab_size=32,
        embedding_dim=16,
        num_heads=2,
        num_blocks=2,
        chunk_size=8,
        parallel=ParallelConfig(fsdp_modules=("Embed", "Block", "LMHead"), fsdp_min_weight_size=16),
    )
)
OPTIMIZERS = {
    "sgd": OptimizerConfig(name="sgd", scheduler=SchedulerConfig(lr=0.1), beta1=None),
    "adamw": OptimizerConfig(name="adamw", scheduler=SchedulerConfig(lr=0.01), eps=1e-4, weight_decay=0.1),
}
PLAIN_OPTIMIZERS = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.01, eps=1e-4, weight_decay=0.1)}
CASES = {
    "one device": ({}, 1, False),
    "dp8": ({"dp": 8}, 1, False),
    "fsdp8, 4 minibatches by loop": ({"fsdp": 8}, 4, False),
    "dp2-fsdp2-tp2": ({"dp": 2, "fsdp": 2, "tp": 2}, 1, False),
    "dp2-fsdp2-tp2, 2 minibatches by scan": ({"dp": 2, "fsdp": 2, "tp": 2}, 2, True),
    "dp8, 4 minibatches by scan": ({"dp": 8}, 4, True),
    "one device, 2 minibatches by loop": ({}, 2, False),
}


@functools.cache
def batches():
    """Draw rows with some documents and much padding: some rows have no targets at all."""
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(NUM_STEPS):
        ends = generator.integers(0, LENGTH + 1, ROWS)
        ends[:3] = 0
        columns = np.arange(LENGTH)
        documents = 1 + (columns >= generator.integers(1, LENGTH, (ROWS, 1)))
        segmentation = np.where(columns < ends[:, None], documents, 0).astype(np.int32)
        tokens = generator.integers(0, 32, (2, ROWS, LENGTH)).astype(np.int32)
        positions = np.broadcast_to(columns, (ROWS, LENGTH)).astype(np.int32)
        drawn.append(
            LLMBatch(
                inputs=tokens[0],
                targets=tokens[1],
                inputs_position=positions,
                inputs_segmentation=segmentation,
                targets_position=positions,
                targets_segmentation=segmentation,
            )
        )
    return drawn


def init_params(key):
    return MODEL.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]


@functools.cache
def expected(optimizer):
    """Train on whole batches without a mesh, with logits and optax alone: losses, and parameters after each step."""
    tx = PLAIN_OPTIMIZERS[optimizer]

    def loss_of(params, batch):
        logits = MODEL.apply({"params": params}, batch.inputs, document_borders=batch.get_document_borders())
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return jnp.sum(losses * (batch.targets_segmentation != 0)) / jnp.sum(batch.targets_segmentation != 0)

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.jit(init_params)(jax.random.key(3))
    state, losses, all_params = tx.init(params), [], []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
        all_params.append(jax.device_get(params))
    return np.array(losses), all_params


def trained(case, optimizer):
    """Train with the steps of the trainer: the metrics of each step, and parameters after each."""
    sizes, num_minibatches, use_scan = CASES[case]
    mesh = make_mesh(**sizes)
    tx, _ = build_optimizer(OPTIMIZERS[optimizer])

    def init(key):
        return TrainState.create(apply_fn=MODEL.apply, params=init_params(key), tx=tx, rng=jax.random.key(4))

    state_specs = specs_of(init, mesh, jax.random.key(3))
    loss = functools.partial(next_token_loss, axis_names=AXES)
    step = functools.partial(
        train_step,
        axis_names=AXES,
        loss_function=loss,
        count_targets=count_targets,
        num_minibatches=num_minibatches,
        use_scan=use_scan,
        logging=StepLogging(default_modes=("single",)),
    )
    evaluate = functools.partial(eval_step, axis_names=AXES, loss_function=loss, count_targets=count_targets)
    rows = P(AXES)
    run = on_mesh(lambda state, batch: step(state, batch, None), mesh, (state_specs, rows), (state_specs, P()))
    run_evaluation = on_mesh(lambda state, batch: evaluate(state, batch, None), mesh, (state_specs, rows), P())
    state = on_mesh(init, mesh, P(), state_specs)(jax.random.key(3))
    reported, all_params = [], []
    for batch in batches():
        batch = jax.device_put(batch, NamedSharding(mesh, rows))
        _, evaluated = get_metrics(run_evaluation(state, batch))
        state, metrics = run(state, batch)
        reported.append({**get_metrics(metrics)[1], "eval_loss": evaluated["loss"]})
        all_params.append(unboxed_tree(state.params))
    return reported, all_params


@pytest.mark.parametrize(("case", "optimizer"), [*((case, "sgd") for case in CASES), ("dp2-fsdp2-tp2", "adamw")])
def test_losses_and_parameters_are_those_of_the_whole_batch(case, optimizer):
    expected_losses, expected_params = expected(optimizer)
    reported, all_params = trained(case, optimizer)
    for name in ("loss_single", "eval_loss"):
        np.testing.assert_allclose([metrics[name] for metrics in reported], expected_losses, rtol=1e-5)

    def compare(path, actual, wanted):
        error = np.linalg.norm(actual - wanted)
        assert error <= 1e-5 * np.linalg.norm(wanted), f"{jax.tree_util.keystr(path)}: {error}"

    for actual, wanted in zip(all_params, expected_params, strict=True):
        jax.tree_util.tree_map_with_path(compare, actual, wanted)

    counts = [np.sum(batch.targets_segmentation != 0) for batch in batches()]
    documents = [np.sum(np.max(batch.inputs_segmentation, axis=1)) for batch in batches()]
    np.testing.assert_allclose([metrics["tokens_per_batch_mean"] for metrics in reported], counts, rtol=1e-6)
    np.testing.assert_allclose([metrics["num_docs_per_batch_mean"] for metrics in reported], documents, rtol=1e-6)
    utilization = np.array(counts) / (ROWS * LENGTH)
    np.testing.assert_allclose([metrics["token_utilization_mean"] for metrics in reported], utilization, rtol=1e-6)
