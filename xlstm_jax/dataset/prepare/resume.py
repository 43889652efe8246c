"""Compare an output folder with the current options: resume, replace or refuse what is already there."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, Manifest, read_manifest, write_manifest
from xlstm_jax.dataset.shards.records import SHARD_SUFFIX, find_shards, shard_number


def resume_or_start(folder: Path, manifest: Manifest, overwrite: bool) -> Manifest:
    """Return the manifest of an earlier call with the same options, or start over with an empty one.

    Args:
        folder: The folder of the split.
        manifest: The manifest of the current options, without shards.
        overwrite: Replace shards that were prepared with other options, which is an error otherwise.
    """
    earlier = read_manifest(folder)
    if earlier is not None:
        differences = find_differences(_facts(earlier), _facts(manifest))
        if not differences:
            return earlier
        if not overwrite:
            raise prepared_differently(folder, differences, "choose another folder")
    shards = find_shards(folder)
    unknown = [file.name for file in shards if earlier is None or not _has_written(earlier, file)]
    if unknown:
        raise ValueError(
            f"{folder} has shards that prepare has not written: move {', '.join(unknown)} away, or choose another "
            "folder."
        )
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    for file in (*shards, *folder.glob(f".*{SHARD_SUFFIX}.tmp"), *folder.glob(f".{MANIFEST_FILE}.tmp")):
        file.unlink()
    write_manifest(folder, manifest)
    return manifest


def shard_name(split: str, index: int) -> str:
    """Return the file name of a shard."""
    return f"{split}_{index:06}{SHARD_SUFFIX}"


def find_differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, for a message, the options that differ between an earlier call and this one."""
    names = sorted({*earlier, *now} - {"paths"})  # the location of the files does not matter
    return [
        f"{name}: {_short(earlier.get(name, 'unknown'))} there, {_short(now.get(name, 'unknown'))} here"
        for name in names
        if earlier.get(name) != now.get(name)
    ]


def prepared_differently(folder: Path, differences: Sequence[str], way_out: str) -> ConfigError:
    """Return the error that names the differences and how to resolve them."""
    return ConfigError(
        f"{folder} was prepared with other options ({'; '.join(differences)}). To resume, give the same "
        f"options; to replace it, set overwrite (--overwrite); or {way_out}."
    )


def _has_written(manifest: Manifest, file: Path) -> bool:
    """Return whether a shard is in the manifest, or was written by a worker ahead of the manifest."""
    if file.name in {shard.file for shard in manifest.shards}:
        return True
    index = shard_number(file)
    if index is None or index < len(manifest.shards) or manifest.is_complete:
        return False
    return file.name == shard_name(manifest.source.get("split", ""), index)


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts = dataclasses.asdict(manifest)
    del facts["shards"], facts["tokenizer_path"]
    return {**facts.pop("source"), **facts}


def _short(value: Any) -> str:
    """Return a value for a message; hashes are shortened."""
    text = str(value)
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{40,}", text) else text
