"""Tokenise documents once, before training: `xlstm-jax prepare SOURCE --output FOLDER`.

Documents are put into shards in the order of the source. Where a shard begins follows from the documents alone, so that
any number of workers writes the same bytes; and the manifest says after each shard where the next one begins, so that
the same command goes on where another one was stopped or killed.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.background.workers import WorkerPool
from xlstm_jax.dataset.shards.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    Shard,
    read_manifest,
    write_manifest,
)
from xlstm_jax.dataset.shards.records import SHARD_SUFFIX, find_shards, shard_number
from xlstm_jax.dataset.shards.token_shards import find_damage, find_problem, write_shard
from xlstm_jax.dataset.sources.text_files import BEGINNING, BadDataPolicy, BadDocument, OnBadData, Position
from xlstm_jax.dataset.sources.text_store import TextStore, lock
from xlstm_jax.dataset.text_sources import Split, open_splits
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER, train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

_MEGABYTE = 2**20
_USUAL_NUM_SHARDS = 256
_USUAL_SHARD_MEGABYTES = (16, 512)
"""The least and the most text in a shard, unless another amount is asked for."""
_MAX_SHARD_DOCUMENTS = 2**20
_BATCH_CHARACTERS = 2**20
"""How much text a worker tokenises at a time."""
_LOCK_FILE = ".prepare.lock"
_TRAINED_ON_FILE = "trained_on.json"
_TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", _TRAINED_ON_FILE}
_WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""Each worker has a core: threads of tokenizers would only get in each other's way."""


def prepare(
    sources: str | os.PathLike | Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    split: str | None = None,
    validation_share: float | None = None,
    tokenizer_path: str | os.PathLike = BYTE_TOKENIZER,
    train_vocab_size: int | None = None,
    train_megabytes: float | int = 256,
    add_bos: bool = False,
    add_eos: bool = False,
    column: str = "text",
    on_bad_data: OnBadData = "error",
    max_document_bytes: int | None = 65536,
    shard_megabytes: float | int | None = None,
    num_workers: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> dict[str, Manifest]:
    """Tokenise documents and write them to `<output>/<split>`, or go on with that.

    Args:
        sources: What `TextFiles` takes; or one of these: `stdlib` for Python's standard library, which has a split for
            training and one for validation; `hf:` and the name of a data set on the Hugging Face hub; a folder that
            `save_to_disk` of such a data set has written; a folder of ArrayRecord files of text, or of one such folder
            for each split.
        output: The folder.
        split: The split; "train" if not given. Sources with several splits are asked for this one.
        validation_share: Write two splits: the hash of a document decides whether it is one of this share of documents
            that are for validation, or for training.
        tokenizer_path: The tokenizer, as for `load_tokenizer`.
        train_vocab_size: Train a tokenizer of this many tokens in `<output>/tokenizer`, and use it.
        train_megabytes: How much of the text for training it is trained on, from all parts of the source.
        add_bos: Begin each document with the token for the beginning of a sequence.
        add_eos: End each document with the token for the end of a sequence, beside the one that training adds.
        column: The field or column of the text, where documents have several.
        on_bad_data: Whether a document that cannot be used is an error, or is left out and counted.
        max_document_bytes: Where files of plain text are cut, and those of the standard library for training; see
            `TextFiles`.
        shard_megabytes: How much text goes into a shard; by default, so much that there are about 256 shards.
        num_workers: The number of processes that tokenise; by default, one for each core; 0 to do it in this one.
        overwrite: Replace what was prepared otherwise, which is an error by default.
        verify: Read all shards that are there already, and write those anew that are not what the manifest says; by
            default, only those that are missing or have another size.

    Returns:
        The manifest of each split.

    Raises:
        ValueError: There is something wrong with a document or an option, or the folder was prepared otherwise.
    """
    paths = [os.fspath(path) for path in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    if not paths:
        raise ConfigError("sources is empty: name at least one file, folder or pattern.")
    if not os.fspath(output):
        raise ConfigError("output is empty: name a folder.")
    output = Path(output)
    if num_workers is not None and num_workers < 0:
        raise ConfigError(f"num_workers is {num_workers}, but must be 0 or more.")
    splits = open_splits(
        paths,
        split=split,
        validation_share=validation_share,
        column=column,
        on_bad_data=on_bad_data,
        max_document_bytes=max_document_bytes,
    )
    if train_vocab_size is not None and tokenizer_path != BYTE_TOKENIZER:
        raise ConfigError(f"A tokenizer is to be trained, but there is one: {tokenizer_path}. Leave one of them out.")
    shard_bytes = None if shard_megabytes is None else _count_bytes("shard_megabytes", shard_megabytes)
    train_bytes = _count_bytes("train_megabytes", train_megabytes)
    _check_apart(splits, output)
    if any(part.name == TOKENIZER_FOLDER for part in splits):
        raise ConfigError(f"split is {TOKENIZER_FOLDER!r}, but that folder is for a tokenizer: choose another name.")
    with _locked(output):
        if train_vocab_size is not None:
            tokenizer_path = output / TOKENIZER_FOLDER
            _train_tokenizer(tokenizer_path, splits[0], train_vocab_size, train_bytes, overwrite)
        job = _Job(
            encoder=TextEncoder(str(tokenizer_path), add_bos, add_eos),
            on_bad_data=on_bad_data,
            shard_bytes=shard_bytes,
            num_workers=_num_cores() if num_workers is None else num_workers,
            overwrite=overwrite,
            verify=verify,
        )
        return {part.name: _prepare_split(part, output / part.name, job) for part in splits}


def _count_bytes(name: str, megabytes: float | int) -> int:
    if not 1 <= megabytes * _MEGABYTE < math.inf:
        raise ConfigError(f"{name} is {megabytes}, but must be a number that makes at least one byte.")
    return int(megabytes * _MEGABYTE)


def _check_apart(splits: Sequence[Split], output: Path) -> None:
    """Refuse to read what is written here, and to write over what is read."""
    around = {output.resolve(), *output.resolve().parents}
    written = {(output / name).resolve() for name in (*(split.name for split in splits), TOKENIZER_FOLDER)}
    resolve_folder = functools.cache(Path.resolve)
    for location in {location for split in splits for location in split.source.locations}:
        is_plain = location.name not in ("", "..") and not location.is_symlink()
        resolved = resolve_folder(location.parent) / location.name if is_plain else location.resolve()
        if resolved in around and resolved.is_dir():
            raise ValueError(f"The output {output} lies in the source {location}, and would be read as text: move it.")
        if written & {resolved, *resolved.parents}:
            raise ValueError(f"The source {location} lies where the output {output} is written: choose another folder.")


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Let nobody else prepare anything in a folder meanwhile, where the file system knows locks."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / _LOCK_FILE, "wb") as file:
        try:
            lock(file.fileno())
        except BlockingIOError as error:
            raise ValueError(
                f"Another prepare works in {output}: wait until it has ended, or choose another folder."
            ) from error
        yield


def _train_tokenizer(folder: Path, split: Split, vocab_size: int, num_bytes: int, overwrite: bool) -> None:
    """Train a tokenizer, unless that has been done: then this must be the same one."""
    facts = {**split.describe(), "vocab_size": vocab_size, "num_bytes_of_sample": num_bytes}
    trained_on = folder / _TRAINED_ON_FILE
    if folder.exists():
        earlier = json.loads(trained_on.read_text()) if trained_on.exists() else {}
        if not _find_differences(earlier, facts):
            return
        if not overwrite:
            raise _prepared_otherwise(folder, _find_differences(earlier, facts), f"use it with --tokenizer {folder}")
        unknown = sorted({file.name for file in folder.iterdir()} - _TOKENIZER_FILES)
        if unknown or not earlier:
            raise ValueError(
                f"{folder} is not only what a training has written: move {', '.join(unknown) or 'it'} away."
            )
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    train_tokenizer(split.sample(num_bytes), vocab_size, temporary)
    (temporary / _TRAINED_ON_FILE).write_text(json.dumps(facts, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


@dataclasses.dataclass(frozen=True)
class _Job:
    """How all splits are prepared."""

    encoder: TextEncoder
    on_bad_data: OnBadData
    shard_bytes: int | None
    num_workers: int
    overwrite: bool
    verify: bool


def _prepare_split(split: Split, folder: Path, job: _Job) -> Manifest:
    shard_bytes = job.shard_bytes or _usual_shard_bytes(split.source.num_bytes)
    tokenizer = job.encoder.tokenizer
    manifest = Manifest(
        tokenizer_path=job.encoder.tokenizer_path,
        tokenizer_digest=job.encoder.digest,
        vocab_size=len(tokenizer),
        eod_token_id=tokenizer.eos_token_id,
        add_bos=job.encoder.add_bos,
        add_eos=job.encoder.add_eos,
        source={**split.describe(), "shard_bytes": shard_bytes},
    )
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _go_on_from(folder, manifest, job.overwrite)
    check = find_damage if job.verify else find_problem
    wrong = {index for index, shard in enumerate(manifest.shards) if check(folder, shard)}
    if manifest.is_complete and not wrong:
        return manifest
    groups = _gather_unfinished(split, folder, manifest, wrong, shard_bytes)
    tokenize = _ShardTokenizer(job.encoder, job.on_bad_data)
    in_work: collections.deque[_Group] = collections.deque()

    def tasks() -> Iterator[tuple[Path, TextStore]]:
        for group in groups:
            in_work.append(group)
            yield folder / _shard_name(split.name, group.index), group.texts

    with (
        WorkerPool(tokenize, job.num_workers, environment=_WORKER_ENVIRONMENT) as pool,
        _ProgressBar(split.name, split.source.num_bytes) as progress,
    ):
        for shard in pool.map(tasks()):
            group = in_work.popleft()
            skipped = dict(Counter(group.skipped) + Counter(shard.skipped))
            shard = dataclasses.replace(shard, skipped=skipped, next_position=group.next_position)
            manifest = manifest.with_shard(group.index, shard)
            write_manifest(folder, manifest)
            progress.advance(shard, group)
    if not manifest.shards:
        share = split.validation_share
        way_out = f": cut texts smaller with max_document_bytes, or change validation_share {share}." if share else "."
        raise ValueError(f"There are no documents for the split {split.name!r}{way_out}")
    return manifest


@dataclasses.dataclass(frozen=True)
class _Group:
    """The documents of a shard."""

    index: int
    texts: TextStore
    skipped: dict[str, int]
    next_position: Position | None
    num_bytes_read: int
    """How much of the source lies behind them."""


class _Gatherer:
    """Puts the documents of a split, from one on, into groups.

    Args:
        split: The documents.
        folder: Where the texts of a group are kept while it is in work.
        shard_bytes: How much text makes a group.
        start: Where the first document stands.
        index: What number the first group has.
    """

    def __init__(self, split: Split, folder: Path, shard_bytes: int, start: Position, index: int):
        self._split = split
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._index = index
        split.take_skipped()
        self._documents = split.documents(start)
        self._upcoming = next(self._documents, None)
        if start != BEGINNING:  # What was left out on the way belongs to the group before.
            split.take_skipped()

    def __iter__(self) -> Iterator[_Group]:
        while self._upcoming is not None:
            texts = TextStore.build(self._take(), self._folder)
            next_position = self._upcoming[0] if self._upcoming else None
            num_bytes_read = self._split.source.num_bytes_read
            yield _Group(self._index, texts, self._split.take_skipped(), next_position, num_bytes_read)
            self._index += 1

    def _take(self) -> Iterator[str]:
        num_bytes = num_documents = 0
        while self._upcoming is not None and num_bytes < self._shard_bytes and num_documents < _MAX_SHARD_DOCUMENTS:
            text = self._upcoming[1]
            yield text
            num_bytes += len(text.encode())
            num_documents += 1
            self._upcoming = next(self._documents, None)


def _gather_unfinished(
    split: Split, folder: Path, manifest: Manifest, wrong: Collection[int], shard_bytes: int
) -> Iterator[_Group]:
    """Yield the groups of the shards with these numbers, then of those that have never been written."""
    start: Position | None = BEGINNING
    for index, shard in enumerate(manifest.shards):
        if start is not None and index in wrong:
            yield next(iter(_Gatherer(split, folder, shard_bytes, start, index)))
        start = shard.next_position
    if start is not None:
        yield from _Gatherer(split, folder, shard_bytes, start, len(manifest.shards))


@dataclasses.dataclass(frozen=True)
class _ShardTokenizer:
    """Tokenises the documents of a shard and writes them: what workers do."""

    encoder: TextEncoder
    on_bad_data: OnBadData

    def __call__(self, task: tuple[Path, TextStore]) -> Shard:
        file, texts = task
        policy = BadDataPolicy(self.on_bad_data)
        shard = write_shard(file, self._tokenize(texts, policy))
        return dataclasses.replace(shard, skipped=dict(policy.skipped))

    def _tokenize(self, texts: TextStore, policy: BadDataPolicy) -> Iterator[np.ndarray]:
        for batch in _batches(texts):
            for text, tokens in zip(batch, self.encoder(batch), strict=True):
                if tokens.size:
                    yield tokens
                else:
                    policy.handle(BadDocument("no tokens", "the tokenizer finds nothing in it"), repr(text[:80]))


def _batches(texts: TextStore) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for index in range(len(texts)):
        batch += texts.read([index])
        num_characters += len(batch[-1])
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def _go_on_from(folder: Path, manifest: Manifest, overwrite: bool) -> Manifest:
    """Return what has been prepared so far in the way that a manifest says; begin anew if it was in another way."""
    earlier = read_manifest(folder)
    if earlier is not None:
        differences = _find_differences(_facts(earlier), _facts(manifest))
        if not differences:
            return earlier
        if not overwrite:
            raise _prepared_otherwise(folder, differences, "choose another folder")
    shards = find_shards(folder)
    unknown = [file.name for file in shards if earlier is None or not _has_written(earlier, file)]
    if unknown:
        raise ValueError(f"{folder} has shards of others: move {', '.join(unknown)} away, or choose another folder.")
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    for file in (*shards, *folder.glob(f".*{SHARD_SUFFIX}.tmp"), *folder.glob(f".{MANIFEST_FILE}.tmp")):
        file.unlink()
    write_manifest(folder, manifest)
    return manifest


def _has_written(manifest: Manifest, file: Path) -> bool:
    """Whether a manifest names a shard, or will: workers write some shards ahead of it."""
    if file.name in {shard.file for shard in manifest.shards}:
        return True
    index = shard_number(file)
    if index is None or index < len(manifest.shards) or manifest.is_complete:
        return False
    return file.name == _shard_name(manifest.source.get("split", ""), index)


def _shard_name(split: str, index: int) -> str:
    return f"{split}_{index:06}{SHARD_SUFFIX}"


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts = dataclasses.asdict(manifest)
    del facts["shards"], facts["tokenizer_path"]
    return {**facts.pop("source"), **facts}


def _find_differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted({*earlier, *now} - {"paths"})  # where files lie does not matter
    return [
        f"{name}: {_short(earlier.get(name, 'unknown'))} there, {_short(now.get(name, 'unknown'))} here"
        for name in names
        if earlier.get(name) != now.get(name)
    ]


def _short(value: Any) -> str:
    """Return a value for a message, of a hash only its first digits."""
    text = str(value)
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{40,}", text) else text


def _prepared_otherwise(folder: Path, differences: Sequence[str], way_out: str) -> ConfigError:
    return ConfigError(
        f"{folder} has been prepared otherwise ({'; '.join(differences)}). To go on with it, give the same options; to "
        f"replace it, set overwrite (--overwrite); or {way_out}."
    )


def _usual_shard_bytes(num_bytes: int) -> int:
    least, most = (megabytes * _MEGABYTE for megabytes in _USUAL_SHARD_MEGABYTES)
    return min(max(num_bytes // _USUAL_NUM_SHARDS, least), most)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _ProgressBar:
    """How far a split is, how fast it goes and when it will be there; only in a terminal."""

    def __init__(self, name: str, num_bytes: int):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(name, total=num_bytes, speed="")
        self._start = time.monotonic()
        self._documents = self._tokens = self._bytes = 0

    def advance(self, shard: Shard, group: _Group) -> None:
        self._documents += shard.num_documents
        self._tokens += shard.num_tokens
        self._bytes += group.texts.num_bytes
        seconds = time.monotonic() - self._start
        speed = (
            f"{self._documents:,} documents, {self._bytes / seconds / 1e6:.1f} MB/s, "
            f"{self._tokens / seconds / 1e6:.2f} million tokens/s"
        )
        self._progress.update(self._task, completed=group.num_bytes_read, speed=speed)

    def __enter__(self) -> "_ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
