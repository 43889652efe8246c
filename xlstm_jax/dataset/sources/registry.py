"""The registry of sources: each kind of data set is one entry here and one file in this folder.

The same entry opens a source for training, from its config, and for `prepare`, from its path.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xlstm_jax.dataset.configs import (
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    TextDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.sources import huggingface, records, standard_library, text_files
from xlstm_jax.dataset.sources.encoded_texts import EncodedTexts
from xlstm_jax.dataset.sources.records import holds_tokens, shard_folder
from xlstm_jax.dataset.sources.source import Documents, PathOptions, Source, TextSource
from xlstm_jax.dataset.sources.vocabulary_lookup import encoder_of, find_vocabulary
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary


class SourceKind(NamedTuple):
    """A kind of data set with documents of text."""

    name: str
    """The `data_config_type` of the kind."""
    config_class: type[TextDataConfig]
    open_config: Callable[[Any], TextSource]
    """Opens the data set of a config of this class."""
    open_paths: Callable[[Sequence[str], PathOptions], TextSource | None]
    """Opens paths for `prepare`; `None` if they are of another kind."""
    locate: Callable[[Any], object]
    """Returns the location of a data set for messages, from its config."""


KINDS = (
    SourceKind(
        "standard_library",
        StandardLibraryDataConfig,
        standard_library.open_config,
        standard_library.open_paths,
        lambda config: f"the standard library, split {config.split}",
    ),
    SourceKind(
        "huggingface_hub",
        HFHubDataConfig,
        huggingface.open_config,
        huggingface.open_paths,
        lambda config: config.hf_path,
    ),
    SourceKind("grain_arrayrecord", GrainArrayRecordsDataConfig, records.open_config, records.open_paths, shard_folder),
    SourceKind(
        "text_files",
        TextFilesDataConfig,
        text_files.open_config,
        text_files.open_paths,
        lambda config: config.data_path,
    ),
)
"""All kinds, in the order in which `prepare` tries them: any path can be one of text files."""


def open_source(config: TextDataConfig, name: str, skips_unreadable: bool = True) -> Source:
    """Open a data set for training. Texts are tokenised as they are read.

    Args:
        config: The data set.
        name: The name of the data set in statistics.
        skips_unreadable: Whether `on_bad_data="skip"` also skips documents whose file is missing or damaged.
    """
    num_skipped = 0
    if holds_tokens(config):
        documents = TokenShards(shard_folder(config))
        vocabulary = find_vocabulary(config)
    else:
        encoder = encoder_of(config)
        texts = _kind_of(config).open_config(config)
        documents = EncodedTexts(texts.numbered(), encoder)
        num_skipped = sum(texts.skipped.values())
        vocabulary = Vocabulary.of_tokenizer(encoder)
    return Source(
        documents,
        shuffle_seed=config.data_shuffle_seed if config.shuffle_data else None,
        eod_token_id=_require_end(config, documents, vocabulary) if config.add_eod else None,
        on_bad_data=config.on_bad_data,
        skips_unreadable=skips_unreadable,
        name=name,
        location=_location(config),
        num_skipped=num_skipped,
        vocabulary=vocabulary,
    )


def open_paths(paths: Sequence[str], options: PathOptions) -> TextSource:
    """Open what `prepare` reads: the first kind that recognises the paths."""
    return next(source for kind in KINDS if (source := kind.open_paths(paths, options)) is not None)


def first_input(config: TextDataConfig, source: Source) -> int:
    """Return the input before the first token of a document: the token that ends documents, or 0 without one."""
    return 0 if source.vocabulary is None else _find_end(config, source.documents, source.vocabulary) or 0


def _kind_of(config: TextDataConfig) -> SourceKind:
    for kind in KINDS:
        if isinstance(config, kind.config_class):
            return kind
    raise ValueError(f"A {type(config).__name__} does not say where its documents are: use a config that does.")


def _location(config: TextDataConfig) -> str:
    return str(_kind_of(config).locate(config))


def _require_end(config: TextDataConfig, documents: Documents, vocabulary: Vocabulary | None) -> int:
    token = _find_end(config, documents, vocabulary)
    if token is None:
        raise ValueError(
            f"The tokenizer of {_location(config)} has no eos_token to end documents with: set add_eod=False, or name "
            "one in its tokenizer_config.json."
        )
    return token


def _find_end(config: TextDataConfig, documents: Documents, vocabulary: Vocabulary | None) -> int | None:
    """Return the token that ends a document, if the tokenizer has one."""
    if isinstance(documents, TokenShards) and documents.manifest is not None:
        return documents.manifest.eod_token_id
    encoder = None if vocabulary is None else vocabulary.encoder
    return (encoder or encoder_of(config)).eod_token_id
