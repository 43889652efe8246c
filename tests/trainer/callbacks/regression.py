"""A model of five parameters, for tests of callbacks in whole runs."""

import json
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from meshes import make_mesh

from xlstm_jax.configs import ConfigDict
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer import TrainerConfig, TrainerModule
from xlstm_jax.trainer.logger import LoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig


class Linear(nn.Module):
    """One layer."""

    config: ConfigDict

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1, name="layer")(x)


class RegressionTrainer(TrainerModule):
    """Minimises the squared error."""

    def loss_function(self, params, apply_fn, batch, rng, train=True):
        loss = jnp.mean(jnp.square(apply_fn({"params": params}, batch.inputs, train=train) - batch.targets))
        return loss, ({"loss": loss}, None)


def make_regression(path=None, *, lr=0.1, callbacks: Sequence = (), **options):
    """Build a trainer on one device; further options are those of its config."""
    batch = Batch(inputs=jax.ShapeDtypeStruct((4, 4), jnp.float32), targets=jax.ShapeDtypeStruct((4, 1), jnp.float32))
    logger = LoggerConfig(log_path=path) if path else None
    return RegressionTrainer(
        TrainerConfig(logger=logger, enable_progress_bar=False, callbacks=list(callbacks), **options),
        ModelConfig(model_class=Linear, parallel=ParallelConfig()),
        OptimizerConfig(name="sgd", scheduler=SchedulerConfig(lr=lr, warmup_steps=2), beta1=None),
        batch,
        mesh=make_mesh(),
    )


def draw_batches(num_batches, *, seed=0, bad=()):
    """Draw batches; those whose indices are in `bad` hold NaN."""
    batches = []
    for index in range(num_batches):
        inputs = np.random.default_rng((seed, index)).normal(size=(4, 4)).astype(np.float32)
        batches.append(Batch(inputs=inputs * (np.nan if index in bad else 1), targets=inputs[:, :1]))
    return batches


def read_rows(path, mode):
    """Read what a run has logged in a mode."""
    return [json.loads(line) for line in (path / f"file_logs/metrics_{mode}.jsonl").read_text().splitlines()]
