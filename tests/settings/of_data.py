"""Settings of data and of runs, observed in batches, or in what is called with them."""

import itertools
import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
from meshes import make_mesh
from settings.cases import Beside, Recorder, World, cases

from xlstm_jax.dataset import create_data_iterator
from xlstm_jax.dataset.configs import (
    FormalTaskDataConfig,
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    SyntheticDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset.order import pipeline
from xlstm_jax.dataset.sources import huggingface, records, standard_library, vocabulary_lookup
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.recipes import performance, run
from xlstm_jax.recipes.data import DataRecipe, PrepareConfig
from xlstm_jax.recipes.run_config import RunConfig
from xlstm_jax.trainer.base.trainer import TrainerModule
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig

MOST_BATCHES = 30


def read_batches(config, world: World):
    """Return the batches of an epoch."""
    world.monkeypatch.chdir(world.folder)
    documents = [{"text": "abc" * (1 + index % 4), "body": f"text {index}"} for index in range(24)]
    for name, more in (("good", []), ("bad", [{"text": "", "body": ""}])):
        lines = [json.dumps(document) for document in documents[: 20 + len(more)] + more]
        (world.folder / f"{name}.jsonl").write_text("\n".join(lines))
    (world.folder / "plain.txt").write_text("a line\n" * 9)
    iterator = create_data_iterator(config, make_mesh())
    batches = list(itertools.islice(iterator, MOST_BATCHES))
    return [[(x.shape, np.asarray(x).tolist()) for x in jax.tree.leaves(batch)] for batch in batches]


def make_encoder(config, world: World):
    """Return what tokenises documents."""
    del world
    return vars(vocabulary_lookup.encoder_of(config))


def name_sets(config, world: World):
    """Return what sets are called in statistics."""
    del world
    return pipeline._names([config])


def load_from_hub(config, world: World):
    """Record what the library `datasets` is asked for."""
    library = Recorder(answers={"DatasetDict": dict})
    world.monkeypatch.setitem(sys.modules, "datasets", library)
    huggingface.load_huggingface_dataset(config)
    return library.calls


def open_records(config, world: World):
    """Record which records are opened, and how."""
    opened = Recorder()
    for name in ("open_records", "RecordTexts"):
        world.monkeypatch.setattr(records, name, getattr(opened, name))
    world.monkeypatch.setattr(records, "read_manifest", lambda _: None)
    if records.holds_tokens(config):
        opened.TokenShards(records.shard_folder(config))
    else:
        records.open_config(config)
    return opened.calls


def read_standard_library(config, world: World):
    """Return the documents of a standard library of two."""
    train, validation = ([SimpleNamespace(content=name)] for name in (b"train", b"validation"))
    corpus = SimpleNamespace(train=train, validation=validation, describe=str)
    world.monkeypatch.setattr(standard_library, "load_standard_library", lambda: corpus)
    world.monkeypatch.setattr(standard_library, "compressor_baselines", lambda _: {})
    texts = standard_library.open_config(config).numbered()
    return texts.read(range(len(texts)))


TEXT = {"data_path": "good.jsonl", "global_batch_size": 2, "max_target_length": 16, "tokenizer_path": "byte"}
TEXT |= {"worker_count": 0}
PACKED = {"packing": "first_fit", "drop_remainder": True}
SMALL = {"global_batch_size": 2, "max_target_length": 64}
RANDOM = {"vocab_size": 9, "num_batches": 2}
DATA = [
    *cases(
        TextFilesDataConfig,
        read_batches,
        TEXT,
        data_path="plain.txt",
        shuffle_data=True,
        global_batch_size=4,
        max_target_length=8,
        data_shuffle_seed=Beside(3, {"shuffle_data": True}),
        data_column="body",
        max_steps_per_epoch=2,
        add_eod=False,
        packing="stream",
        grain_packing=True,
        grain_packing_bin_count=Beside(1, PACKED),
        drop_remainder=Beside(True, {"packing": "stream"}),
        on_bad_data=Beside("skip", {"data_path": "bad.jsonl"}),
        batch_rampup_factors={1: 2.0},
        max_document_bytes=Beside(16, {"data_path": "plain.txt"}),
    ),
    *cases(
        TextFilesDataConfig,
        make_encoder,
        TEXT,
        tokenizer_path="other",
        hf_cache_dir="cache",
        hf_access_token="secret",
        add_bos=True,
        add_eos=True,
    ),
    *cases(TextFilesDataConfig, name_sets, TEXT, name="web"),
    *cases(
        HFHubDataConfig,
        load_from_hub,
        {"hf_path": "some/set", "global_batch_size": 2},
        hf_path="other/set",
        hf_data_dir="folder",
        hf_data_files="file",
        split="validation",
        hf_num_data_processes=3,
    ),
    *cases(SyntheticDataConfig, read_batches, SMALL | RANDOM, num_batches=3, vocab_size=8, mean_document_length=5),
    *cases(
        FormalTaskDataConfig,
        read_batches,
        SMALL | {"task": "parity", "min_length": 3, "max_length": 9, "num_batches": 2},
        task="majority",
        min_length=5,
        max_length=12,
        num_batches=3,
    ),
    *cases(
        GrainArrayRecordsDataConfig,
        open_records,
        {"data_path": "folder", "global_batch_size": 2},
        data_path="other",
        split="validation",
        tokenize_data=False,
    ),
    *cases(StandardLibraryDataConfig, read_standard_library, {"global_batch_size": 2}, split="validation"),
    *cases(StandardLibraryDataConfig, make_encoder, {"global_batch_size": 2}, tokenizer_path="other"),
]


def record_preparation(config, world: World):
    """Record how texts are prepared."""
    called = Recorder()
    world.monkeypatch.setattr(run, "prepare", called.prepare)
    run.prepare_data(DataRecipe(train=[SyntheticDataConfig(**SMALL)], prepare=config))
    return called.calls


def record_loaders(config, world: World):
    """Record which loaders are opened, and what is prepared."""
    called = Recorder()
    for name in ("create_data_iterator", "create_mixed_data_iterator", "prepare"):
        world.monkeypatch.setattr(run, name, getattr(called, name))
    run.prepare_data(config)
    run._open_loaders(config, make_mesh())
    return called.calls


def record_run(config, world: World):
    """Record what a run is planned for, starts from and trains."""
    trainer = Recorder(answers={"global_step": 0, "load_model": lambda *_, **__: None})
    run._load_state(trainer, config, None, None, -1)
    lock = run.contextlib.ExitStack()
    run.Run(config, world.folder, trainer, None, None, None, None, None, lock).train()
    devices = performance.Devices("cpu", "cpu", {"dp": 1}, None)
    return trainer.calls, config.setup(1), config.data, performance._why_not_auto(config, devices)


def build_model(config, world: World):
    """Return the model, and the mesh that it is spread over."""
    del world
    trainer = object.__new__(TrainerModule)
    trainer.build_model(config)
    return trainer.model, initialize_mesh(config.parallel, np.array(jax.devices()))


def text_set(name: str) -> TextFilesDataConfig:
    """Return a set of texts."""
    return TextFilesDataConfig(**TEXT | {"name": name})


SHAPE = XLSTMConfig(vocab_size=12, embedding_dim=16, num_heads=2, num_blocks=1)
LLAMA = LlamaConfig(vocab_size=12, embedding_dim=16, head_dim=8, num_blocks=1)
MODEL = ModelConfig(model_class=XLSTM, parallel=ParallelConfig(), model_config=SHAPE)
SYNTHETIC = SyntheticDataConfig(global_batch_size=2, max_target_length=8)
TWO_SETS = {"train": [text_set("a"), text_set("b")]}
PARTS = {"data": DataRecipe(train=[SYNTHETIC]), "model": MODEL, "trainer": LLMTrainerConfig()}
RUN = {"name": "run", "batch_size": 2, "context_length": 8, "num_train_steps": 3, **PARTS}
RUN |= {"optimizer": OptimizerConfig(name="adam")}
RUNS = [
    *cases(
        PrepareConfig,
        record_preparation,
        {"sources": ["a.txt"]},
        sources=["b.txt"],
        output="folder",
        validation_share=0.5,
        tokenizer_path="other",
        train_vocab_size=300,
        column="body",
        on_bad_data="skip",
        max_document_bytes=64,
    ),
    *cases(
        DataRecipe,
        record_loaders,
        TWO_SETS,
        train=[text_set("a"), text_set("c")],
        weights=[1.0, 2.0],
        weights_at_steps={3: [1.0, 2.0]},
        validation={"v": text_set("v")},
        prepare=PrepareConfig(sources=["a.txt"]),
    ),
    *cases(
        RunConfig,
        record_run,
        RUN,
        batch_size=Beside(4, {"data": DataRecipe(train=[SyntheticDataConfig(global_batch_size=4)])}),
        context_length=Beside(16, {"data": DataRecipe(train=[SyntheticDataConfig(global_batch_size=2)])}),
        num_train_steps=4,
        num_epochs=Beside(2, {"num_train_steps": None}),
        init_from="other",
        init_optimizer=Beside(True, {"init_from": "other"}),
        performance="manual",
        model=ModelConfig(model_class=LlamaTransformer, parallel=ParallelConfig(), model_config=LLAMA),
        data=DataRecipe(train=[SYNTHETIC], validation={"v": SYNTHETIC}),
        optimizer=OptimizerConfig(name="lion"),
        trainer=LLMTrainerConfig(seed=3),
    ),
    *cases(
        ModelConfig,
        build_model,
        {"model_class": XLSTM, "parallel": ParallelConfig(), "model_config": SHAPE},
        model_class=LlamaTransformer,
        parallel=ParallelConfig(fsdp_axis_size=2),
        model_config=LLAMA,
    ),
]
CASES = [*DATA, *RUNS]
