"""Tokenise documents once, before training: `xlstm-jax prepare SOURCE --output FOLDER`.

Documents are written to shards in the order of the source. Where a shard begins follows from the documents alone, so
any number of workers writes the same bytes. The manifest records after each shard where the next one begins, so the
same command resumes after an interruption.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.prepare.splits import Split, open_splits
from xlstm_jax.dataset.prepare.tokenizer import train_once
from xlstm_jax.dataset.prepare.writing import Job, prepare_split
from xlstm_jax.dataset.shards.manifest import TOKENIZER_FOLDER, Manifest
from xlstm_jax.dataset.sources.bad_data import OnBadData
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.utils.locks import lock

_MEGABYTE = 2**20
_LOCK_FILE = ".prepare.lock"


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
    """Tokenise documents and write them to `<output>/<split>`, or resume an interrupted call.

    Args:
        sources: Files, folders and patterns as for `TextFiles`, or one of: `stdlib` for Python's standard library, with
            a split for training and one for validation; `hf:` and the name of a data set on the Hugging Face hub; a
            folder written by `save_to_disk` of such a data set; a folder of ArrayRecord files of text, or with one such
            folder for each split.
        output: The folder.
        split: The split to write, and to read from sources that have several; "train" by default.
        validation_share: Write two splits, with this share of the documents in `validation`; the hash of a document
            decides on its split.
        tokenizer_path: The tokenizer, as for `load_tokenizer`.
        train_vocab_size: Train a tokenizer of this many tokens in `<output>/tokenizer`, and use it.
        train_megabytes: The size of the sample of training text that the tokenizer is trained on.
        add_bos: Start each document with the token for the beginning of a sequence.
        add_eos: End each document with the token for the end of a sequence, in addition to the one that training adds.
        column: The field or column that holds the text, where documents have several.
        on_bad_data: Whether an unusable document is an error, or is skipped and counted.
        max_document_bytes: The size at which plain text files, and training files of the standard library, are cut; see
            `TextFiles`.
        shard_megabytes: The size of the text in a shard; by default, such that there are about 256 shards.
        num_workers: The number of processes that tokenise; by default, one per core; 0 to tokenise in this process.
        overwrite: Replace shards that were prepared with other options, which is an error by default.
        verify: Read all existing shards and rewrite those that do not match the manifest; by default, only those that
            are missing or have another size.

    Returns:
        The manifest of each split.

    Raises:
        ValueError: A document or an option is invalid, or the folder was prepared with other options.
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
            train_once(tokenizer_path, splits[0], train_vocab_size, train_bytes, overwrite)
        job = Job(
            encoder=TextEncoder(str(tokenizer_path), add_bos, add_eos),
            on_bad_data=on_bad_data,
            shard_bytes=shard_bytes,
            num_workers=_num_cores() if num_workers is None else num_workers,
            overwrite=overwrite,
            verify=verify,
        )
        return {part.name: prepare_split(part, output / part.name, job) for part in splits}


def _count_bytes(name: str, megabytes: float | int) -> int:
    if not 1 <= megabytes * _MEGABYTE < math.inf:
        raise ConfigError(f"{name} is {megabytes}, but must be a number that makes at least one byte.")
    return int(megabytes * _MEGABYTE)


def _check_apart(splits: Sequence[Split], output: Path) -> None:
    """Raise if the output would be read as a source, or a source would be overwritten."""
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
    """Hold the lock of an output folder, on file systems that have locks."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / _LOCK_FILE, "wb") as file:
        try:
            lock(file.fileno())
        except BlockingIOError as error:
            raise ValueError(
                f"Another prepare works in {output}: wait until it has ended, or choose another folder."
            ) from error
        yield


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
