"""Configs of data have the documented defaults and refuse what cannot be loaded."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from xlstm_jax import dataset
from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.dataset import (
    DataConfig,
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    SyntheticDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset import configs as configs_module

HUB = {"global_batch_size": 8, "hf_path": "some/data"}
RECORDS = {"global_batch_size": 8, "data_path": Path("records")}


@pytest.mark.parametrize(
    ("cls", "required"),
    [(DataConfig, {}), (HFHubDataConfig, {"hf_path": "a"}), (GrainArrayRecordsDataConfig, {"data_path": Path()})],
)
def test_a_batch_size_has_to_be_given(cls, required):
    with pytest.raises(TypeError, match="global_batch_size"):
        cls(**required)


def test_synthetic_data_takes_its_batch_size_like_all_others():
    with pytest.raises(TypeError, match="global_batch_size"):
        SyntheticDataConfig()
    config = SyntheticDataConfig(global_batch_size=6)
    assert (config.global_batch_size, config.num_batches) == (6, 100)


def test_the_defaults_are_the_documented_ones():
    shared = {
        "shuffle_data": False,
        "name": None,
        "data_config_type": None,
        "global_batch_size": 8,
        "max_target_length": None,
        "data_shuffle_seed": 42,
    }
    pipeline = {
        "split": "train",
        "data_column": "text",
        "max_steps_per_epoch": None,
        "tokenizer_path": "gpt2",
        "add_bos": False,
        "add_eos": False,
        "add_eod": True,
        "packing": None,
        "grain_packing": False,
        "grain_packing_bin_count": None,
        "on_bad_data": "error",
        "worker_count": 1,
        "worker_buffer_size": 1,
        "drop_remainder": False,
        "batch_rampup_factors": None,
        "hf_cache_dir": None,
        "hf_access_token": None,
    }
    hub = {"hf_path": "some/data", "hf_data_dir": None, "hf_data_files": None, "hf_num_data_processes": None}
    records = {"data_path": Path("records"), "tokenize_data": True}
    assert dataclasses.asdict(HFHubDataConfig(**HUB)) == shared | pipeline | hub
    assert dataclasses.asdict(GrainArrayRecordsDataConfig(**RECORDS)) == shared | pipeline | records


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (DataConfig, {"global_batch_size": 0}, "global_batch_size is 0, but must be at least 1"),
        (DataConfig, {"global_batch_size": 1, "max_target_length": 0}, "max_target_length is 0"),
        (DataConfig, {"global_batch_size": 1, "data_shuffle_seed": -1}, "data_shuffle_seed is -1"),
        (SyntheticDataConfig, {"global_batch_size": 1, "num_batches": 0}, "num_batches is 0"),
        (SyntheticDataConfig, {"global_batch_size": 1, "vocab_size": 0}, "vocab_size is 0"),
        (SyntheticDataConfig, {"global_batch_size": 1, "mean_document_length": 9}, "set vocab_size too"),
        (HFHubDataConfig, {**HUB, "hf_num_data_processes": 0}, "hf_num_data_processes is 0"),
        (HFHubDataConfig, {**HUB, "worker_count": -1}, "worker_count is -1"),
        (GrainArrayRecordsDataConfig, {**RECORDS, "worker_buffer_size": 0}, "worker_buffer_size is 0"),
        (GrainArrayRecordsDataConfig, {**RECORDS, "grain_packing_bin_count": 0}, "grain_packing_bin_count is 0"),
        (GrainArrayRecordsDataConfig, {**RECORDS, "max_steps_per_epoch": 0}, "max_steps_per_epoch is 0"),
        (
            GrainArrayRecordsDataConfig,
            {**RECORDS, "batch_rampup_factors": {5: 0.1}},
            r"gives 8 \* 0.1 rows from step 5",
        ),
        (HFHubDataConfig, {**HUB, "batch_rampup_factors": {-1: 2.0}}, "from step -1 on"),
        (HFHubDataConfig, {**HUB, "global_batch_size": 0}, "global_batch_size is 0"),
    ],
)
def test_values_that_cannot_be_loaded_are_refused(cls, fields, message):
    with pytest.raises(ConfigError, match=message):
        cls(**fields)


def test_training_shuffles_whole_batches_and_evaluation_reads_everything_in_order():
    train, evaluation = GrainArrayRecordsDataConfig.create_train_eval_configs(**RECORDS)
    assert (train.shuffle_data, train.drop_remainder, train.split) == (True, True, "train")
    assert (evaluation.shuffle_data, evaluation.drop_remainder, evaluation.split) == (False, False, "validation")


def test_a_class_without_a_split_gets_none():
    train, evaluation = SyntheticDataConfig.create_train_eval_configs(global_batch_size=4)
    assert (train.shuffle_data, evaluation.shuffle_data) == (True, False)
    assert type(train) is type(evaluation) is SyntheticDataConfig


def test_own_fields_go_before_the_defaults_and_shared_ones_before_all():
    train, evaluation = HFHubDataConfig.create_train_eval_configs(
        train_kwargs={"shuffle_data": False, "worker_count": 4},
        eval_kwargs={"split": "test", "worker_count": 2, "global_batch_size": 2},
        **HUB,
        worker_count=3,
    )
    assert (train.shuffle_data, train.split, train.worker_count) == (False, "train", 3)
    assert (evaluation.split, evaluation.worker_count, evaluation.global_batch_size) == ("test", 3, 8)


def test_an_access_token_is_not_shown():
    assert "secret" not in repr(HFHubDataConfig(**HUB, hf_access_token="secret"))


def test_a_config_comes_back_from_its_fields():
    config = GrainArrayRecordsDataConfig(**RECORDS, batch_rampup_factors={10: 2.0})
    plain = {**dataclasses.asdict(config), "data_path": "records", "batch_rampup_factors": {"10": 2}}
    assert ConfigDict.from_dict(GrainArrayRecordsDataConfig, plain) == config


def test_the_package_offers_all_configs_without_data_libraries():
    names = {name for name in vars(configs_module) if name.endswith("DataConfig")}
    assert names == {name for name in dataset.__all__ if name.endswith("Config")}
    assert all(getattr(dataset, name) is getattr(configs_module, name) for name in names)
    heavy = {"grain", "transformers", "orbax", "datasets", "tensorflow"}
    program = (
        "import sys\n"
        "from xlstm_jax.dataset import DataConfig\n"
        "import xlstm_jax.dataset.multihost_dataloading, xlstm_jax.dataset.synthetic_dataloading\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_grain_packing_means_first_fit_and_packing_goes_before_it():
    assert HFHubDataConfig(**HUB).packing_name == "none"
    assert HFHubDataConfig(**HUB, grain_packing=True).packing_name == "first_fit"
    assert HFHubDataConfig(**HUB, grain_packing=True, packing="stream").packing_name == "stream"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"packing": "best_fit"}, "packing is 'best_fit', but must be one of 'stream', 'first_fit', 'none', None"),
        ({"on_bad_data": "ignore"}, "on_bad_data is 'ignore'"),
        ({"grain_packing": True, "packing": "none"}, "leave one of them out"),
        ({"max_document_bytes": 0}, "max_document_bytes is 0"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_no_pipeline_knows_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        TextFilesDataConfig(global_batch_size=8, data_path="texts", **fields)
