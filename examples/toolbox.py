"""A next-byte model on the Python standard library, built from the distributed toolbox alone.

    python examples/toolbox.py

Eight simulated devices are arranged as 2 (data) x 2 (FSDP) x 2 (tensor). A small network reads a window of bytes and
predicts the next one; each step accumulates the gradients of four minibatches. Everything that a trainer does is here
to be read from top to bottom: the mesh, parameters that are born split, one program per device, gradients that are
exact on every mesh, and metrics that are summed on the devices. Nothing is downloaded; two CPU cores need a minute.
"""

import argparse
import hashlib
import math
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from xlstm_jax.distributed import simulate_CPU_devices

simulate_CPU_devices(8)  # before JAX looks for devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import ImmutableMetrics, PyTree, TrainState
from xlstm_jax.dataset import Batch
from xlstm_jax.distributed import accumulate_gradients, split_array_over_mesh, sync_gradients
from xlstm_jax.distributed.array_utils import gather_whole
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
from xlstm_jax.distributed.tensor_parallel import tp_dense
from xlstm_jax.models.shared import prepare_module
from xlstm_jax.trainer.base.param_utils import get_grad_norms, tabulate_params
from xlstm_jax.trainer.metrics import get_metrics, reduce_step_metrics, update_metrics
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer

WINDOW, EMBEDDING, FEATURES, HIDDEN, NUM_LAYERS = 32, 16, 256, 512, 2
BATCH_SIZE, NUM_MINIBATCHES = 512, 4
ROWS = P(("dp", "fsdp"))  # rows of a batch: split over the data axes, whole on the tensor axis


class NextByte(nn.Module):
    """Embed a window of bytes, mix it with feed-forward layers, predict the next byte."""

    parallel: ParallelConfig

    @nn.compact
    def __call__(self, windows: jax.Array) -> jax.Array:
        """Return the logits of the byte after each window."""
        embed = prepare_module(nn.Embed, "Embed", self.parallel)
        mix = prepare_module(nn.Dense, "Mix", self.parallel)
        layer = prepare_module(FeedForward, "FeedForward", self.parallel)
        x = embed(256, EMBEDDING, name="embed")(windows).reshape(len(windows), WINDOW * EMBEDDING)
        x = mix(FEATURES, name="mix")(x)
        for index in range(NUM_LAYERS):
            x = x + layer(self.parallel, name=f"layer_{index}")(nn.LayerNorm(name=f"norm_{index}")(x))
        return nn.Dense(256, name="head")(nn.LayerNorm(name="head_norm")(x))


class FeedForward(nn.Module):
    """Two dense layers, split over the tensor axis: the first by its outputs, the second by its inputs."""

    parallel: ParallelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform whole features; they are split only in here."""
        axis = self.parallel.model_axis_name
        x = split_array_over_mesh(x, axis, split_axis=-1)
        x = nn.gelu(tp_dense(self.parallel, nn.Dense, HIDDEN, "gather", name="up")(x))
        x = tp_dense(self.parallel, nn.Dense, FEATURES, "scatter", name="down")(x)
        return gather_whole(x, (None, axis))


def loss_function(params: PyTree, apply_fn: Callable, batch: Batch, rng: jax.Array) -> tuple:
    """Return this device's mean loss, and sums and counts for the metrics of the whole batch."""
    del rng  # no dropout here
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    hits = jnp.sum(jnp.argmax(logits, axis=-1) == batch.targets)
    metrics = {
        "loss": {"value": losses.sum(), "count": losses.size, "log_modes": ["mean"]},
        "accuracy": {"value": hits, "count": losses.size, "log_modes": ["mean"]},
        "worst_loss": {"value": losses.max(), "count": 1, "log_modes": ["max"]},
    }
    return losses.mean(), (metrics, None)


def train_step(state: TrainState, batch: Batch, metrics: ImmutableMetrics | None) -> tuple:
    """Take one step on this device's rows; `shard_map` runs it on all devices together."""
    next_rng, step_rng = jax.random.split(state.rng)
    grads, step_metrics, _ = accumulate_gradients(state, batch, step_rng, NUM_MINIBATCHES, loss_function, use_scan=True)
    grads = sync_gradients(grads, ("dp", "fsdp", "pp", "tp"))
    step_metrics = reduce_step_metrics(step_metrics, ("dp", "fsdp")) | get_grad_norms(grads)
    return state.apply_gradients(grads=grads, rng=next_rng), update_metrics(metrics, step_metrics, ("mean",))


def validation_loss(params: PyTree, apply_fn: Callable, batch: Batch) -> jax.Array:
    """Return the mean loss over the rows of all devices."""
    loss, _ = loss_function(params, apply_fn, batch, jax.random.key(0))
    return lax.pmean(loss, ("dp", "fsdp"))


def create_state(model: NextByte, mesh: Mesh, num_steps: int) -> tuple[TrainState, TrainState]:
    """Create the train state on the mesh, each device its own part, and the specs that say which."""
    schedule = SchedulerConfig(
        name="cosine_decay", lr=3e-3, warmup_steps=num_steps // 20, decay_steps=num_steps, end_lr=3e-5
    )
    config = OptimizerConfig(
        name="adamw", scheduler=schedule, weight_decay=0.1, weight_decay_include=["kernel"], grad_clip_norm=1.0
    )
    optimizer, _ = build_optimizer(config)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, WINDOW), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, rng=key)

    def on_mesh(out_specs):
        return jax.shard_map(create, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)

    key = jax.random.key(0)
    specs = nn.get_partition_spec(jax.eval_shape(on_mesh(P()), key))
    return jax.jit(on_mesh(specs))(key), specs


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Read the standard library's source as bytes: one file in twenty, chosen by its name, is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = {"train": [], "validation": []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages"} & set(name.parts):
            is_validation = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % 20 == 0
            parts["validation" if is_validation else "train"].append(path.read_bytes())
    train, validation = (np.frombuffer(b"".join(files), np.uint8) for files in parts.values())
    return train, validation


def draw_batch(data: np.ndarray, generator: np.random.Generator, mesh: Mesh, size: int = BATCH_SIZE) -> Batch:
    """Draw windows and the bytes that follow them, and put each row on its device."""
    starts = generator.integers(0, len(data) - WINDOW, size)
    rows = data[starts[:, None] + np.arange(WINDOW + 1)].astype(np.int32)
    return jax.device_put(Batch(inputs=rows[:, :-1], targets=rows[:, -1]), NamedSharding(mesh, ROWS))


def main() -> None:
    """Train, and compare with what zlib makes of the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="number of training steps")
    num_steps = max(1, parser.parse_args().steps)

    parallel = ParallelConfig(
        data_axis_size=2,
        fsdp_axis_size=2,
        model_axis_size=2,
        fsdp_modules=["Mix", "FeedForward"],
        fsdp_min_weight_size=1024,
        remat=["FeedForward"],
    )
    mesh = initialize_mesh(parallel)
    state, specs = create_state(NextByte(parallel), mesh, num_steps)
    print(tabulate_params(state, show_weight_decay=True, weight_decay_include=["kernel"]), end="\n\n")

    step = jax.jit(
        jax.shard_map(train_step, mesh=mesh, in_specs=(specs, ROWS, P()), out_specs=(specs, P()), check_vma=False),
        donate_argnums=(0, 2),
    )
    validate = jax.jit(
        jax.shard_map(
            lambda params, batch: validation_loss(params, state.apply_fn, batch),
            mesh=mesh,
            in_specs=(specs.params, ROWS),
            out_specs=P(),
            check_vma=False,
        )
    )

    train, validation = corpus()
    generator = np.random.default_rng(0)
    validation_batch = draw_batch(validation, np.random.default_rng(1), mesh, size=8 * BATCH_SIZE)
    zlib_bits = 8 * len(zlib.compress(validation.tobytes(), 9)) / len(validation)
    print(f"{len(train):,} bytes to train on; zlib needs {zlib_bits:.2f} bits per byte of the validation files.\n")
    print("Compiling the step ...", flush=True)
    metrics, start = None, time.perf_counter()
    for index in range(1, num_steps + 1):
        state, metrics = step(state, draw_batch(train, generator, mesh), metrics)
        if index % max(1, num_steps // 10) == 0:
            metrics, host = get_metrics(metrics)
            bits = float(validate(state.params, validation_batch)) / math.log(2)
            seconds = time.perf_counter() - start
            print(
                f"step {index:5d}  train {host['loss_mean'] / math.log(2):.2f} bits/byte  validation {bits:.2f}  "
                f"accuracy {host['accuracy_mean']:.2f}  gradient norm {host['grad_norm_mean']:.2f}  {seconds:4.0f} s"
            )
    print(
        f"\nThe model sees {WINDOW} bytes, zlib the last 32,768: a recurrent memory is what closes that gap. "
        "docs/tutorials/toolbox.md walks through this program."
    )


if __name__ == "__main__":
    main()
