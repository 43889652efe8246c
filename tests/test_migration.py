"""Every field that the migration page names exists."""

import dataclasses
import re

import pytest
from processes import TESTS

from xlstm_jax.dataset.configs import DataConfig, GrainArrayRecordsDataConfig, HFHubDataConfig, SyntheticDataConfig
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.xlstm import XLSTMConfig
from xlstm_jax.recipes.data import DataRecipe
from xlstm_jax.recipes.run_config import RunConfig
from xlstm_jax.trainer.callbacks import CallbackConfig, LearningRateMonitorConfig, ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.profiler import JaxProfilerConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.logger import FileLoggerConfig, LoggerConfig
from xlstm_jax.trainer.logger.tensorboard_logger import TensorBoardLoggerConfig
from xlstm_jax.trainer.logger.wandb_logger import WandBLoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

CONFIGS = {
    config.__name__: {field.name for field in dataclasses.fields(config)}
    for config in (
        *(CallbackConfig, DataConfig, DataRecipe, FileLoggerConfig, GrainArrayRecordsDataConfig, HFHubDataConfig),
        *(
            JaxProfilerConfig,
            LLMTrainerConfig,
            LearningRateMonitorConfig,
            LlamaConfig,
            LoggerConfig,
            ModelCheckpointConfig,
        ),
        *(ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, SchedulerConfig, SyntheticDataConfig),
        *(TensorBoardLoggerConfig, WandBLoggerConfig, XLSTMConfig),
    )
}
PAGE = (TESTS.parent / "docs/migration.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| (ours|refused|not needed) \| (.+) \|$", PAGE, re.MULTILINE)


def names(text):
    return re.findall(r"`([^`]+)`", text)


def targets(old, here):
    """Return the fields that a row names: after a class, or under the old names in a class that stands first."""
    explicit = [name for name in names(here) if re.fullmatch(r"[A-Z]\w+\.\w+", name)]
    first = names(here)[0]
    return [*explicit, *(f"{first}.{name}" for name in names(old) if "." not in first)]


def test_the_page_has_the_fate_of_the_fields():
    assert len(ROWS) > 80
    assert {fate for _, fate, _ in ROWS} == {"ours", "refused", "not needed"}


@pytest.mark.parametrize(("old", "here"), [(old, here) for old, fate, here in ROWS if fate == "ours"])
def test_a_field_that_is_called_ours_exists(old, here):
    assert targets(old, here)
    for target in targets(old, here):
        config, field = target.split(".")
        assert field in CONFIGS[config], target
