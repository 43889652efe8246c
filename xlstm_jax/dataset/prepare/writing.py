"""Tokenise a split in worker processes and write its shards, each followed by the manifest."""

import collections
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xlstm_jax.dataset.background.workers import WorkerPool
from xlstm_jax.dataset.prepare.groups import Group, default_shard_bytes, gather_unfinished
from xlstm_jax.dataset.prepare.progress import ProgressBar
from xlstm_jax.dataset.prepare.resume import resume_or_start, shard_name
from xlstm_jax.dataset.prepare.splits import Split
from xlstm_jax.dataset.shards.manifest import Manifest, Shard, write_manifest
from xlstm_jax.dataset.shards.token_shards import find_damage, find_problem, write_shard
from xlstm_jax.dataset.sources.bad_data import BadDataPolicy, BadDocument, OnBadData
from xlstm_jax.dataset.sources.text_store import TextStore
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

_BATCH_CHARACTERS = 2**20
"""The number of characters that a worker tokenises at a time."""
_WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""Each worker has one core, so threads inside a tokenizer would only compete."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The options that all splits share."""

    encoder: TextEncoder
    on_bad_data: OnBadData
    shard_bytes: int | None
    num_workers: int
    overwrite: bool
    verify: bool


def prepare_split(split: Split, folder: Path, job: Job) -> Manifest:
    """Write the shards of a split that are missing, unfinished or damaged, and return its manifest."""
    shard_bytes = job.shard_bytes or default_shard_bytes(split.source.num_bytes)
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
    manifest = resume_or_start(folder, manifest, job.overwrite)
    check = find_damage if job.verify else find_problem
    damaged = {index for index, shard in enumerate(manifest.shards) if check(folder, shard)}
    if manifest.is_complete and not damaged:
        return manifest
    groups = gather_unfinished(split, folder, manifest, damaged, shard_bytes)
    tokenize = _ShardTokenizer(job.encoder, job.on_bad_data)
    in_progress: collections.deque[Group] = collections.deque()

    def tasks() -> Iterator[tuple[Path, TextStore]]:
        for group in groups:
            in_progress.append(group)
            yield folder / shard_name(split.name, group.index), group.texts

    with (
        WorkerPool(tokenize, job.num_workers, environment=_WORKER_ENVIRONMENT) as pool,
        ProgressBar(split.name, split.source.num_bytes) as progress,
    ):
        for shard in pool.map(tasks()):
            group = in_progress.popleft()
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
class _ShardTokenizer:
    """The work of a worker process: tokenise the documents of a shard and write it."""

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
