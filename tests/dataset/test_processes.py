"""Two processes together read what one reads alone, and go on where it stopped."""

import json
from pathlib import Path

import numpy as np
from meshes import make_mesh
from processes import run_two

from xlstm_jax.dataset import TextFilesDataConfig, create_mixed_data_iterator

NUM_STEPS, ROWS, LENGTH = 5, 8, 24


def read_data(folder, mesh, num_workers=0):
    configs = [
        TextFilesDataConfig(
            data_path=folder / f"{name}.jsonl",
            name=name,
            global_batch_size=ROWS,
            max_target_length=LENGTH,
            tokenizer_path="byte",
            packing="stream",
            shuffle_data=True,
            worker_count=num_workers,
        )
        for name in ("letters", "words")
    ]
    return create_mixed_data_iterator(configs, mesh, [2, 1])


def test_two_processes_take_over_from_one_with_the_next_global_batches(tmp_path):
    for name, count in (("letters", 30), ("words", 17)):
        lines = [json.dumps({"text": f"{name} {index} " * (1 + index % 5)}) for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    alone = read_data(tmp_path, make_mesh(dp=2))
    for _ in range(3):
        next(alone)
    (tmp_path / "state.json").write_text(json.dumps(alone.get_state()))
    expected = [np.asarray(next(alone).targets) for _ in range(NUM_STEPS)]

    codes, output = run_two(Path(__file__).parent / "one_of_two.py", str(tmp_path))
    assert codes == [0, 0], output
    found = np.full((NUM_STEPS, ROWS, LENGTH), -1)
    for index in range(2):
        with np.load(tmp_path / f"rows_{index}.npz") as rows:
            for name in rows.files:
                step, start = map(int, name.split())
                assert (found[step, start : start + len(rows[name])] == -1).all()
                found[step, start : start + len(rows[name])] = rows[name]
    np.testing.assert_array_equal(found, expected)
    states = [json.loads((tmp_path / f"state_{index}.json").read_text()) for index in range(2)]
    assert states == [alone.get_state()] * 2
