"""Several processes train as one does, and stop together when one of them gets a signal."""

import functools
import pathlib

import numpy as np
import pytest
from processes import run_two
from trainer.runs import SizedTokenLoader, TokenLoader, losses, make_trainer, model_config

pytestmark = pytest.mark.slow

run = functools.partial(run_two, pathlib.Path(__file__).with_name("one_of_two.py"))


def test_a_signal_to_one_process_stops_both_and_they_go_on(tmp_path):
    codes, output = run(str(tmp_path), "SIGTERM", "3")
    assert codes == [143, 143], output
    codes, output = run(str(tmp_path))
    assert codes == [0, 0], output

    options = {"path": tmp_path / "alone", "model": model_config(num_blocks=1), "check_val_every_n_steps": 4}
    alone = make_trainer({"dp": 2, "fsdp": 2}, **options)
    loaders = TokenLoader(alone.mesh), SizedTokenLoader(alone.mesh, seed=1, num_batches=2)
    expected = alone.train_model(*loaders, num_train_steps=8)
    np.testing.assert_allclose(list(losses(tmp_path).values()), list(losses(tmp_path / "alone").values()), rtol=1e-5)
    with np.load(tmp_path / "results.npz") as results:
        np.testing.assert_allclose(results["val_step_8"], expected["val_step_8"]["loss"], rtol=1e-5)


def test_an_interrupt_of_one_process_stops_both(tmp_path):
    codes, output = run(str(tmp_path), "SIGINT", "3")
    assert codes == [130, 130], output
