"""Drill: damaged shards and manifests, through the iterators that training reads from.

Each case damages a copy of a prepared folder, opens it as training data and reads an epoch. The right answers: the
batches of the undamaged folder, or an error of one line, by the package, that names the folder or the file.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drills.damage import add_file, fill_with_zeros, flip, replace_by_folder, truncate
from drills.outcomes import Outcome, Result, describe_error, raised_by_the_package, run_case
from meshes import make_mesh

from xlstm_jax.dataset import GrainArrayRecordsDataConfig, create_data_iterator
from xlstm_jax.dataset.prepare import prepare

NUM_BATCHES = 4
Damage = Callable[[Path], None]
"""Changes the folder of a split, or of a tokenizer."""


def changed(*path: str | int, value: Any) -> Damage:
    """Set a value in the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def dropped(*path: str | int) -> Damage:
    """Delete a value from the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def written(name: str, content: bytes) -> Damage:
    """Replace the content of a file."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def manifests() -> Iterator[tuple[str, Damage]]:
    """Damaged manifests."""
    for content in (b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", bytes(100)):
        yield f"manifest is {content[:10]!r}", written("manifest.json", content)
    for name in ("format_version", "tokenizer_digest", "vocab_size", "eod_token_id", "shards", "source", "totals"):
        yield f"manifest without {name}", dropped(name)
    for name in ("file", "num_documents", "num_bytes", "sha256", "skipped", "next_position"):
        yield f"shard without {name}", dropped("shards", 0, name)
    yield "a manifest of another version", changed("format_version", value=99)
    yield "an unknown field", changed("surprise", value=1)
    for value in (0, -1, "many", None, 3, 1e9):
        yield f"vocab_size {value!r}", changed("vocab_size", value=value)
    for value in (-5, 10**9, "end", 1.5, [1]):
        yield f"eod_token_id {value!r}", changed("eod_token_id", value=value)
    yield "shards {}", changed("shards", value={})
    yield "shards 'x'", changed("shards", value="x")
    yield "shards [3]", changed("shards", value=[3])
    for name, values in {
        "num_documents": (lambda n: n + 1, lambda n: n - 1, 0, -1, "3", None, 2.5),
        "num_bytes": (lambda n: n + 1, "3", None),
        "file": ("gone.arecord", "", "../train/train_000000.arecord", 3, None),
        "next_position": (lambda _: 7, lambda _: "x", lambda _: [0, 5]),
    }.items():
        for number, value in enumerate(values):
            shown = f"case {number}" if callable(value) else repr(value)
            yield f"shard with {name} {shown}", changed("shards", -1, name, value=value)
    yield "shards in another order", changed("shards", value=lambda shards: shards[::-1])
    yield "a shard twice", changed("shards", value=lambda shards: [shards[0], *shards])


def shards(generator: random.Random, num_flips: int) -> Iterator[tuple[str, Damage]]:
    """Damaged shards."""

    def first(folder: Path) -> Path:
        return folder / "train_000000.arecord"

    for number in range(num_flips):
        yield f"shard with a flipped bit, {number}", lambda folder: flip(first(folder), generator)
    for number in range(4):
        yield f"cut shard {number}", lambda folder: truncate(first(folder), generator)
    yield "empty shard", written("train_000000.arecord", b"")
    yield "missing shard", lambda folder: first(folder).unlink()
    yield "folder as a shard", lambda folder: replace_by_folder(first(folder), generator)
    yield "shard of zeros", lambda folder: fill_with_zeros(first(folder), generator)
    yield "another shard", written("train_000009.arecord", b"x")
    yield "another file", lambda folder: add_file(folder, generator)
    yield "dangling link", lambda folder: _replace(first(folder)).symlink_to("nowhere")
    yield "empty folder", lambda folder: _replace(folder).mkdir()
    yield "no folder", shutil.rmtree
    yield "a file as the folder", lambda folder: _replace(folder).touch()


def _replace(path: Path) -> Path:
    """Delete what is at a path, and return the path."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Damage up to `count` copies of prepared data, drawn from all kinds, and read them."""
    generator = random.Random(seed)
    source = folder / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": f"Document {index} of the drill. " * (index % 7 + 1)}) for index in range(60)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    prepare(folder / "lines.jsonl", source, num_workers=0, shard_megabytes=0.002)
    expected = read_batches(source)
    cases = [*manifests(), *shards(generator, 12)]
    if count < len(cases):
        cases = generator.sample(cases, count)

    def read(copy: Path) -> str | None:
        found = read_batches(copy)
        is_same = all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
        return None if is_same else "other batches"

    return [
        run_case(name, lambda: read_damaged(name, damage, source, folder / f"copy_{index}", read))  # noqa: B023
        for index, (name, damage) in enumerate(cases)
    ]


def read_damaged(name: str, damage: Damage, original: Path, copy: Path, read: Callable[[Path], str | None]) -> Result:
    """Damage a copy of a folder and read it: `read` returns what is wrong with the result."""
    shutil.copytree(original, copy)
    damage(copy / "train" if (copy / "train").exists() else copy)
    try:
        problem = read(copy)
    except (ValueError, OSError) as error:
        is_clear = str(copy) in str(error) and raised_by_the_package(error) and len(str(error).splitlines()) == 1
        return Result(name, Outcome.REPORTED if is_clear else Outcome.TRACEBACK, describe_error(error))
    return Result(name, Outcome.WRONG if problem else Outcome.OK, problem or "")


def read_batches(path: Path) -> list[np.ndarray]:
    """Read some batches of tokens, as training does."""
    config = GrainArrayRecordsDataConfig(
        global_batch_size=4,
        max_target_length=64,
        data_path=path,
        tokenize_data=False,
        tokenizer_path="byte",
        packing="stream",
        worker_count=0,
    )
    iterator = iter(create_data_iterator(config, make_mesh()))
    batches = (next(iterator) for _ in range(NUM_BATCHES))
    return [np.stack([batch.inputs, batch.targets, batch.targets_segmentation]) for batch in batches]
