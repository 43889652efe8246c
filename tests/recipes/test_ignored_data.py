"""A setting of the data that has no effect is a mistake, and the line names the setting that has one."""

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import SyntheticDataConfig
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.data import DataRecipe, PrepareConfig, read_data

TEXT = ("data=text", "data.prepare.sources=[a.txt]")
FILES = ("data=text_files", "data.data_path=a.txt")
PREPARED = ("data=prepared", "data.data_path=a")
MIX = ("data=prepared", "data.data_path=null", "data.mix={a: {data_path: x}, b: {data_path: y}}")


def mistake(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_data(compose(overrides)["data"])
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("experiment=demo", "data.data_path=foo"),
            "data.data_path has no effect with data.prepare: set data.prepare.sources, and data.prepare.output for the "
            "folder of the shards; or data.prepare=null or another choice of data, to read existing data unchanged.",
        ),
        (
            (*TEXT, "data.tokenizer_path=gpt2"),
            "data.tokenizer_path has no effect with data.prepare: set data.prepare.tokenizer_path or data.prepare.trai",
        ),
        ((*TEXT, "data.tokenize_data=true"), "data.tokenize_data has no effect with data.prepare: set data.prepare.to"),
        (
            (*TEXT, "data.train.data_path=foo"),
            "data.train.data_path has no effect with data.prepare: set data.prepare.",
        ),
        (
            (*TEXT, "data.validation.data_path=foo"),
            "data.validation.data_path has no effect with data.prepare: set data",
        ),
        ((*TEXT, "data.data_column=body"), "data.data_column has no effect with data.prepare: set data.prepare.column"),
        (
            (*TEXT, "data.max_document_bytes=9"),
            "data.max_document_bytes has no effect with data.prepare: set data.prep",
        ),
        (
            (*TEXT, "data.add_bos=true"),
            "data.add_bos is True, but has no effect on tokens: `prepare` has decided on it:",
        ),
        (
            (*TEXT, "data.mix={a: {}, b: {}}"),
            "data.mix has no effect with data.prepare, which makes one set: mix with d",
        ),
        (
            (*TEXT, "data.prepare.tokenizer_path=gpt2"),
            "data.prepare: tokenizer_path is 'gpt2', but has no effect beside train_vocab_size 4096, which trains one ("
            "null does not): leave it out, or at 'byte'.",
        ),
        (
            ("data.prepare.validation_share=0.1",),
            "data.prepare: validation_share is 0.1, but has no effect on stdlib, which has documents for validation: l",
        ),
        (
            ("data.prepare.column=body",),
            "data.prepare: column is 'body', but has no effect on stdlib, which has no colu",
        ),
        (
            (*TEXT, "data.prepare.validation_share=null"),
            "data.validation has no effect, as data.prepare makes no documents for validation: set data.prepare.valid",
        ),
        (
            (*TEXT, "data.packing=none"),
            "data.packing has no effect, as it is replaced by data.train.packing and data.validation.packing: change t",
        ),
        (
            ("data=formal_task", "data.num_batches=3"),
            "data.num_batches has no effect, as it is replaced by data.train.",
        ),
        (
            (*MIX, "data.data_path=x", "data.validation=null"),
            "data.data_path has no effect, as it is replaced by data.mix.a.data_path and data.mix.b.data_path: change",
        ),
        (
            ("data=synthetic", "data.shuffle_data=true"),
            "data.shuffle_data is True, but has no effect on synthetic batc",
        ),
        (
            (*FILES, "data.train.grain_packing_bin_count=3"),
            "data.train.grain_packing_bin_count is 3, but has no effect on the packing 'stream', only on 'first_fit'",
        ),
        (
            (*FILES, "data.train.shuffle_data=false", "data.data_shuffle_seed=3"),
            "data.data_shuffle_seed is 3, but has no effect without shuffle_data: leave it out, or at 42.",
        ),
        (
            (*PREPARED, "data.worker_count=3"),
            "data.worker_count is 3, but has no effect on tokens: `prepare` has decid",
        ),
        (
            ("data=prepared", "data.data_path=null", "data.mix={a: {data_path: x, weight: 3}}"),
            "data.mix.a.weight has no effect on one set, only on several: leave it out.",
        ),
        (
            (*PREPARED, "data.mix_at_steps={5: {}}"),
            "weights_at_steps is {5: []}, but has no effect on one set, only on several",
        ),
    ],
)
def test_a_setting_without_effect_is_a_line_that_names_the_effective_one(overrides, line):
    assert mistake(*overrides).startswith(line)


@pytest.mark.parametrize(
    "overrides",
    [
        (*TEXT, "data.prepare.validation_share=null", "data.validation=null"),
        (*TEXT, "data.prepare.train_vocab_size=null", "data.prepare.tokenizer_path=gpt2"),
        (*TEXT, "data.data_path=null"),
        (*FILES, "data.data_shuffle_seed=3"),
        (*FILES, "data.validation={}", "data.grain_packing_bin_count=3", "data.validation.packing=first_fit"),
        (*MIX, "data.validation.data_path=z", "data.mix_at_steps={5: {a: 2}}"),
    ],
)
def test_a_setting_that_one_set_reads_is_taken(overrides):
    assert read_data(compose(overrides)["data"]).train


def test_weights_of_one_set_are_refused_in_python_too():
    with pytest.raises(ConfigError, match=r"weights is \[2.0\], but has no effect on one set, only on several"):
        DataRecipe(train=[SyntheticDataConfig(global_batch_size=8)], weights=[2.0])


def test_the_standard_library_has_a_validation_set_without_a_share():
    assert PrepareConfig(sources=["stdlib"]).has_validation
