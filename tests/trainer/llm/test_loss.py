"""What the loss of a language model takes and reports."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import AXES, make_mesh, unboxed_tree
from tolerances import assert_close
from trainer.runs import LENGTH, PARALLEL, ROWS, VOCAB_SIZE, draw_batch

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed import split_array_over_mesh
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.shared import TPLMHead
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.llm.loss import add_perplexities, next_token_loss
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig
from xlstm_jax.trainer.user_functions import StepContext, model_takes

pytestmark = pytest.mark.slow

CONFIG = XLSTMConfig(vocab_size=16, embedding_dim=16, num_heads=2, num_blocks=1, chunk_size=4)


class OnlyLogits(nn.Module):
    """A model that knows nothing of targets."""

    @nn.compact
    def __call__(self, tokens, pos_idx=None, document_borders=None, train=False):
        return XLSTM(CONFIG, name="inner")(tokens, document_borders=document_borders, train=train)


def test_a_model_without_targets_has_the_same_loss_from_its_logits(key):
    inputs, targets = jax.random.randint(key, (2, 3, 8), 0, 16)
    batch = LLMBatch.from_inputs(inputs, targets)
    whole, logits_only = XLSTM(CONFIG), OnlyLogits()
    params = whole.init(key, inputs)["params"]
    assert model_takes(whole.apply, "targets")
    assert not model_takes(logits_only.apply, "targets")
    loss = functools.partial(next_token_loss, axis_names=AXES, context=StepContext())
    expected, (metrics, _) = loss(params, whole.apply, batch, key)
    actual, (same_metrics, _) = loss({"inner": params}, logits_only.apply, batch, key)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert same_metrics["accuracy"]["value"] == metrics["accuracy"]["value"]
    with_statistics, (all_metrics, _) = loss(params, whole.apply, batch, key, log_logit_stats=True)
    np.testing.assert_allclose(with_statistics, expected, rtol=1e-6)
    assert all_metrics.keys() - metrics.keys() == {"logits_norm", "logits_std", "logits_max"}


class RandomLogits(nn.Module):
    """A model whose logits are drawn as dropout is."""

    @nn.compact
    def __call__(self, tokens, pos_idx=None, document_borders=None, train=False):
        return jax.random.normal(self.make_rng("dropout"), (*tokens.shape, 16))


def test_devices_with_different_rows_draw_different_random_numbers_and_those_with_the_same_rows_the_same(key):
    batch = LLMBatch.from_inputs(*jnp.zeros((2, 1, 8), jnp.int32))
    loss = functools.partial(next_token_loss, apply_fn=RandomLogits().apply, axis_names=AXES, context=StepContext())
    run = jax.shard_map(
        lambda key: loss({}, batch=batch, rng=key)[0][None],
        mesh=make_mesh(dp=2, fsdp=2, tp=2),
        in_specs=P(),
        out_specs=P(AXES),
        check_vma=False,
    )
    by_row = np.asarray(run(key)).reshape(4, 2)
    np.testing.assert_array_equal(by_row[:, 0], by_row[:, 1])
    assert len(set(by_row[:, 0].tolist())) == 4


class HeadOverTP(nn.Module):
    """A model whose head gives each device its part of the sequence."""

    @nn.compact
    def __call__(self, tokens, pos_idx=None, document_borders=None, train=False):
        x = nn.Embed(VOCAB_SIZE, 8, embedding_init=nn.initializers.normal(1.0), name="embed")(tokens)
        x = split_array_over_mesh(x, "tp", -1)
        return TPLMHead(PARALLEL, VOCAB_SIZE, nn.initializers.normal(1.0), None, name="head")(x)


def build_head(sizes, model_class=HeadOverTP):
    return LLMTrainer(
        LLMTrainerConfig(logger=None, enable_progress_bar=False, log_grad_norm=False),
        ModelConfig(model_class=lambda config: model_class(), parallel=ParallelConfig()),
        OptimizerConfig(name="sgd", scheduler=SchedulerConfig(lr=0.5), beta1=None),
        LLMBatch.get_dtype_struct(ROWS, LENGTH),
        mesh=make_mesh(**sizes),
    )


def test_a_head_that_splits_the_sequence_over_tp_trains_as_on_one_device():
    results = []
    for sizes in ({}, {"dp": 2, "tp": 4}):
        trainer = build_head(sizes)
        state, metrics = trainer.state, None
        for index in range(2):
            state, metrics = trainer.train_step(state, draw_batch(0, index), metrics)
        results.append((unboxed_tree(state.params), get_metrics(metrics)[1]))
    (params, metrics), (params_on_mesh, metrics_on_mesh) = results
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert_close(params_on_mesh, params)
    assert metrics_on_mesh["loss_mean"] == pytest.approx(metrics["loss_mean"], rel=1e-6)
    assert metrics_on_mesh["accuracy_mean"] == metrics["accuracy_mean"]


def test_logits_of_another_shape_than_the_targets_are_refused():
    class Short(HeadOverTP):
        def __call__(self, tokens, **kwargs):
            return super().__call__(tokens, **kwargs)[:, :-1]

    trainer = build_head({}, Short)
    with pytest.raises(ValueError, match=r"logits of shape \(16, 11, 32\) for targets of shape \(16, 12\)"):
        trainer.train_step(trainer.state, draw_batch(0, 0), None)


def test_a_model_without_a_state_is_named_where_one_is_needed():
    trainer = build_head({})
    with pytest.raises(ValueError, match=r"HeadOverTP has no method init_state.*use_infinite_eval=False"):
        trainer.create_recurrent_evaluation_step_function(4)
    with pytest.raises(ValueError, match="HeadOverTP has no method init_state"):
        trainer.get_generate_fn(max_length=4)(trainer.state, jax.random.key(0), jnp.array([[1]]))


@pytest.mark.parametrize("logits_only", [False, True])
def test_a_padded_target_may_be_any_number_and_one_that_counts_must_be_in_the_vocabulary(logits_only, key):
    inputs, targets = jax.random.randint(key, (2, 3, 8), 0, 16)
    model = OnlyLogits() if logits_only else XLSTM(CONFIG)
    params = model.init(key, inputs)["params"]
    segmentation = jnp.ones_like(inputs).at[:, 6:].set(0)
    padded = dataclasses.replace(LLMBatch.from_inputs(inputs, targets), targets_segmentation=segmentation)
    losses = functools.partial(next_token_loss, axis_names=AXES, context=StepContext())
    gradients = jax.jit(jax.value_and_grad(lambda *args: losses(args[0], model.apply, args[1], key)[0]))
    expected, actual = (
        gradients(params, dataclasses.replace(padded, targets=targets.at[:, 6:].set(token))) for token in (0, -100)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for token in (-100, -1, 16):
        loss, gradient = gradients(params, dataclasses.replace(padded, targets=targets.at[1, 2].set(token)))
        assert np.isnan(loss)
        assert all(np.isnan(x).any() for x in jax.tree.leaves(gradient))


def test_a_batch_of_padding_has_no_loss(key):
    batch = jax.tree.map(jnp.zeros_like, LLMBatch.get_sample(2, 8))
    model = XLSTM(CONFIG)
    params = model.init(key, batch.inputs)["params"]
    loss, (metrics, _) = next_token_loss(params, model.apply, batch, key, StepContext(train=False), axis_names=AXES)
    assert loss == 0
    assert metrics["loss"] == {"value": 0, "count": 0}


def test_every_loss_gets_its_perplexity():
    losses = {"loss": 1.0, "dclm_loss": 2.0, "loss_mean": 0.0, "glossy": 1.0, "loss_single": 1e4, "loss_std": 1.0}
    added = {name: value for name, value in add_perplexities(losses).items() if name not in losses}
    assert added == {
        "perplexity": math.e,
        "dclm_perplexity": math.exp(2.0),
        "perplexity_mean": 1.0,
        "perplexity_single": math.inf,
    }
