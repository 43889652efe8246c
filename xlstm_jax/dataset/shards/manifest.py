"""The manifest of prepared shards: how they were made, and what each must contain."""

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlstm_jax.utils.files import move_into_place

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
"""The folder of the tokenizer trained for shards, next to the folders of their splits."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The content of a shard, and the position at which the next one starts."""

    file: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    """The size of the file."""
    sha256: str
    """The hash of the file."""
    skipped: dict[str, int]
    """The number of skipped documents by reason, from the first document of this shard to the first of the next."""
    next_position: tuple[int, int] | None
    """The position in the source of the first document of the next shard; `None` for the last shard."""

    def __post_init__(self):
        if not isinstance(self.file, str) or not self.file or Path(self.file).name != self.file:
            raise ValueError(f"the file of a shard is {self.file!r}, but must be a name without a folder")
        for name in ("num_documents", "num_tokens", "num_bytes"):
            _check_whole_number(f"{name} of {self.file}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """How the shards of a folder were made, and what they contain."""

    tokenizer_path: str
    tokenizer_digest: str
    vocab_size: int
    eod_token_id: int | None
    """The token of the tokenizer that ends documents; the records do not include it."""
    add_bos: bool
    add_eos: bool
    source: Mapping[str, Any]
    """What determines the documents and the borders of shards, for JSON."""
    shards: tuple[Shard, ...] = ()
    """The shards written so far."""

    def __post_init__(self):
        _check_whole_number("vocab_size", self.vocab_size)
        if self.eod_token_id is not None:
            _check_whole_number("eod_token_id", self.eod_token_id)
            if self.eod_token_id >= self.vocab_size:
                raise ValueError(f"eod_token_id is {self.eod_token_id}, but vocab_size is only {self.vocab_size}")

    @property
    def is_complete(self) -> bool:
        """Whether all shards have been written."""
        return bool(self.shards) and self.shards[-1].next_position is None

    @property
    def num_documents(self) -> int:
        """The number of documents in all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all shards, without those that end documents."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def skipped(self) -> dict[str, int]:
        """The number of skipped documents, by reason."""
        return dict(sum((collections.Counter(shard.skipped) for shard in self.shards), collections.Counter[str]()))

    @property
    def digest(self) -> str:
        """The SHA-256 of the digests of all shards."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def with_shard(self, index: int, shard: Shard) -> "Manifest":
        """Return the manifest with a shard replaced, or appended if the index is the next one."""
        return dataclasses.replace(self, shards=(*self.shards[:index], shard, *self.shards[index + 1 :]))

    def to_json(self) -> str:
        """Return the content of `manifest.json`."""
        totals = {"num_documents": self.num_documents, "num_tokens": self.num_tokens, "skipped": self.skipped}
        content = dataclasses.asdict(self)
        shards = content.pop("shards")
        return (
            json.dumps({"format_version": FORMAT_VERSION, **content, "totals": totals, "shards": shards}, indent=2)
            + "\n"
        )

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Read the content of `manifest.json`."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} instead of fields")
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"its format version is {version}, but only {FORMAT_VERSION} is supported")
        del content["totals"]
        for shard in content["shards"]:
            shard["next_position"] = shard["next_position"] and tuple(shard["next_position"])
        shards = tuple(Shard(**shard) for shard in content["shards"])
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("it names a shard twice")
        return Manifest(**{**content, "shards": shards})


def read_manifest(folder: str | os.PathLike) -> Manifest | None:
    """Return the manifest of a folder, if it has one."""
    file = Path(folder) / MANIFEST_FILE
    if not file.exists():
        return None
    try:
        return Manifest.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no manifest that can be read: {error!r}. Prepare the folder again.") from error


def write_manifest(folder: str | os.PathLike, manifest: Manifest) -> None:
    """Replace the manifest of a folder atomically."""
    temporary = Path(folder) / f".{MANIFEST_FILE}.tmp"
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    move_into_place(temporary, Path(folder) / MANIFEST_FILE)


def _check_whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 0")
