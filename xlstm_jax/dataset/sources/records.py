"""ArrayRecord files of text as a source."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from xlstm_jax.dataset.configs import DataConfig, GrainArrayRecordsDataConfig
from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, read_manifest
from xlstm_jax.dataset.shards.records import RecordShards, find_shards, open_records
from xlstm_jax.dataset.sources.bad_data import OnBadData
from xlstm_jax.dataset.sources.numbered_texts import NumberedTexts
from xlstm_jax.dataset.sources.source import PathOptions


class RecordTexts:
    """Records of UTF-8 text.

    Args:
        records: The records.
    """

    def __init__(self, records: RecordShards):
        self._records = records
        self.digest = hashlib.sha256(json.dumps(records.describe()).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return some texts."""
        records = self._records.read_records(indices)
        return [self._decode(index, record) for index, record in zip(indices, records, strict=True)]

    def _decode(self, index: int, record: bytes) -> str:
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"The {self._records.locate(index)} is not UTF-8 text ({error}): remove it, set "
                'on_bad_data="skip", or, if the records are tokens, tokenize_data=False.'
            ) from error

    def scan(self, start: int, stop: int) -> Sequence[bytes]:
        """Return the records from one index up to another."""
        return self._records.read_records(range(start, stop))


def shard_folder(config: GrainArrayRecordsDataConfig) -> Path:
    """Return the folder of the shards of a split."""
    return Path(config.data_path) / config.split


def holds_tokens(config: DataConfig) -> TypeGuard[GrainArrayRecordsDataConfig]:
    """Return whether a data set holds tokens on disk, not texts."""
    return isinstance(config, GrainArrayRecordsDataConfig) and not config.tokenize_data


def open_config(config: GrainArrayRecordsDataConfig) -> NumberedTexts:
    """Open the records of a split."""
    folder = shard_folder(config)
    if read_manifest(folder) is not None:
        raise ValueError(f"{folder} was prepared, and has tokens instead of texts: set tokenize_data=False.")
    return _open_folder(folder, config.on_bad_data)


def open_paths(paths: Sequence[str], options: PathOptions) -> NumberedTexts | None:
    """Open a folder of records, or of one such folder for each split."""
    if len(paths) == 1:
        for folder in (Path(paths[0], options.split), Path(paths[0])):
            if find_shards(folder):
                if read_manifest(folder) is not None:
                    raise ValueError(f"The documents in {folder} are tokenised already, see its {MANIFEST_FILE}.")
                return _open_folder(folder, options.on_bad_data, [Path(paths[0]), folder])
    return None


def _open_folder(folder: Path, on_bad_data: OnBadData, locations: Sequence[Path] = ()) -> NumberedTexts:
    records = open_records(folder)
    return NumberedTexts(
        str(folder),
        RecordTexts(records),
        num_bytes=records.num_bytes,
        describe=lambda: {"paths": [str(folder)], **records.describe()},
        on_bad_data=on_bad_data,
        locations=locations,
    )
