"""What the loss of a language model takes and reports."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from meshes import AXES

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.llm.loss import add_perplexities, next_token_loss
from xlstm_jax.trainer.user_functions import model_takes

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
    loss = functools.partial(next_token_loss, axis_names=AXES, train=True)
    expected, (metrics, _) = loss(params, whole.apply, batch, key)
    actual, (same_metrics, _) = loss({"inner": params}, logits_only.apply, batch, key)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert same_metrics["accuracy"]["value"] == metrics["accuracy"]["value"]
    with_statistics, (all_metrics, _) = loss(params, whole.apply, batch, key, log_logit_stats=True)
    np.testing.assert_allclose(with_statistics, expected, rtol=1e-6)
    assert all_metrics.keys() - metrics.keys() == {"logits_norm", "logits_std", "logits_max"}


def test_a_batch_of_padding_has_no_loss(key):
    batch = jax.tree.map(jnp.zeros_like, LLMBatch.get_sample(2, 8))
    model = XLSTM(CONFIG)
    params = model.init(key, batch.inputs)["params"]
    loss, (metrics, _) = next_token_loss(params, model.apply, batch, key, axis_names=AXES, train=False)
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
