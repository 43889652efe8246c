"""A run on real text goes on with exactly the next batch, on any mesh."""

import csv
import shutil

import numpy as np
import pytest
from trainer.runs import LENGTH, ROWS, losses, make_trainer, model_config, whole_state

from xlstm_jax.dataset import StandardLibraryDataConfig, TextFilesDataConfig, create_mixed_data_iterator
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig

pytestmark = pytest.mark.slow

NUM_STEPS, STOP = 8, 5
EIGHT, TWO = {"dp": 2, "fsdp": 2, "tp": 2}, {"fsdp": 2}


def data(folder, mesh, packing, num_workers=0):
    """Mix the standard library with another text, with weights that change within the run."""
    (folder / "poem.txt").write_text("A text has lines.\nThey are short.\n" * 40)
    batches = {
        "global_batch_size": ROWS,
        "max_target_length": LENGTH,
        "packing": packing,
        "shuffle_data": True,
        "worker_count": num_workers,
    }
    configs = [
        StandardLibraryDataConfig(name="library", **batches),
        TextFilesDataConfig(name="poem", data_path=folder, tokenizer_path="byte", max_document_bytes=100, **batches),
    ]
    return create_mixed_data_iterator(configs, mesh, [3, 1], {3: [1, 1]})


def train(path, folder, packing, *, steps, sizes=EIGHT, num_workers=0):
    trainer = make_trainer(
        sizes, path=path, model=model_config(vocab_size=264), callbacks=[ModelCheckpointConfig(every_n_steps=STOP)]
    )
    loader = data(folder, trainer.mesh, packing, num_workers)
    trainer.load_model(raise_if_not_found=False)
    if trainer.global_step:
        trainer.load_data_loaders(train_loader=loader)
    trainer.train_model(loader, num_train_steps=steps)
    return trainer


@pytest.fixture(scope="module", params=["stream", "first_fit"])
def uninterrupted(request, tmp_path_factory):
    texts, path = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("run")
    trainer = train(path, texts, request.param, steps=NUM_STEPS)
    return request.param, texts, losses(path), whole_state(trainer), path


@pytest.fixture(scope="module")
def ended(uninterrupted, tmp_path_factory):
    """The folder of such a run that ended early; a test goes on with a copy of it."""
    packing, texts, *_ = uninterrupted
    path = tmp_path_factory.mktemp("ended")
    train(path, texts, packing, steps=STOP)
    return path


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(uninterrupted, ended, tmp_path):
    packing, texts, expected, state, _ = uninterrupted
    path = shutil.copytree(ended, tmp_path / "run")
    resumed = train(path, texts, packing, steps=NUM_STEPS, num_workers=1)
    assert losses(path) == expected
    for name, leaf in whole_state(resumed).items():
        np.testing.assert_array_equal(leaf, state[name], err_msg=name)


def test_a_run_that_is_resumed_on_another_mesh_sees_the_same_batches(uninterrupted, ended, tmp_path):
    packing, texts, expected, _, _ = uninterrupted
    path = shutil.copytree(ended, tmp_path / "run")
    train(path, texts, packing, steps=NUM_STEPS, sizes=TWO)
    found = losses(path)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)


def test_rows_say_how_batches_are_filled_and_how_far_each_source_is(uninterrupted):
    packing, *_, path = uninterrupted
    with (path / "file_logs/system_train.csv").open() as file:
        row = list(csv.DictReader(file))[NUM_STEPS - 1]
    numbers = {name: float(value) for name, value in row.items() if value and name.startswith("data_")}
    assert numbers["data_skipped_library"] == numbers["data_skipped_poem"] == 0
    assert 0 < numbers["data_epochs_library"] < 1
    if packing == "stream":  # The first file of the library is longer than the run with first_fit.
        assert numbers["data_epochs_poem"] > 0
    assert numbers["data_utilization"] == 1 if packing == "stream" else 0.9 < numbers["data_utilization"] <= 1
    assert numbers["data_documents_per_row"] >= 1


def test_another_mixture_is_refused_with_the_difference(uninterrupted):
    packing, texts, *_, path = uninterrupted
    trainer = make_trainer(EIGHT, path=path, model=model_config(vocab_size=264), callbacks=[ModelCheckpointConfig()])
    trainer.load_model()
    loader = data(texts, trainer.mesh, "none")
    with pytest.raises(ValueError, match=f"packing: {packing} in the state, none here"):
        trainer.load_data_loaders(train_loader=loader)
