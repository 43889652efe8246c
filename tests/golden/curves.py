"""Golden curves: losses and gradient norms of the first steps of two tiny runs, through the command line.

    python tests/golden/curves.py FOLDER

trains both and writes their curves to FOLDER. `tests/trainer/test_golden_curves.py` compares the current code with the
curves beside this script; `benchmarks/golden.py` compares two commits, and replaces these curves.

One run is an xLSTM with blocks of all kinds, the other one a Llama. Both cover packing, a mixture of two sets, gradient
accumulation, remat, scheduled learning rates, AdamW with clipping, a mesh with all three axes, and validation.
"""

import contextlib
import json
import os
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

from xlstm_jax.cli.main import main

Curves = dict[str, list[float]]

FOLDER = Path(__file__).parent / "curves"
RUN = (
    "data=text_files",
    "data.data_path=first.jsonl",
    "+data.mix={first: {weight: 2}, second: {data_path: second.jsonl, weight: 1}}",
    "data.validation={data_path: validation.jsonl, packing: first_fit}",
    "batch_size=16",
    "context_length=48",
    "num_train_steps=30",
    "scheduler.warmup_steps=5",
    "scheduler.lr=1e-2",
    "trainer.check_val_every_n_steps=10",
    "trainer.gradient_accumulate_steps=2",
    "parallel.data_axis_size=2",
    "parallel.fsdp_axis_size=2",
    "parallel.model_axis_size=2",
    "parallel.fsdp_modules=[Embed,LMHead,Block]",
    "logger.log_every_n_steps=1",
    "callbacks.checkpoint=null",
    "callbacks.report=null",
    "model.embedding_dim=32",
    "model.remat=full",
)
MODELS = {
    "xlstm": (
        "model.num_heads=2",
        "model.num_blocks=3",
        "model.block_kinds=[mlstm,slstm,mlstm_up]",
    ),
    "llama": (
        "model=llama_160m",
        "model.vocab_size=320",
        "model.head_dim=16",
        "model.num_blocks=2",
        "model.dtype=float32",
    ),
}
"""The words that make each run's model."""


def train(name: str, folder: Path) -> Curves:
    """Train one of the models in an empty folder and return its curves."""
    write_texts(folder)
    with contextlib.chdir(folder):
        code = main(["train", f"name={name}", *RUN, *MODELS[name], "hydra.run.dir=run"])
    if code != 0:
        raise RuntimeError(f"The run ended with exit code {code}: see {folder / 'run' / 'output.log'}.")
    logs = folder / "run" / "file_logs"
    return {
        "loss": _read(logs / "metrics_train.jsonl", "loss_mean"),
        "grad_norm": _read(logs / "metrics_train.jsonl", "grad_norm_mean"),
        "validation_loss": _read(logs / "metrics_val.jsonl", "loss"),
    }


def write_texts(folder: Path) -> None:
    """Write the documents of all sets: random words of each set's own vocabulary."""
    for seed, (name, num_documents) in enumerate({"first": 400, "second": 400, "validation": 40}.items()):
        generator = random.Random(seed)
        words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(40)]
        texts = [" ".join(generator.choices(words, k=generator.randint(3, 30))) for _ in range(num_documents)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def read_golden(name: str) -> Curves:
    """Read the curves that are kept beside this script."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _read(file: Path, metric: str) -> list[float]:
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [row[metric] for row in rows if metric in row]


if __name__ == "__main__":
    output = Path(sys.argv[1])
    for name in MODELS:
        work = output / f"{name}_run"
        work.mkdir(parents=True)
        curves = train(name, work)
        (output / f"{name}.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
