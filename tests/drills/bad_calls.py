"""Drill: wrong arguments of the documented Python API.

Each case is one wrong argument. The right answer: an exception of a kind that means a user's mistake, raised by a line
of the package, whose message is short and names the argument. No exception at all is silently wrong.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from drills.outcomes import Outcome, Result, describe_error, raised_by_the_package, run_case
from meshes import make_mesh
from trainer.runs import make_trainer

from xlstm_jax import dataset
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.configs import ConfigDict
from xlstm_jax.dataset.configs import FormalTaskDataConfig, StandardLibraryDataConfig, TextFilesDataConfig
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
from xlstm_jax.import_utils import resolve_import
from xlstm_jax.inference.sampling import filtered_sampling, temperature_sampling
from xlstm_jax.kernels.mlstm import mlstm, mlstm_step
from xlstm_jax.kernels.slstm import slstm
from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.llama.attention import multihead_attention
from xlstm_jax.models.xlstm import XLSTMConfig
from xlstm_jax.models.xlstm.config import published
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.param_utils import get_param_mask_fn
from xlstm_jax.trainer.callbacks import LearningRateMonitorConfig, ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.early_stopping import EarlyStoppingConfig
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig
from xlstm_jax.trainer.logger import LoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig
from xlstm_jax.trainer.metrics import get_metrics, update_metrics
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer

MISTAKES = (ValueError, TypeError, KeyError, FileNotFoundError, ImportError)
MAX_LINES = 4
NAN, INF = math.nan, math.inf
Case = tuple[str, Callable[[], Any], str]
"""What is wrong, the call, and the name that the message must contain."""

XLSTM = {"vocab_size": 32, "embedding_dim": 16, "num_heads": 2, "num_blocks": 2}
LLAMA = {"vocab_size": 32, "embedding_dim": 16, "num_blocks": 1, "head_dim": 8}
DATA = {"global_batch_size": 8, "max_target_length": 16}

WRONG_FIELDS: list[tuple[type, dict[str, Any], dict[str, list[Any]]]] = [
    (
        XLSTMConfig,
        XLSTM,
        {
            "vocab_size": [0, -1, "32", NAN],
            "embedding_dim": [0, 15, "16", 16.5],
            "num_heads": [0, 3, None],
            "num_blocks": [0, -1, 1.5],
            "block_kinds": ["unknown", [], ["mlstm"], "xLSTM[0:0]"],
            "norm": ["batchnorm", None],
            "norm_eps": [0, -1, NAN, "small"],
            "gate_soft_cap": [-1.0, 0, NAN],
            "logits_soft_cap": [-1.0, NAN],
            "dropout_rate": [-0.1, 1.0, NAN],
            "qk_dim_factor": [0, NAN, INF],
            "mlstm_backend": ["cuda"],
            "chunk_size": [0, 2.5],
            "dtype": ["float99", "int32", None],
            "cell_eps": [-1, NAN],
            "input_gate_bias_init": [NAN, "a"],
            "remat": ["everything"],
        },
    ),
    (
        LlamaConfig,
        LLAMA,
        {
            "vocab_size": [0, "32"],
            "head_dim": [0, 3, 5],
            "num_kv_heads": [0, 3],
            "theta": [0, NAN],
            "dropout_rate": [1.0, NAN],
            "attention_backend": ["flash"],
            "ffn_dim_multiplier": [0, NAN],
        },
    ),
    (
        SchedulerConfig,
        {"lr": 1e-3},
        {
            "lr": [-1, NAN, INF, "1e-3", None],
            "name": ["cosine", ""],
            "warmup_steps": [-1, NAN, "10", 2.5],
            "decay_steps": [-5, 1.5],
            "end_lr": [-1.0],
        },
    ),
    (
        OptimizerConfig,
        {"name": "adamw"},
        {
            "name": ["adamx", "", None],
            "beta1": [1.0, -0.1, NAN, None, "0.9"],
            "beta2": [1.0, NAN],
            "eps": [-1.0, NAN],
            "weight_decay": [-1.0, NAN, "0.1"],
            "grad_clip_norm": [0, -1.0, NAN],
            "weight_decay_exclude": ["bias", ["("], [3]],
            "scheduler": [None, {"lr": 1e-3}],
        },
    ),
    (
        dataset.SyntheticDataConfig,
        DATA,
        {
            "global_batch_size": [0, -8, "8", 8.5],
            "max_target_length": [0, "16"],
            "num_batches": [0, -1],
            "vocab_size": [0, -3],
            "data_shuffle_seed": [-1, "a"],
        },
    ),
    (
        TextFilesDataConfig,
        {**DATA, "data_path": "x.txt"},
        {
            "packing": ["bins"],
            "on_bad_data": ["ignore"],
            "worker_count": [-1, "2"],
            "max_document_bytes": [1],
            "batch_rampup_factors": [{-1: 2.0}, {0: 0.01}, {0: NAN}],
        },
    ),
    (FormalTaskDataConfig, {**DATA, "task": "parity", "min_length": 3, "max_length": 8}, {"max_length": [2]}),
    (StandardLibraryDataConfig, DATA, {"split": ["test"]}),
    (
        TrainerConfig,
        {},
        {
            "gradient_accumulate_steps": [0, -2, "2"],
            "default_train_log_modes": [["median"], "mean"],
            "intermediates_log_modes": [["median"]],
        },
    ),
    (LoggerConfig, {}, {"log_every_n_steps": [0, -1, "5"], "print_level": ["LOUD"]}),
    (FileLoggerConfig, {}, {"config_format": ["toml"], "log_step_key": ["log_epoch"]}),
    (
        ModelCheckpointConfig,
        {},
        {
            "max_to_keep": [0, -1, "3", NAN],
            "mode": ["lowest"],
            "keep_every": [0],
            "every_n_minutes": [0, -5.0, NAN],
            "main_process_only": [True],
        },
    ),
    (ParameterEMAConfig, {}, {"decay": [1.0, -0.1, NAN]}),
    (EarlyStoppingConfig, {"monitor": "loss"}, {"patience": [0, -1], "mode": ["lowest"]}),
    (ParallelConfig, {}, {"fsdp_gather_dtype": ["int8"], "remat": ["Block"], "fsdp_modules": ["Embed"]}),
]


def config_cases() -> Iterator[Case]:
    """Wrong fields of configs."""
    for config_class, fields, wrong in WRONG_FIELDS:
        for name, values in wrong.items():
            for value in values:
                case = f"{config_class.__name__}({name}={value!r})"
                yield case, lambda c=config_class, f=fields, n=name, v=value: c(**{**f, n: v}), name
    yield "XLSTMConfig(qk_dim_factor=0.01)", lambda: XLSTMConfig(**XLSTM, qk_dim_factor=0.01), "qk_dim"
    missing = {name: value for name, value in XLSTM.items() if name != "vocab_size"}
    yield "XLSTMConfig without vocab_size", lambda: XLSTMConfig(**missing), "vocab_size"
    yield "XLSTMConfig(vocabsize=32)", lambda: XLSTMConfig(**XLSTM, vocabsize=32), "vocabsize"
    yield "published('xLSTM-3B')", lambda: published("xLSTM-3B"), "xLSTM-3B"
    yield "from_dict with None", lambda: ConfigDict.from_dict(XLSTMConfig, None), "XLSTMConfig"
    yield "from_dict with text", lambda: ConfigDict.from_dict(XLSTMConfig, "hello"), "XLSTMConfig"
    yield "resolve_import('nowhere.Class')", lambda: resolve_import("nowhere.Class"), "nowhere"


def mesh_cases() -> Iterator[Case]:
    """Meshes that the devices do not allow."""
    for fields in (
        {"data_axis_size": 3, "fsdp_axis_size": 100},
        {"data_axis_size": 0},
        {"data_axis_size": -1, "fsdp_axis_size": -1},
        {"model_axis_size": -2},
        {"data_axis_size": "all"},
        {"data_axis_size": 1.5},
    ):
        yield f"mesh {fields}", lambda f=fields: initialize_mesh(ParallelConfig(**f)), "axis"
    same = ParallelConfig(data_axis_name="x", fsdp_axis_name="x")
    yield "mesh with two axes of one name", lambda: initialize_mesh(same), "names"
    yield "mesh of no devices", lambda: initialize_mesh(ParallelConfig(), jnp.zeros(0)), "device"
    mesh = make_mesh()
    synthetic = dataset.SyntheticDataConfig
    yield "a base class as data", lambda: dataset.create_data_iterator(dataset.DataConfig(**DATA), mesh), "DataConfig"
    yield "no length", lambda: next(iter(dataset.create_data_iterator(synthetic(global_batch_size=8), mesh))), "length"
    yield "a mixture of nothing", lambda: dataset.create_mixed_data_iterator([], mesh), "data set"


def kernel_cases() -> Iterator[Case]:
    """Arrays of wrong shapes, and unknown names."""
    b, s, h, d = 2, 8, 2, 4
    x, gate = jnp.ones((b, s, h, d)), jnp.ones((b, s, h))
    good = {"q": x, "k": x, "v": x, "igate": gate, "fgate": gate}
    wrong = {
        "q": [x[0], x[:, :0], x[..., 0]],
        "k": [x[..., :2], x[:1]],
        "v": [x[:, :3], x[0]],
        "igate": [gate[..., None], gate[:1]],
        "fgate": [gate[:, :4]],
        "resets": [jnp.zeros((b, s + 1), bool)],
        "chunk_size": [0, -1],
        "backend": ["triton", None],
        "input_gate": ["tanh"],
        "state": [(jnp.ones(3),) * 3],
        "eps": [NAN, -1.0],
    }
    for name, values in wrong.items():
        for index, value in enumerate(values):
            case = f"mlstm with wrong {name}, {index}"
            yield case, lambda n=name, v=value: mlstm(**{**good, n: v}), name
    yield "mlstm_step with sequences", lambda: mlstm_step(**good, state=None), "mlstm"
    recurrent = jnp.ones((h, d, 4, d))
    gates = jnp.ones((b, s, 4, h, d))
    yield "slstm with wrong gates", lambda: slstm(gates[:, :, :3], recurrent), "gates"
    yield "slstm with a wrong recurrent", lambda: slstm(gates, recurrent[:1]), "recurrent"
    yield "slstm with an unknown backend", lambda: slstm(gates, recurrent, backend="cuda"), "backend"
    yield "attention with wrong k", lambda: multihead_attention(x, x[..., :2], x), "k"
    yield "attention with an unknown backend", lambda: multihead_attention(x, x, x, backend="flash"), "backend"
    ids = jnp.zeros((b, s + 1), jnp.int32)
    yield "attention with wrong segment_ids", lambda: multihead_attention(x, x, x, segment_ids=ids), "segment_ids"


def metric_cases() -> Iterator[Case]:
    """Metrics and optimizers."""
    yield "an unknown log mode", lambda: update_metrics(None, {"loss": {"value": 1.0, "log_modes": ["sum"]}}), "loss"
    yield "a metric without a value", lambda: update_metrics(None, {"loss": {"count": 1}}), "loss"
    yield "a metric with more keys", lambda: update_metrics(None, {"loss": {"value": 1, "weight": 1}}), "loss"
    yield "a metric that is text", lambda: update_metrics(None, {"loss": "low"}), "loss"
    yield "a metric that is None", lambda: update_metrics(None, {"loss": None}), "loss"
    yield "get_metrics of nothing", lambda: get_metrics(None), "global_metrics"
    yield "get_metrics of a list", lambda: get_metrics([1.0]), "global_metrics"
    yield "build_optimizer(None)", lambda: build_optimizer(None), "optimizer_config"
    yield "a mask of no list", lambda: get_param_mask_fn("bias"), "exclude"
    for function in (temperature_sampling, filtered_sampling):
        for temperature in (-1.0, NAN):
            yield (
                f"{function.__name__}(temperature={temperature})",
                lambda f=function, t=temperature: f(jnp.ones((2, 4)), jax.random.key(0), t),
                "temperature",
            )
    for name, values in {"top_k": [0, -1, 1.5], "top_p": [0, 1.5, NAN]}.items():
        for value in values:
            yield (
                f"filtered_sampling({name}={value})",
                lambda n=name, v=value: filtered_sampling(jnp.ones((2, 4)), jax.random.key(0), **{n: v}),
                name,
            )


def trainer_cases(folder: Path) -> Iterator[Case]:
    """A trainer, generation and checkpoints."""
    trainer = make_trainer(path=folder / "run", callbacks=[ModelCheckpointConfig()])
    plain = make_trainer(path=folder / "plain")
    loader = [trainer.exmp_batch]
    train = trainer.train_model
    yield "neither epochs nor steps", lambda: train(loader, None), "num_train_steps"
    yield "epochs and steps", lambda: train(loader, None, num_epochs=1, num_train_steps=1), "num_train_steps"
    for value in (0, -1, 1.5, "3"):
        yield f"num_train_steps={value!r}", lambda v=value: train(loader, None, num_train_steps=v), "num_train_steps"
    yield "num_epochs=0", lambda: train(loader, None, num_epochs=0), "num_epochs"
    yield "a train loader without batches", lambda: train([], None, num_train_steps=1), "loader"
    yield "no train loader", lambda: train(None, None, num_train_steps=1), "train_loader"
    yield "a validation without batches", lambda: train(loader, [], num_train_steps=1), "val"
    yield "evaluation without batches", lambda: trainer.eval_model([], "val", 0), "val"
    yield "no checkpoint", lambda: trainer.load_model(), "checkpoint"
    yield "an unknown step", lambda: trainer.load_model(step_idx=7), "checkpoint"
    yield "no callback for checkpoints", lambda: plain.load_model(), "ModelCheckpointConfig"
    yield "load_pretrained_model of nowhere", lambda: trainer.load_pretrained_model(folder / "nowhere"), "nowhere"
    load = type(trainer).load_from_checkpoint
    yield "load_from_checkpoint of nowhere", lambda: load(folder / "nowhere"), "nowhere"
    yield "restore_model of nothing", lambda: trainer.restore_model({}), "params"
    yield (
        "two callbacks for one folder",
        lambda: make_trainer(path=folder, callbacks=[ModelCheckpointConfig()] * 2),
        "ModelCheckpoint",
    )
    yield "no folder for checkpoints", lambda: make_trainer(callbacks=[ModelCheckpointConfig()]), "log_path"
    yield "a config as a callback class", lambda: make_trainer(callbacks=[LearningRateMonitorConfig]), "callbacks"
    generate = trainer.get_generate_fn(max_length=6)
    tokens = jnp.ones((16, 3), jnp.int32)
    for name, prefix in {
        "of floats": tokens.astype(jnp.float32),
        "of three axes": tokens[..., None],
        "that is too long": jnp.ones((16, 9), jnp.int32),
        "without tokens": tokens[:, :0],
    }.items():
        yield f"a prefix {name}", lambda p=prefix: generate(trainer.state, jax.random.key(0), p), "prefix"
    for mask in (tokens[:, :2], tokens[0]):
        yield (
            f"a mask of shape {mask.shape}",
            lambda m=mask: generate(trainer.state, jax.random.key(0), tokens, m),
            "prefix_mask",
        )
    yield "max_length=0", lambda: trainer.get_generate_fn(max_length=0), "max_length"


def file_cases(folder: Path) -> Iterator[Case]:
    """Preparing data, and stores of checkpoints."""
    text = folder / "text.txt"
    text.write_text("A text.\n" * 20)
    for name, value in {
        "validation_share": 2.0,
        "shard_megabytes": 0,
        "num_workers": -2,
        "max_document_bytes": 1,
        "on_bad_data": "ignore",
        "split": "../x",
    }.items():
        options = {"num_workers": 0, name: value}
        yield f"prepare({name}={value!r})", lambda o=options, n=name: prepare(text, folder / n, **o), name
    yield "prepare of no sources", lambda: prepare([], folder / "none", num_workers=0), "sources"
    small = {"num_workers": 0, "train_vocab_size": 3}
    yield "prepare(train_vocab_size=3)", lambda: prepare(text, folder / "small", **small), "vocab_size"
    yield "a store on other storage", lambda: CheckpointStore("s3://bucket/run"), "s3:"
    yield "a checkpoint that is not there", lambda: CheckpointStore(folder / "s").resolve(3), "checkpoint"


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Make up to `count` bad calls, drawn from all."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [*config_cases(), *mesh_cases(), *kernel_cases(), *metric_cases(), *file_cases(folder)]
    cases += trainer_cases(folder)
    if count < len(cases):
        cases = random.Random(seed).sample(cases, count)
    return [run_case(case, lambda: _judge_call(case, call, name)) for case, call, name in cases]  # noqa: B023


def _judge_call(case: str, call: Callable[[], Any], name: str) -> Result:
    try:
        result = call()
    except MISTAKES as error:
        message = str(error)
        if name.lower() not in message.lower():
            return Result(case, Outcome.TRACEBACK, f"the message does not name {name}: {describe_error(error)}")
        is_ours = raised_by_the_package(error) or _is_about_arguments(error)
        if not is_ours or len(message.splitlines()) > MAX_LINES:
            return Result(case, Outcome.TRACEBACK, f"raised by another library: {describe_error(error)}")
        return Result(case, Outcome.REPORTED, describe_error(error))
    return Result(case, Outcome.WRONG, f"no error, but {str(result)[:80]}")


def _is_about_arguments(error: BaseException) -> bool:
    """Tell whether Python itself names an argument that is missing or unknown, or a module that is not there."""
    return isinstance(error, ImportError) or (isinstance(error, TypeError) and "argument" in str(error))
