"""From the config of a data set to its documents."""

import logging

from xlstm_jax.dataset.configs import (
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    TextDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.shards.records import open_records
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.sources.huggingface import load_huggingface_dataset
from xlstm_jax.dataset.sources.source import Documents, Source
from xlstm_jax.dataset.sources.standard_library import load_standard_library, yardsticks
from xlstm_jax.dataset.sources.text_files import TextFiles
from xlstm_jax.dataset.sources.text_store import TextStore
from xlstm_jax.dataset.sources.texts import ColumnTexts, EncodedTexts, RecordTexts, Texts
from xlstm_jax.dataset.sources.vocabulary_lookup import encoder_of, find_vocabulary, shard_folder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

LOGGER = logging.getLogger(__name__)


def open_source(config: TextDataConfig, name: str, skips_unreadable: bool = True) -> Source:
    """Open a data set, whose documents are tokenised as they are read if they are not on disk as tokens.

    Args:
        config: The data set.
        name: What it is called in statistics.
        skips_unreadable: Whether `on_bad_data="skip"` also leaves out documents whose file is missing or damaged.
    """
    num_left_out = 0
    if isinstance(config, GrainArrayRecordsDataConfig) and not config.tokenize_data:
        documents = TokenShards(shard_folder(config))
        vocabulary = find_vocabulary(config)
    else:
        encoder = encoder_of(config)
        if isinstance(config, TextFilesDataConfig):
            files = TextFiles(
                str(config.data_path),
                column=config.data_column,
                on_bad_data=config.on_bad_data,
                max_document_bytes=config.max_document_bytes,
            )
            documents = EncodedTexts(TextStore.build(files), encoder)
            num_left_out = sum(files.skipped.values())
        else:
            documents = EncodedTexts(_open_texts(config), encoder)
        vocabulary = Vocabulary.of_tokenizer(encoder)
    return Source(
        documents,
        shuffle_seed=config.data_shuffle_seed if config.shuffle_data else None,
        eod_token_id=_need_end(config, documents, vocabulary) if config.add_eod else None,
        on_bad_data=config.on_bad_data,
        skips_unreadable=skips_unreadable,
        name=name,
        location=_location(config),
        num_left_out=num_left_out,
        vocabulary=vocabulary,
    )


def first_input(config: TextDataConfig, source: Source) -> int:
    """Return what a model sees before the first token of a document: the end of another one, or 0 if there is none."""
    return 0 if source.vocabulary is None else _find_end(config, source.documents, source.vocabulary) or 0


def _open_texts(config: TextDataConfig) -> Texts:
    match config:
        case GrainArrayRecordsDataConfig():
            folder = shard_folder(config)
            if read_manifest(folder) is not None:
                raise ValueError(f"{folder} was prepared, and has tokens instead of texts: set tokenize_data=False.")
            return RecordTexts(open_records(folder))
        case HFHubDataConfig():
            return ColumnTexts(load_huggingface_dataset(config), config.data_column)
        case StandardLibraryDataConfig():
            return TextStore.build(_read_standard_library(config.split))
    raise ValueError(f"A {type(config).__name__} does not say where its documents are: use a config that does.")


def _read_standard_library(split: str) -> list[str]:
    """Return the files of a split, and log which corpus they are from and what compressors make of them."""
    corpus = load_standard_library()
    LOGGER.info("%s", corpus.describe())
    if split == "train":
        documents = corpus.train
    else:
        documents = corpus.validation
        reached = ", ".join(f"{name} {bits:.3f}" for name, bits in yardsticks(documents).items())
        LOGGER.info("Bits per byte on all validation files, without the training files: %s.", reached)
    return [document.content.decode("utf-8", "replace") for document in documents]


def _need_end(config: TextDataConfig, documents: Documents, vocabulary: Vocabulary | None) -> int:
    token = _find_end(config, documents, vocabulary)
    if token is None:
        raise ValueError(
            f"The tokenizer of {_location(config)} has no eos_token to end documents with: set add_eod=False, or name "
            "one in its tokenizer_config.json."
        )
    return token


def _find_end(config: TextDataConfig, documents: Documents, vocabulary: Vocabulary | None) -> int | None:
    """Return what ends a document, if the tokenizer has a token for it."""
    if isinstance(documents, TokenShards) and documents.manifest is not None:
        return documents.manifest.eod_token_id
    encoder = None if vocabulary is None else vocabulary.encoder
    return (encoder or encoder_of(config)).eod_token_id


def _location(config: TextDataConfig) -> str:
    match config:
        case GrainArrayRecordsDataConfig():
            return str(shard_folder(config))
        case HFHubDataConfig():
            return str(config.hf_path)
        case TextFilesDataConfig():
            return str(config.data_path)
    return type(config).__name__
