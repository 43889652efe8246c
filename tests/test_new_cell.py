"""The cell of `examples/gated_linear_attention.py` is a part of the system without a change to the package."""

import itertools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from models.runs import shaken, tokens
from processes import TESTS
from tolerances import assert_close

from xlstm_jax.cli.main import main
from xlstm_jax.configs import ConfigError
from xlstm_jax.models.cost import count_flops, model_cost
from xlstm_jax.models.xlstm import XLSTMConfig

pytestmark = pytest.mark.slow

STACK = ["gla", "attention"] * 2
SHAPE = {"vocab_size": 24, "embedding_dim": 16, "num_heads": 2, "num_blocks": 4, "block_kinds": STACK}
TOKENS, TARGETS = tokens(24, rows=2, length=13)
RECIPE = (
    "model.model_class=gated_linear_attention.Model",
    "model.block_kinds=[gla,attention]",
    "model.decay_bias=2.0",
    "model.embedding_dim=32",
    "model.num_heads=2",
    "model.num_blocks=2",
    "data=text",
    "data.prepare.sources=[poem.txt]",
    "data.prepare.train_vocab_size=300",
    "data.prepare.validation_share=0.3",
    "data.prepare.max_document_bytes=200",
    "data.prepare.num_workers=0",
    "batch_size=8",
    "context_length=32",
    "num_train_steps=6",
    "scheduler.warmup_steps=2",
    "trainer.check_val_every_n_steps=6",
    "hydra.run.dir=run",
)


@pytest.fixture(scope="module")
def example():
    """The example, imported from outside the package as a run does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS.parent / "examples")
        import gated_linear_attention

        yield gated_linear_attention


@pytest.fixture(scope="module")
def ready(example: ModuleType):
    """A mixture of the cell and attention, its parameters, and its jitted apply."""
    model = example.Model(example.Config(**SHAPE))
    params = shaken(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])["params"])
    return model, {"params": params}, jax.jit(model.apply, static_argnames=("return_state",))


def test_prefill_and_decoding_give_the_logits_of_the_full_pass(ready):
    _, variables, apply = ready
    logits, state = apply(variables, TOKENS[:, :4], return_state=True)
    steps = [logits]
    for position in range(4, TOKENS.shape[1]):
        logits, state = apply(variables, TOKENS[:, position : position + 1], state=state, return_state=True)
        steps.append(logits)
    assert_close(jnp.concatenate(steps, axis=1), apply(variables, TOKENS))


def test_packed_documents_give_the_logits_of_separate_ones(ready):
    _, variables, apply = ready
    borders = (0, 5, 6, 13)
    marks = jnp.zeros(TOKENS.shape, bool).at[:, jnp.array(borders[1:-1])].set(True)
    parts = [apply(variables, TOKENS[:, a:b]) for a, b in itertools.pairwise(borders)]
    assert_close(apply(variables, TOKENS, document_borders=marks), jnp.concatenate(parts, axis=1))


def test_its_cost_is_that_of_the_model(ready):
    model, variables, _ = ready
    cost = model_cost(model.config, sequence_length=TOKENS.shape[1], batch_size=len(TOKENS))
    assert cost.parameters == sum(x.size for x in jax.tree.leaves(variables))
    state = jax.eval_shape(lambda: model.init_state(1))
    assert cost.state_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert cost.flops.forward == count_flops(lambda v: model.apply(v, TOKENS, targets=TARGETS), variables)


def test_only_a_config_of_its_own_class_can_have_it(example):
    with pytest.raises(ConfigError, match="must be of the kinds attention, mlstm, mlstm_up, slstm, or"):
        XLSTMConfig(**SHAPE)
    with pytest.raises(ConfigError, match=r"decay_bias is 2\.0, but has no effect in blocks of kind mlstm, only in"):
        example.Config(**SHAPE | {"block_kinds": "mlstm"}, decay_bias=2.0)


def test_the_normal_commands_train_it_and_sample_from_it(example, tmp_path, monkeypatch, capsys):
    lines = [f"On day {day} the ship of {day * 7 % 13} sails had {day * 31 % 17} stars.\n" for day in range(150)]
    (tmp_path / "poem.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *RECIPE]) == 0
    assert "attention: " in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["model_class"] == RECIPE[0].split("=")[1]
    losses = np.genfromtxt(tmp_path / "run/file_logs/metrics_val.csv", delimiter=",", names=True)
    assert np.isfinite(losses["loss"]).all()
    assert main(["generate", "run", "-p", "On day", "-n", "4"]) == 0
    assert capsys.readouterr().out.startswith("On day")
