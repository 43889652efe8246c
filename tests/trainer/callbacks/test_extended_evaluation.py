"""Evaluations that users write: the same numbers on every mesh, from one compilation."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from trainer.callbacks.evaluations import TOLERANCE, placed
from trainer.runs import ROWS, draw_batch, make_trainer, model_config

import xlstm_jax
from xlstm_jax.trainer.callbacks.extended_evaluation import (
    ExtendedEvaluation,
    ExtendedEvaluationConfig,
    device_metrics_aggregation,
)
from xlstm_jax.utils.partitioned import is_partitioned, unboxed

pytestmark = pytest.mark.slow

ROOT = Path(xlstm_jax.__file__).parents[1]

MESHES = [{}, {"dp": 8}, {"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}]


class Everything(ExtendedEvaluation):
    """Reports the losses of targets in every way there is."""

    def eval_function(self, params, apply_fn, batch, rng):
        logits = apply_fn(
            {"params": params},
            batch.inputs,
            pos_idx=batch.inputs_position,
            document_borders=batch.get_document_borders(),
            train=False,
        )
        is_target = batch.targets_segmentation != 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        losses = jnp.where(is_target, losses, 0)
        metrics = {
            "loss": {"value": losses.sum(), "count": is_target.sum()},
            "mean": jnp.mean(losses),
            "worst": {"value": losses.max(), "log_modes": ["max"]},
            "position": {"value": losses.sum(0), "count": is_target.sum(0), "log_modes": ["mean"]},
            "row": {"value": losses.sum(1), "log_modes": ["single_noreduce"]},
            "counted": {"value": losses.sum(1), "count": is_target.sum(1), "log_modes": ["single_noreduce_wcount"]},
            "tokens": {"value": batch.inputs, "log_modes": ["single_noreduce"]},
        }
        return metrics, None


@pytest.fixture(scope="module")
def whole_params():
    """The parameters that all trainers start from, without a mesh."""
    params = make_trainer(logger=None).state.params
    return jax.tree.map(lambda x: jnp.array(unboxed(x)), params, is_leaf=is_partitioned)


def probabilities(params, batches):
    """Compute the probabilities of tokens with a model outside any mesh, in float64 from the logits on."""
    config = model_config()
    apply = jax.jit(config.model_class(config.model_config).apply)
    for batch in jax.tree.map(jnp.asarray, batches):
        borders = batch.get_document_borders()
        logits = apply({"params": params}, batch.inputs, pos_idx=batch.inputs_position, document_borders=borders)
        exponentials = np.exp(np.array(logits, np.float64))
        yield exponentials / exponentials.sum(-1, keepdims=True)


def expected_metrics(params, batches):
    """Compute the metrics with NumPy."""
    losses, is_target = [], []
    for batch, probability in zip(batches, probabilities(params, batches), strict=True):
        is_target.append(batch.targets_segmentation != 0)
        of_targets = np.take_along_axis(probability, batch.targets[..., None], axis=-1)[..., 0]
        losses.append(np.where(is_target[-1], -np.log(of_targets), 0))
    means = [np.mean(loss) for loss in losses]
    losses, is_target = np.concatenate(losses), np.concatenate(is_target)
    return {
        "loss": losses.sum() / is_target.sum(),
        "mean": np.mean(means),
        "worst_max": losses.max(),
        "position_mean": losses.sum(0) / np.maximum(is_target.sum(0), 1),
        "row_single_noreduce": losses.sum(1),
        "counted_single_noreduce_wcount": (losses.sum(1), is_target.sum(1)),
        "tokens_single_noreduce": np.concatenate([np.asarray(batch.inputs) for batch in batches]),
    }


def assert_metrics(metrics, expected):
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        for one, other in (
            zip(metrics[name], value, strict=True) if isinstance(value, tuple) else [(metrics[name], value)]
        ):
            np.testing.assert_allclose(one, other, err_msg=name, **TOLERANCE)


def drawn(*rows):
    return [draw_batch(5, index, rows=number) for index, number in enumerate(rows)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_kinds_of_metrics_are_those_of_one_device_on_every_mesh(sizes, whole_params):
    trainer = make_trainer(sizes, logger=None)
    evaluation = Everything(ExtendedEvaluationConfig(), trainer)
    batches = drawn(ROWS, ROWS, ROWS)
    for _ in range(2):
        assert_metrics(evaluation.eval_model(placed(batches, trainer)), expected_metrics(whole_params, batches))
    assert evaluation.eval_step._cache_size() == 1


def test_a_smaller_last_batch_counts_as_its_rows_and_costs_one_more_compilation(whole_params):
    trainer = make_trainer({"dp": 8}, logger=None)
    evaluation = Everything(ExtendedEvaluationConfig(), trainer)
    batches = drawn(ROWS, ROWS, 8)
    for _ in range(2):
        assert_metrics(evaluation.eval_model(placed(batches, trainer)), expected_metrics(whole_params, batches))
    assert evaluation.eval_step._cache_size() == 2


def test_the_metrics_of_the_loss_of_language_models_count_once(whole_params):
    class Losses(ExtendedEvaluation):
        def eval_function(self, params, apply_fn, batch, rng):
            _, (metrics, variables) = self.trainer.loss_function(params, apply_fn, batch, rng, train=False)
            return metrics, variables

    trainer = make_trainer({"dp": 2, "tp": 2}, logger=None)
    evaluation = Losses(ExtendedEvaluationConfig(), trainer)
    (batch,) = batches = drawn(ROWS)
    metrics = evaluation.eval_step(trainer.state, *placed(batches, trainer), None)
    counts = metrics["loss"]["mean_nopostfix"]["count"].addressable_shards
    assert {int(shard.data) for shard in counts} == {np.sum(batch.targets_segmentation != 0)}
    expected = expected_metrics(whole_params, batches)["loss"]
    np.testing.assert_allclose(evaluation.finalize_metrics(metrics)["loss"], expected, **TOLERANCE)


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "extended_evaluation.py"
    spec = importlib.util.spec_from_file_location("extended_evaluation_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_finds_losses_by_position_and_the_calibration(example, whole_params):
    trainer = make_trainer({"dp": 2, "tp": 2}, logger=None)
    batches = drawn(ROWS, ROWS)
    metrics = example.CalibrationConfig(num_bins=20).create(trainer).eval_model(placed(batches, trainer))
    np.testing.assert_allclose(
        metrics["loss_at"], expected_metrics(whole_params, batches)["position_mean"], **TOLERANCE
    )

    probability = np.concatenate(list(probabilities(whole_params, batches)))
    is_target = np.concatenate([batch.targets_segmentation != 0 for batch in batches])
    targets = np.concatenate([batch.targets for batch in batches])[is_target]
    confidence, is_hit = probability.max(-1)[is_target], probability.argmax(-1)[is_target] == targets
    error = 0
    for index in range(20):
        is_in_bin = (confidence * 20).astype(int) == index
        if is_in_bin.any():
            expected = (confidence[is_in_bin].mean(), is_hit[is_in_bin].mean(), is_in_bin.mean())
            found = (metrics["confidence"][index], metrics["accuracy"][index], metrics["share"][index])
            np.testing.assert_allclose(found, expected, **TOLERANCE)
            error += is_in_bin.mean() * abs(is_hit[is_in_bin].mean() - confidence[is_in_bin].mean())
    assert np.sum(metrics["share"] > 0) > 1
    np.testing.assert_allclose(metrics["calibration_error"], error, **TOLERANCE)


def test_the_best_losses_of_the_example_are_those_of_counting(example):
    batch = example.throw_dice(0)
    seen = np.full(example.NUM_FACES, example.CONCENTRATION)
    for position in range(3):
        face = batch.targets[0, position] - 1
        expected = -np.log(seen[face] / seen.sum())
        np.testing.assert_allclose(example.best_losses([batch[:1]])[position], expected)
        seen[face] += 1


def test_the_page_quotes_the_example_as_it_is():
    page = (ROOT / "docs" / "how-to" / "extended-evaluation.md").read_text()
    text = (ROOT / "examples" / "extended_evaluation.py").read_text()
    quotes = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert quotes
    assert [quote for quote in quotes if quote not in text] == []


def join(sizes, function):
    """Join the metrics that `function` computes from a device's rows, 0 to 15 over the mesh."""
    trainer = SimpleNamespace(data_axis_name="dp", fsdp_axis_name="fsdp", pipeline_axis_name="pp", model_axis_name="tp")
    axes = ("dp", "fsdp")

    def run(rows):
        metrics = device_metrics_aggregation(trainer, function(rows))
        return {name: {key: metric[key] for key in ("value", "count")} for name, metric in metrics.items()}

    return on_mesh(run, make_mesh(**sizes), P(axes), P())(jnp.arange(16))


@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 4}, {"fsdp": 2, "pp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}])
def test_rows_come_in_the_order_of_the_batch(sizes):
    joined = join(
        sizes,
        lambda rows: {
            "plain": {"value": rows, "log_modes": ["single_noreduce"]},
            "counted": {"value": rows[:, None] * jnp.ones(3), "count": rows + 1, "log_modes": "single_noreduce_wcount"},
            "once": {"value": rows, "log_modes": ["single_noreduce_wcount"]},
        },
    )
    np.testing.assert_array_equal(joined["plain"]["value"], np.arange(16))
    np.testing.assert_array_equal(joined["counted"]["value"], np.arange(16)[:, None] * np.ones(3))
    np.testing.assert_array_equal(joined["counted"]["count"], np.arange(16) + 1)
    np.testing.assert_array_equal(joined["once"]["count"], np.ones(16))


@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 4}, {"fsdp": 2, "pp": 2, "tp": 2}, {"dp": 2, "tp": 4}], ids=str)
def test_devices_with_the_same_rows_are_summed_once(sizes):
    joined = join(
        sizes,
        lambda rows: {
            "sum": {"value": rows.sum(), "count": rows.size},
            "number": 1.0,
            "max": {"value": rows.max() - 20, "log_modes": ["max"]},
            "bins": {"value": jnp.stack([rows.sum(), 0]), "count": jnp.stack([rows.size, 0])},
        },
    )
    num_parts = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    assert {name: (metric["value"].tolist(), metric["count"].tolist()) for name, metric in joined.items()} == {
        "sum": (120, 16),
        "number": (num_parts, num_parts),
        "max": (-5, 1),
        "bins": ([120, 0], [16, 0]),
    }
