"""Find the vocabulary of a data set from its config, before any tokens are read."""

import dataclasses
import logging
from pathlib import Path

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import (
    DataConfig,
    DefaultName,
    FormalTaskDataConfig,
    GrainArrayRecordsDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
)
from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest, read_manifest
from xlstm_jax.dataset.sources.records import holds_tokens, shard_folder
from xlstm_jax.dataset.synthetic_dataloading import synthetic_vocabulary
from xlstm_jax.dataset.tasks.batches import task_vocabulary
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER, tokenizer_file
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

LOGGER = logging.getLogger(__name__)


def find_vocabulary(config: DataConfig) -> Vocabulary | None:
    """Return the vocabulary of a data set, or `None` if it is unknown before its tokens are read.

    The vocabulary of tokens on disk is recorded in their manifest. A tokenizer that the config names as well must be
    the same one; if it cannot be loaded, that is logged, and the manifest applies. Without a manifest, the vocabulary
    is that of the tokenizer in the config.

    Raises:
        ConfigError: The tokenizer of texts cannot be loaded, or is not the one that the tokens on disk were made with.
    """
    match config:
        case SyntheticDataConfig():
            return synthetic_vocabulary(config)
        case FormalTaskDataConfig():
            return task_vocabulary(config)
        case GrainArrayRecordsDataConfig(tokenize_data=False):
            manifest = read_manifest(shard_folder(config))
            if manifest is not None:
                return _of_manifest(config, manifest)
            return None if config.tokenizer_path is None else Vocabulary.of_tokenizer(encoder_of(config))
        case TextDataConfig():
            return Vocabulary.of_tokenizer(encoder_of(config))
    return None


def is_available_offline(config: DataConfig) -> bool:
    """Return whether `find_vocabulary` needs no access to the Hugging Face hub."""
    if not isinstance(config, TextDataConfig):
        return True
    if given_tokenizer(config) is None:
        return isinstance(config, GrainArrayRecordsDataConfig) and (shard_folder(config) / MANIFEST_FILE).exists()
    return is_local(str(config.tokenizer_path))


def is_local(tokenizer_path: str) -> bool:
    """Return whether a tokenizer needs no access to the Hugging Face hub."""
    return tokenizer_path == BYTE_TOKENIZER or tokenizer_file(tokenizer_path) is not None


def encoder_of(config: TextDataConfig) -> TextEncoder:
    """Return the tokenizer that a config names.

    Raises:
        ConfigError: It names none.
    """
    if config.tokenizer_path is None:
        reason = "texts need a tokenizer"
        if holds_tokens(config):
            reason = f"{shard_folder(config)} has no {MANIFEST_FILE}"
        raise ConfigError(f"tokenizer_path is None, but {reason}: set tokenizer_path.")
    return TextEncoder(
        str(config.tokenizer_path), config.add_bos, config.add_eos, config.hf_access_token, config.hf_cache_dir
    )


def given_tokenizer(config: TextDataConfig) -> str | None:
    """Return the tokenizer that a config names; for tokens on disk, the default does not count."""
    path = config.tokenizer_path
    return None if path is None or (holds_tokens(config) and isinstance(path, DefaultName)) else str(path)


def locate_tokenizer(manifest: Manifest, folder: Path) -> str:
    """Return the current location of the tokenizer of shards.

    The candidates are the recorded path; the folder next to the splits, where `prepare` trains tokenizers; and the
    recorded path relative to a folder above the shards, if they were moved together. The digest identifies the
    tokenizer. If no candidate has it, this is the recorded path, which may be a name on the hub.

    Args:
        manifest: The manifest of the shards.
        folder: Their folder.
    """
    recorded = manifest.tokenizer_path
    if recorded == BYTE_TOKENIZER:
        return recorded
    places = [Path(recorded), folder.parent / TOKENIZER_FOLDER]
    places += [parent / recorded for parent in folder.resolve().parents]
    for place in places:
        if tokenizer_file(place) is None:
            continue
        if TextEncoder(str(place), manifest.add_bos, manifest.add_eos).digest == manifest.tokenizer_digest:
            return str(place)
    return recorded


def _of_manifest(config: GrainArrayRecordsDataConfig, manifest: Manifest) -> Vocabulary:
    folder = shard_folder(config)
    given = given_tokenizer(config)
    encoder = TextEncoder(
        locate_tokenizer(manifest, folder) if given is None else given,
        manifest.add_bos,
        manifest.add_eos,
        config.hf_access_token,
        config.hf_cache_dir,
    )
    vocabulary = Vocabulary(
        manifest.vocab_size,
        f"{folder / MANIFEST_FILE} of tokenizer {manifest.tokenizer_path!r}",
        encoder,
        manifest.tokenizer_digest,
    )
    if given is not None:
        try:
            own = dataclasses.replace(vocabulary, origin=f"tokenizer {given!r}", digest=encoder.digest)
        except Exception as error:
            LOGGER.warning(
                "The tokenizer %r cannot be loaded to compare it with %s, whose %d token ids are used: %s",
                given,
                vocabulary.description,
                vocabulary.size,
                " ".join(str(error).split()),
            )
        else:
            vocabulary.check_same_tokens("tokenizer_path", own)
    return vocabulary
