"""A setting that has no effect beside the others is a mistake, with the reason."""

import logging

import pytest

from xlstm_jax.configs import ConfigError, describe_ignored
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_config import build_run
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.guard import BadStepConfig
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.early_stopping import EarlyStoppingConfig
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig
from xlstm_jax.trainer.callbacks.profiler import JaxProfilerConfig
from xlstm_jax.trainer.callbacks.run_report import RunReportConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.callbacks.watchdog import HangWatchdogConfig
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig
from xlstm_jax.trainer.logger.mlflow_logger import MLflowLoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer

DATA = ("data=synthetic",)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("model.block_kinds=mlstm_up", "model.qk_norm=true"),
            "model: qk_norm is True, but has no effect in blocks of kind mlstm_up, only in those of kind mlstm: leave",
        ),
        (
            ("optimizer.alpha=3",),
            "optimizer: alpha is 3.0, but has no effect on adamw, only on ademamix: leave it out,",
        ),
        (
            ("optimizer.name=sgd",),
            "optimizer: beta2 is 0.95, but has no effect on sgd: leave it out, or at 0.999.",
        ),
        (
            ("optimizer.weight_decay=0", "optimizer.weight_decay_include=[a]"),
            "optimizer: weight_decay_include is ['a']",
        ),
        (
            ("scheduler.cooldown_lr=1e-5",),
            "scheduler: cooldown_lr is 1e-05, but has no effect without cooldown_steps: ",
        ),
        (
            ("scheduler=constant", "scheduler.end_lr=1e-5"),
            "scheduler: end_lr is 1e-05, but has no effect on the schedul",
        ),
        (
            ("parallel.fsdp_gather_dtype=bfloat16",),
            "parallel: fsdp_gather_dtype is 'bfloat16', but has no effect without",
        ),
        (
            ("trainer.log_grad_norm=false", "trainer.log_grad_norm_per_param=true"),
            "trainer: log_grad_norm_per_param is ",
        ),
        (
            ("trainer.intermediates_log_modes=[max]",),
            "trainer: intermediates_log_modes is ['max'], but has no effect wi",
        ),
        (
            ("trainer.bad_steps.max_rollbacks=3",),
            "trainer.bad_steps: max_rollbacks is 3, but has no effect with the pol",
        ),
        (
            ("callbacks.checkpoint.monitor=null", "callbacks.checkpoint.mode=max"),
            "callbacks.checkpoint: mode is 'max', but",
        ),
    ],
)
def test_a_setting_without_effect_is_one_line_with_the_reason(overrides, line):
    with pytest.raises(ConfigError) as caught:
        build_run(compose([*DATA, *overrides]))
    (message,) = str(caught.value).splitlines()
    assert message.startswith(line)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (BadStepConfig, {"spike_warmup_steps": 3}, "without loss_spike_factor and grad_norm_spike_factor"),
        (BadStepConfig, {"max_skipped_share": 0.3}, "with the policy stop, only with skip"),
        (TrainerConfig, {"check_for_nan": False, "bad_steps": BadStepConfig(policy="skip")}, "without check_for_nan"),
        (EarlyStoppingConfig, {"monitor": "loss", "every_n_steps": 3}, "every_n_steps is 3.*looks at validations"),
        (JaxProfilerConfig, {"every_n_steps": 3}, "every_n_steps is 3.*profile_every_n_minutes"),
        (HangWatchdogConfig, {"every_n_epochs": 3}, "every_n_epochs is 3.*watches all steps"),
        (RunReportConfig, {"main_process_only": False}, "main_process_only is False.*first process writes"),
        (TextSamplesConfig, {"prompts": ["a"], "every_n_steps": 3}, "every_n_steps is 3.*at validations"),
        (TextSamplesConfig, {"prompts": ["a"], "temperature": 0.0, "seed": 3}, "seed is 3.*at temperature 0"),
        (ParameterEMAConfig, {"evaluate": False, "every_n_epochs": 2}, "every_n_epochs is 2.*without evaluate"),
        (ModelCheckpointConfig, {"mode": "max"}, "mode is 'max'.*without monitor"),
        (
            LMEvalEvaluationConfig,
            {"tokenizer_path": "byte", "evaluation_tasks": ["a"], "every_n_steps": 3},
            "before val",
        ),
        (MLflowLoggerConfig, {"tracking_uri": "http://here", "log_dir": "a"}, "log_dir is 'a'.*beside tracking_uri"),
    ],
)
def test_a_field_without_effect_is_refused_in_python_too(config_class, fields, message):
    with pytest.raises(ConfigError, match=message):
        config_class(**fields)


def test_an_optimizer_that_is_built_in_python_warns_of_fields_without_effect(caplog):
    scheduler = SchedulerConfig(lr=0.1, cooldown_lr=0.01)
    with caplog.at_level(logging.WARNING):
        build_optimizer(OptimizerConfig(name="sgd", beta2=0.9, grad_clip_norm=1.0, scheduler=scheduler))
    assert [message.partition(", but")[0] for message in caplog.messages] == [
        "OptimizerConfig: beta2 is 0.9",
        "SchedulerConfig: cooldown_lr is 0.01",
    ]


def test_settings_of_fsdp_have_an_effect_on_the_modules_that_are_named():
    config = ParallelConfig(fsdp_modules=["Embed"], fsdp_gather_dtype="bfloat16", fsdp_axis_size=2)
    assert describe_ignored(config, config.ignored_fields()) == {}
