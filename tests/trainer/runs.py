"""Data, a small model and trainers for tests of whole runs."""

import json

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, unboxed_tree

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig

VOCAB_SIZE, ROWS, LENGTH = 32, 16, 12


def draw_batch(seed, index, *, rows=ROWS, length=LENGTH):
    """Draw the tokens of a batch: documents, and padding of all lengths, so that some rows have no target at all."""
    generator = np.random.default_rng((seed, index))
    columns = np.arange(length)
    ends = generator.integers(0, length + 1, (rows, 1))
    ends[0] = 0
    documents = 1 + (columns >= generator.integers(1, length, (rows, 1)))
    segmentation = np.where(columns < ends, documents, 0).astype(np.int32)
    inputs, targets = generator.integers(0, VOCAB_SIZE, (2, rows, length)).astype(np.int32)
    positions = np.broadcast_to(columns, (rows, length)).astype(np.int32)
    return LLMBatch(
        inputs=inputs,
        targets=targets,
        inputs_position=positions,
        inputs_segmentation=segmentation,
        targets_position=positions,
        targets_segmentation=segmentation,
    )


class TokenLoader:
    """Random tokens, each batch a function of the seed and its index; resumable through JSON."""

    def __init__(self, mesh, *, seed=0, num_batches=None, transform=None, rows=ROWS, length=LENGTH):
        self.sharding = NamedSharding(mesh, P(mesh.axis_names))
        self.seed = seed
        self.num_batches = num_batches
        self.transform = transform
        self.shape = {"rows": rows, "length": length}
        self.index = 0
        self.in_epoch = 0

    def __iter__(self):
        if self.num_batches is not None and self.in_epoch >= self.num_batches:
            self.in_epoch = 0
        return self

    def __next__(self):
        if self.num_batches is not None and self.in_epoch >= self.num_batches:
            raise StopIteration
        self.index += 1
        self.in_epoch += 1
        batch = draw_batch(self.seed, self.index, **self.shape)
        if self.transform is not None:
            batch = self.transform(batch, self.index)
        return jax.device_put(batch, self.sharding)

    def get_state(self):
        return {"index": self.index, "in_epoch": self.in_epoch}

    def set_state(self, state):
        self.index, self.in_epoch = state["index"], state["in_epoch"]


class SizedTokenLoader(TokenLoader):
    """A loader that says how long an epoch is, and starts each of them with the same batch, as validation does."""

    def __len__(self):
        return self.num_batches

    def __iter__(self):
        self.index = self.in_epoch = 0
        return self


PARALLEL = ParallelConfig(fsdp_modules=("Embed", "Block", "LMHead"), fsdp_min_weight_size=16)


def model_config(**changes):
    """Describe a model of two blocks."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "embedding_dim": 16,
        "num_heads": 2,
        "num_blocks": 2,
        "chunk_size": 8,
        "parallel": PARALLEL,
    } | changes
    return ModelConfig(model_class=XLSTM, parallel=PARALLEL, model_config=XLSTMConfig(**shape))


SGD = OptimizerConfig(name="sgd", scheduler=SchedulerConfig(lr=0.1), beta1=None)
ADAMW = OptimizerConfig(
    name="adamw",
    scheduler=SchedulerConfig(name="cosine_decay", lr=0.01, decay_steps=100, warmup_steps=2),
    eps=1e-4,
    weight_decay=0.1,
    grad_clip_norm=1.0,
)


def make_trainer(sizes=None, *, path=None, trainer_class=LLMTrainer, optimizer=ADAMW, model=None, rows=ROWS, **options):
    """Build a trainer on a mesh; further options are those of its config."""
    log_every = options.pop("log_every_n_steps", 1)
    options.setdefault("logger", LoggerConfig(log_path=path, log_every_n_steps=log_every))
    options.setdefault("enable_progress_bar", False)
    config_class = options.pop("config_class", LLMTrainerConfig)
    return trainer_class(
        config_class(**options),
        model or model_config(),
        optimizer,
        LLMBatch.get_dtype_struct(rows, LENGTH),
        mesh=make_mesh(**(sizes or {})),
    )


def whole_state(trainer):
    """Return all numbers of a train state, by name."""
    state = trainer.state
    parts = {"params": state.params, "opt_state": state.opt_state, "step": state.step, "rng": state.rng}
    leaves, _ = jax.tree_util.tree_flatten_with_path(unboxed_tree(parts))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def losses(path, name="loss_mean", mode="train"):
    """Read the losses that a run has logged, by step."""
    rows = [json.loads(line) for line in (path / f"file_logs/metrics_{mode}.jsonl").read_text().splitlines()]
    return {row["log_step"]: row[name] for row in rows if name in row}
