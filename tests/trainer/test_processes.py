"""Several processes train as one does, and stop together when one of them gets a signal."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from trainer.runs import SizedTokenLoader, TokenLoader, losses, make_trainer

HERE = pathlib.Path(__file__).parent
DEADLINE_SECONDS = 300


def run(folder, *options):
    """Run both processes to their ends; return their codes and what they said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "one_of_two.py"), str(index), str(port), str(folder), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_to_one_process_stops_both_and_they_go_on(name, code, tmp_path):
    codes, output = run(tmp_path, name, "3")
    assert codes == [code, code], output
    codes, output = run(tmp_path)
    assert codes == [0, 0], output

    alone = make_trainer({"dp": 2, "fsdp": 2}, path=tmp_path / "alone", check_val_every_n_steps=4)
    loaders = TokenLoader(alone.mesh), SizedTokenLoader(alone.mesh, seed=1, num_batches=2)
    expected = alone.train_model(*loaders, num_train_steps=8)
    np.testing.assert_allclose(list(losses(tmp_path).values()), list(losses(tmp_path / "alone").values()), rtol=1e-5)
    with np.load(tmp_path / "results.npz") as results:
        np.testing.assert_allclose(results["val_step_8"], expected["val_step_8"]["loss"], rtol=1e-5)
