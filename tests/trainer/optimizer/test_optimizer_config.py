"""Settings of optimizers that cannot be used are refused, and configs survive a way through a dictionary."""

import math

import pytest

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.checks import check_patterns
from xlstm_jax.trainer.optimizer.optimizer import NESTEROV, OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_the_defaults(name):
    assert OptimizerConfig(name=name).scheduler.lr == 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nesterov_is_refused_where_it_would_change_nothing(name):
    if name in NESTEROV:
        OptimizerConfig(name=name, nesterov=True)
    else:
        with pytest.raises(ConfigError, match=f"{name} has no such variant"):
            OptimizerConfig(name=name, nesterov=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_sgd_does_without_momentum(name):
    if name in ("sgd", "none"):
        OptimizerConfig(name=name, beta1=None)
    else:
        with pytest.raises(ConfigError, match=f"{name} needs it"):
            OptimizerConfig(name=name, beta1=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamv"}, r"Unknown optimizer 'adamv'. Did you mean 'adam"),
        ({"name": "zzz"}, "Unknown optimizer 'zzz'. Known names: adam, "),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"beta3": 1.5}, "beta3 is 1.5"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"grad_clip_norm": 0.0}, "grad_clip_norm is 0.0.*None to switch it off"),
        ({"grad_clip_value": -1.0}, "grad_clip_value is -1.0"),
        ({"weight_decay_exclude": ["("]}, r"weight_decay_exclude holds '\('"),
        ({"muon_exclude": ["["]}, "muon_exclude holds"),
        ({"stacked_params": ["*"]}, "stacked_params holds"),
        ({"name": "sgd", "beta1": None, "nesterov": True}, "sgd has no momentum"),
        ({"name": "schedule_free_adamw", "beta1": 0.0}, "needs a positive one"),
    ],
)
def test_an_impossible_setting_is_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**{"name": "adamw", **fields})


def test_a_single_pattern_must_stand_in_a_list():
    with pytest.raises(ConfigError, match=r"weight_decay_include is 'kernel'.* Write \['kernel'\]"):
        check_patterns(weight_decay_include="kernel")


def test_a_config_survives_a_way_through_a_dictionary():
    config = OptimizerConfig(
        name="muon",
        scheduler=SchedulerConfig(lr=0.1, name="cosine_decay", decay_steps=100, end_lr_factor=0.1),
        weight_decay_exclude=["bias"],
        grad_clip_norm=1.0,
    )
    assert ConfigDict.from_dict(OptimizerConfig, config.to_dict()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": None}, "Unknown optimizer None"),
        ({"beta1": "0.9"}, "beta1 is '0.9'"),
        ({"weight_decay": "0.1"}, "weight_decay is '0.1'"),
        ({"grad_clip_norm": True}, "grad_clip_norm is True"),
        ({"weight_decay_exclude": [3]}, "weight_decay_exclude holds 3"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_fields_of_another_type_are_refused_by_their_names(fields, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**{"name": "adamw", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": None}, "lr is None"),
        ({"lr": "1e-3"}, "lr is '1e-3'"),
        ({"warmup_steps": 2.5}, "warmup_steps is 2.5, but must be a whole number"),
        ({"decay_steps": 1.5}, "decay_steps is 1.5, but must be a whole number"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_schedules_of_no_numbers_are_refused_by_the_names_of_their_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{"lr": 1e-3, **fields})


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_no_config_of_an_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer_config is None, but must be an OptimizerConfig"):
        build_optimizer(None)


@pytest.mark.parametrize("scheduler", [None, 1e-3])
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_scheduler_that_is_no_config_is_refused(scheduler):
    with pytest.raises(ConfigError, match=rf"scheduler is {scheduler}: give a SchedulerConfig, such as"):
        OptimizerConfig(name="adamw", scheduler=scheduler)
