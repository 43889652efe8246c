"""A trainer as users write it: a small model, a loss function and no more."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from meshes import make_mesh

from xlstm_jax.configs import ConfigDict
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer import TrainerConfig, TrainerModule
from xlstm_jax.trainer.optimizer import OptimizerConfig


class Regression(nn.Module):
    """A layer with dropout before it."""

    config: ConfigDict

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(1, name="layer")(x)


class RegressionTrainer(TrainerModule):
    """A trainer as users write it."""

    def loss_function(self, params, apply_fn, batch, rng, train=True):
        prediction = apply_fn({"params": params}, batch.inputs, train=train, rngs={"dropout": rng})
        loss = jnp.mean(jnp.square(prediction - batch.targets))
        return loss, ({"loss": loss, "train": {"value": float(train), "count": 1}}, None)


def make_regression(trainer_class=RegressionTrainer, sizes=None, model_class=Regression, mesh=None, **options):
    parallel = ParallelConfig()
    batch = Batch(inputs=jax.ShapeDtypeStruct((8, 4), jnp.float32), targets=jax.ShapeDtypeStruct((8, 1), jnp.float32))
    return trainer_class(
        TrainerConfig(logger=None, enable_progress_bar=False, **options),
        ModelConfig(model_class=model_class, parallel=parallel),
        OptimizerConfig(name="sgd"),
        batch,
        mesh=make_mesh(**(sizes or {"dp": 8})) if mesh is None else mesh,
    )


REGRESSION_BATCHES = [Batch(inputs=jnp.ones((8, 4)), targets=jnp.full((8, 1), float(i))) for i in range(3)]
