"""How fast data becomes batches, and what a training step waits for it.

    python benchmarks/data.py [--seconds 5] [--rows 16 --length 8192] [--output FILE]

The corpus is the standard library with a byte-level BPE of 4096 tokens, in batches of 8 rows of 512 tokens unless
options say otherwise; `--rows 16 --length 8192` is the shape of the larger recipes. Measured in one run:

- tokenised shards to packed `LLMBatch` arrays on the device, with `stream` and `first_fit`, and grain's own packings
  of the same shards to arrays on the host;
- raw text to the same batches, on the host and on the device, beside what the tokenizer's batch encoding reaches by
  itself;
- how long a training loop waits for its next batch when a step takes 50 ms.
"""

import argparse
import functools
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.dataset import (
    GrainArrayRecordsDataConfig,
    StandardLibraryDataConfig,
    TextDataConfig,
    create_data_iterator,
)
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.sources.standard_library import load_standard_library
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

VOCAB_SIZE, ROUNDS = 4096, 5
STEP_SECONDS = 0.05
WARM_UP = 1_600_000
"""Tokens before the clock starts: few documents are read at a time at first, as their length is not known."""


class Size(NamedTuple):
    """The shape of a batch."""

    rows: int
    length: int


def describe(size: Size, config_class: type[TextDataConfig], packing: str, **options) -> TextDataConfig:
    """Return the config of endless shuffled batches."""
    return config_class(
        global_batch_size=size.rows,
        max_target_length=size.length,
        packing=packing,
        shuffle_data=True,
        drop_remainder=True,
        worker_buffer_size=2,
        **options,
    )


def num_warm_up_batches(size: Size) -> int:
    """Return how many batches come before the clock starts."""
    return -(-WARM_UP // (size.rows * size.length))


def endless(iterator) -> Iterator:
    """Go on after the end of an epoch."""
    while True:
        yield from iterator


def rate_of_batches(config: TextDataConfig, seconds: float, mesh: Mesh, on_device: bool = True) -> float:
    """Return the million targets that arrive on the device, or on the host, in a second; padding does not count."""
    iterator = create_data_iterator(config, mesh)
    batches = endless(iterator if on_device else iterator.dataloader)
    for _ in range(num_warm_up_batches(Size(config.global_batch_size, config.max_target_length or 1))):
        next(batches)
    num_targets, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        batch = jax.block_until_ready(next(batches))
        num_targets += int(np.count_nonzero(np.asarray(batch.targets_segmentation)))
    iterator.shut_down()
    return num_targets / elapsed / 1e6


def rate_of_grain(size: Size, folder: Path, packing: str, seconds: float) -> float:
    """Return the same for grain's own packing of the same records, to batches on the host."""
    shards = TokenShards(folder / "train")

    class Records:
        def __len__(self):
            return len(shards)

        def __getitem__(self, index):
            return {"tokens": shards.read([index])[0]}

    documents = grain.MapDataset.source(Records()).seed(0).shuffle().repeat(None).to_iter_dataset()
    if packing == "first_fit":

        class Cut(grain.experimental.FlatMapTransform):
            def flat_map(self, element):
                tokens = element["tokens"]
                starts = range(0, len(tokens), size.length)
                return [{"tokens": tokens[start : start + size.length]} for start in starts]

        rows = grain.experimental.FirstFitPackIterDataset(
            documents.apply(Cut()), length_struct={"tokens": size.length}, num_packing_bins=size.rows
        )
    else:
        rows = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct={"tokens": size.length})
    batches = iter(rows.batch(size.rows))
    for _ in range(num_warm_up_batches(size)):
        next(batches)
    num_targets, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        num_targets += int(np.count_nonzero(next(batches)["tokens_segment_ids"]))
    return num_targets / elapsed / 1e6


def rate_of_encoding(encoder: TextEncoder, texts: list[str], seconds: float) -> float:
    """Return the million tokens that the tokenizer finds in a second, in one call for all texts."""
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None) or encoder.tokenizer._tokenizer
    num_tokens, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        num_tokens += sum(len(encoding) for encoding in backend.encode_batch_fast(texts))
    return num_tokens / elapsed / 1e6


def waits(config: TextDataConfig, mesh: Mesh, num_steps: int = 60) -> list[float]:
    """Return the milliseconds that a loop waits for each batch while a step takes 50 ms."""
    batches = endless(create_data_iterator(config, mesh))
    next(batches)
    found = []
    for _ in range(num_steps):
        time.sleep(STEP_SECONDS)
        begin = time.perf_counter()
        next(batches)
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def spread(values: list[float]) -> str:
    """Write a median with the smallest and the largest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def in_turns(measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure all in turn, several times: what disturbs the machine disturbs all of them."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(ROUNDS):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def measure(size: Size, folder: Path, seconds: float) -> Iterator[str]:
    """Yield the lines of the report."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    prepare("stdlib", folder, train_vocab_size=VOCAB_SIZE)
    tokenizer = str(folder / "tokenizer")
    shards = {"data_path": folder, "tokenize_data": False}

    yield "| tokenised shards, million tokens/s | xlstm_jax, on the device | grain's own, on the host |"
    yield "|---|---|---|"
    for packing in ("stream", "first_fit"):
        config = describe(size, GrainArrayRecordsDataConfig, packing, **shards)
        found = in_turns(
            {
                "ours": lambda config=config: rate_of_batches(config, seconds, mesh),
                "grain": lambda packing=packing: rate_of_grain(size, folder, packing, seconds),
            }
        )
        yield f"| {packing} | {spread(found['ours'])} | {spread(found['grain'])} |"

    texts = [document.content.decode("utf-8", "replace") for document in load_standard_library().train]
    encoder = TextEncoder(tokenizer)
    measures = {"encoding alone": lambda: rate_of_encoding(encoder, texts, seconds)}
    for num_workers in (0, 2):
        config = describe(size, StandardLibraryDataConfig, "stream", tokenizer_path=tokenizer, worker_count=num_workers)
        for place, on_device in (("host", False), ("device", True)):
            measures[f"batches on the {place}, {num_workers} workers"] = functools.partial(
                rate_of_batches, config, seconds, mesh, on_device
            )
    found = in_turns(measures)
    yield ""
    yield "| raw text, million tokens/s | rate | share of encoding alone, round by round |"
    yield "|---|---|---|"
    for name, rates in found.items():
        shares = [rate / alone for rate, alone in zip(rates, found["encoding alone"], strict=True)]
        yield f"| {name} | {spread(rates)} | {spread(shares)} |"

    yield ""
    yield "| wait for a batch beside steps of 50 ms | median ms (smallest to largest) |"
    yield "|---|---|"
    configs = {
        "tokenised shards, stream": describe(size, GrainArrayRecordsDataConfig, "stream", **shards),
        "tokenised shards, first_fit": describe(size, GrainArrayRecordsDataConfig, "first_fit", **shards),
        "raw text, stream, no workers": describe(
            size, StandardLibraryDataConfig, "stream", tokenizer_path=tokenizer, worker_count=0
        ),
    }
    for name, config in configs.items():
        yield f"| {name} | {spread(waits(config, mesh))} |"


def main() -> None:
    """Print the report, and write it to a file if asked to."""
    parser = argparse.ArgumentParser(description="Measure the data pipeline.")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each measurement takes")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    versions = f"{platform.python_version()}, jax {jax.__version__}, grain {grain.__version__}"
    header = f"{versions}, {os.cpu_count()} cores, batches of {options.rows} × {options.length} tokens"
    print(header, end="\n\n")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(Size(options.rows, options.length), Path(folder), options.seconds):
            print(line, flush=True)
            lines.append(line)
    if options.output is not None:
        options.output.write_text("\n".join([header, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
