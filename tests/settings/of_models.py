"""Settings of models, meshes, training steps, optimizers and schedules, observed in traced programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, AxisType
from settings.cases import Beside, World, cases, program_text
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.models.shared.vocabulary import create_embedding, create_lm_head
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.guard import BadStepConfig
from xlstm_jax.trainer.base.validation import ValidationSchedule
from xlstm_jax.trainer.callbacks.watchdog import HangWatchdogConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.logger import LoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.scheduler import build_lr_scheduler

CLASSES = {XLSTMConfig: XLSTM, LlamaConfig: LlamaTransformer}
ROWS, LENGTH = 2, 6


def trace_model(config, world: World):
    """Trace initialisation, loss and gradients, and the state before the first token."""
    del world
    model = CLASSES[type(config)](config)

    def program(key, tokens, borders):
        variables = model.init({"params": key, "dropout": key}, tokens)

        def loss(params):
            options = {"document_borders": borders, "train": True, "rngs": {"dropout": key}}
            return jnp.sum(model.apply({"params": params}, tokens, targets=tokens, **options)[0])

        return variables, jax.value_and_grad(loss)(variables["params"])

    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    borders = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.bool)
    program_of_model = jax.make_jaxpr(program)(jax.eval_shape(lambda: jax.random.key(0)), tokens, borders)
    return program_text(program_of_model), str(jax.eval_shape(lambda: model.init_state(ROWS)))


XLSTM_BASE = {"vocab_size": 12, "embedding_dim": 16, "num_heads": 2, "num_blocks": 1, "chunk_size": 4}
PAPER = {"block_kinds": "mlstm_up"}
SLSTM = {"block_kinds": "slstm", "chunk_size": 64}
ATTENTION = {"block_kinds": "attention", "chunk_size": 64}
LLAMA_BASE = {"vocab_size": 12, "embedding_dim": 16, "num_blocks": 1, "head_dim": 8}
OF_BOTH = {
    "vocab_size": 13,
    "embedding_dim": 32,
    "num_blocks": 2,
    "tie_weights": True,
    "use_bias": True,
    "norm_eps": 1e-3,
    "logits_soft_cap": 7.0,
    "dropout_rate": 0.5,
    "dtype": "bfloat16",
    "param_dtype": "bfloat16",
    "head_dtype": "bfloat16",
    "float8": True,
    "loss_chunk_size": 3,
    "keep_logits": True,
    "remat": "full",
    "parallel": ParallelConfig(remat=["Block"]),
    "scan_blocks": Beside(False, {"num_blocks": 2}),
    "ffn_dim": 72,
    "qk_norm": True,
}
MODELS = [
    *cases(
        XLSTMConfig,
        trace_model,
        XLSTM_BASE,
        **OF_BOTH,
        num_heads=4,
        block_kinds="mlstm_up",
        embedding_dropout=Beside(True, {"dropout_rate": 0.5}),
        norm="layernorm",
        paper_norm=Beside("rmsnorm", PAPER),
        post_norm=True,
        qk_dim_factor=1.0,
        v_dim_factor=0.5,
        qk_norm_scale=Beside(True, {"qk_norm": True}),
        gate_soft_cap=None,
        input_gate="sigmoid",
        input_gate_bias_init=-1.0,
        cell_eps=1e-3,
        ffn_proj_factor=5.0,
        ffn_round_up=16,
        conv_kernel_size=Beside(3, PAPER),
        up_proj_factor=Beside(8.0, PAPER),
        up_gate_soft_cap=Beside(5.0, PAPER),
        qkv_block_size=Beside(8, PAPER),
        slstm_ffn_factor=Beside(8.0, SLSTM),
        chunk_size=3,
        mlstm_backend=Beside("parallel", {"chunk_size": 64}),
        slstm_backend=Beside("reference", SLSTM),
        gate_dtype="bfloat16",
        num_kv_heads=Beside(1, ATTENTION),
        theta=Beside(100.0, ATTENTION),
        attention_backend=Beside("cudnn", ATTENTION),
        max_state_length=Beside(9, ATTENTION),
    ),
    *cases(
        LlamaConfig,
        trace_model,
        LLAMA_BASE,
        **OF_BOTH,
        head_dim=4,
        num_kv_heads=1,
        causal=False,
        theta=100.0,
        ffn_multiple_of=16,
        ffn_dim_multiplier=3.0,
        add_embedding_dropout=Beside(True, {"dropout_rate": 0.5}),
        attention_backend="cudnn",
        mask_across_document_boundaries=True,
        max_state_length=9,
    ),
]


class WithoutBlocks(nn.Module):
    """An embedding and a head: what a step does with a model does not depend on its blocks."""

    config: XLSTMConfig

    @nn.compact
    def __call__(self, tokens, pos_idx=None, document_borders=None, train=False, targets=None):
        """Return logits or losses."""
        del pos_idx, document_borders, train
        x = create_embedding(self.config)()[tokens]
        self.sow("intermediates", "mean", {"value": jnp.sum(x), "count": x.size})
        return create_lm_head(self.config, functools.partial(RMSNorm, self.config.norm_eps))(x, targets)


def trace_step(trainer, parallel: ParallelConfig, *, evaluates: bool = False):
    """Trace a training or an evaluation step on eight devices."""
    shape = XLSTMConfig(**XLSTM_BASE | {"parallel": parallel})
    model = ModelConfig(model_class=WithoutBlocks, parallel=parallel, model_config=shape)
    optimizer = OptimizerConfig(name="sgd", beta1=None)
    sizes = parallel.fit(8)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    abstract = AbstractTrainer(trainer, model, optimizer, LLMBatch.get_dtype_struct(16, LENGTH), mesh)
    traced = abstract.eval_step.trace(abstract.state, abstract.exmp_batch, None) if evaluates else abstract.traced
    return program_text(traced.jaxpr), str(abstract.state_partition_specs), dict(abstract.mesh.shape)


FSDP = {"fsdp_axis_size": 2, "fsdp_modules": ["Embed", "LMHead"], "fsdp_min_weight_size": 16}
PLAIN_STEP = {"logger": None, "log_grad_norm": False, "log_param_norm": False, "check_for_nan": False}
GUARDED = {"policy": "skip"}


def trace_training(config, world: World):
    """Trace a training step."""
    del world
    return trace_step(config, ParallelConfig())


def trace_evaluation(config, world: World):
    """Trace an evaluation step."""
    del world
    return trace_step(config, ParallelConfig(), evaluates=True)


def trace_on_mesh(config, world: World):
    """Trace a training step on a mesh."""
    del world
    return trace_step(LLMTrainerConfig(**PLAIN_STEP), config)


def trace_guarded(config, world: World):
    """Trace a training step that looks for bad ones."""
    del world
    return trace_step(LLMTrainerConfig(**PLAIN_STEP | {"check_for_nan": True, "bad_steps": config}), ParallelConfig())


def post_process(config, world: World):
    """Turn metrics on the host into those to log."""
    del world
    trainer = object.__new__(AbstractTrainer)
    trainer.trainer_config = config
    return trainer.get_metric_postprocess_fn()({"loss": 1.0})


def build_trainer(config, world: World):
    """Build a trainer, and record how its steps are compiled."""
    compiled = []
    name = "xlstm_jax.trainer.base.training_program.compile_step"
    world.monkeypatch.setattr(name, lambda step, **options: compiled.append(options) or step)
    world.monkeypatch.setattr(f"{name.rpartition('.')[0]}.deterministic_options", lambda: "deterministic")
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    trainer = make_regression(**{k: v for k, v in options.items() if k not in ("logger", "enable_progress_bar")})
    trainer.trainer_config = config
    trainer.init_logger(config.logger)
    tools = [type(tool).__name__ for tool in trainer.logger.log_tools]
    callbacks = [type(callback).__name__ for callback in trainer.callbacks]
    return compiled, str(trainer.state.params), tools, callbacks, trainer.logger.config.log_every_n_steps


def train_briefly(config, world: World):
    """Train two epochs of two steps, and record when the model was evaluated."""
    del world
    trainer, evaluated = make_regression(), []
    trainer.trainer_config = dataclasses.replace(config, logger=None)
    trainer.validation = ValidationSchedule(trainer.trainer_config, trainer.progress)
    trainer.train_step = lambda state, batch, metrics: (state.replace(step=state.step + 1), FrozenDict(metrics or {}))
    trainer.eval_model = lambda *_args, **_options: evaluated.append(trainer.global_step) or {}
    trainer.train_model(draw_batches(2), draw_batches(1), num_epochs=2)
    return evaluated


AT_END = {"check_val_at_end": Beside(True, {"check_val_every_n_epoch": -1, "check_val_every_n_steps": 3})}
TRAINING = [
    *cases(
        LLMTrainerConfig,
        trace_training,
        PLAIN_STEP,
        log_logit_stats=True,
        gradient_accumulate_steps=2,
        gradient_accumulate_scan=Beside(True, {"gradient_accumulate_steps": 2}),
        check_for_nan=True,
        log_grad_norm=True,
        log_grad_norm_per_param=Beside(True, {"log_grad_norm": True}),
        log_param_norm=True,
        log_param_norm_per_param=Beside(True, {"log_param_norm": True}),
        log_intermediates=True,
        default_train_log_modes=["max"],
        intermediates_log_modes=Beside(["max"], {"log_intermediates": True}),
        bad_steps=Beside(BadStepConfig(policy="skip"), {"check_for_nan": True}),
    ),
    *cases(LLMTrainerConfig, trace_evaluation, PLAIN_STEP, seed_eval=3),
    *cases(LLMTrainerConfig, post_process, {}, bytes_per_token=3.0),
    *cases(
        TrainerConfig,
        build_trainer,
        {"logger": LoggerConfig()},
        seed=3,
        debug=True,
        deterministic=True,
        donate_train_state=False,
        enable_progress_bar=False,
        logger=LoggerConfig(log_every_n_steps=7),
        callbacks=[HangWatchdogConfig()],
    ),
    *cases(TrainerConfig, train_briefly, {}, check_val_every_n_epoch=2, check_val_every_n_steps=1, **AT_END),
    *cases(
        BadStepConfig,
        trace_guarded,
        GUARDED,
        policy="stop",
        loss_spike_factor=3.0,
        grad_norm_spike_factor=3.0,
        spike_warmup_steps=Beside(3, {"loss_spike_factor": 3.0}),
    ),
    *cases(
        ParallelConfig,
        trace_on_mesh,
        FSDP,
        data_axis_size=2,
        fsdp_axis_size=4,
        fsdp_axis_shrinks=Beside(True, {"fsdp_axis_size": 16, "data_axis_size": 1}),
        model_axis_size=2,
        pipeline_axis_size=2,
        data_axis_name="d",
        fsdp_axis_name="f",
        pipeline_axis_name="p",
        model_axis_name="m",
        remat=["LMHead"],
        fsdp_modules=["Embed"],
        fsdp_min_weight_size=2**18,
        fsdp_gather_dtype="bfloat16",
        fsdp_grad_scatter_dtype="bfloat16",
        tp_async_dense=True,
    ),
]


def trace_updates(config, world: World):
    """Trace two updates of parameters of all sorts."""
    del world
    optimizer, _ = build_optimizer(config)
    shapes = {"embed": (3, 4), "block_stack": {"block": {"up": (2, 3, 4)}}, "bias": (3,)}
    params = jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    sharded = {**params, "split": nn.Partitioned(jnp.ones(3), ("tp",))}

    @jax.jit
    def updates(params):
        state = optimizer.init(params)
        first, state = optimizer.update(params, state, params)
        return first, optimizer.update(params, state, params)

    return program_text(jax.make_jaxpr(updates, axis_env=[("tp", 1)])(sharded))


def read_schedule(config, world: World):
    """Return the learning rates of a schedule."""
    del world
    return [float(build_lr_scheduler(config)(step)) for step in range(12)]


ADAMW = {"name": "adamw", "weight_decay": 0.1}
SCHEDULE = {"lr": 1.0, "name": "cosine_decay", "decay_steps": 10, "warmup_steps": 2, "cooldown_steps": 3, "end_lr": 0.1}
OPTIMIZERS = [
    *cases(
        OptimizerConfig,
        trace_updates,
        ADAMW,
        name="lion",
        scheduler=SchedulerConfig(lr=0.5),
        beta1=0.5,
        beta2=0.5,
        eps=0.1,
        weight_decay=0.5,
        weight_decay_exclude=["bias"],
        weight_decay_include=["bias"],
        grad_clip_norm=1.0,
        use_sharded_clip_norm=Beside(False, {"grad_clip_norm": 1.0}),
        grad_clip_value=1.0,
        nesterov=True,
        beta3=Beside(0.5, {"name": "ademamix"}),
        alpha=Beside(0.5, {"name": "ademamix"}),
        muon_exclude=Beside([], {"name": "muon"}),
        stacked_params=Beside([], {"name": "muon"}),
    ),
    *cases(
        SchedulerConfig,
        read_schedule,
        SCHEDULE,
        lr=2.0,
        name="linear",
        decay_steps=11,
        end_lr=0.2,
        end_lr_factor=Beside(0.5, {"end_lr": None}),
        cooldown_steps=2,
        warmup_steps=3,
        cooldown_lr=0.05,
    ),
]
CASES = [*MODELS, *TRAINING, *OPTIMIZERS]
