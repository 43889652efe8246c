"""Measure the text of a data set, and the bits per byte of compressors as baselines for those of a model."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xlstm_jax.dataset.configs import TextDataConfig
from xlstm_jax.dataset.sources.compressors import compressed_bits_per_byte
from xlstm_jax.dataset.sources.registry import open_source
from xlstm_jax.dataset.sources.vocabulary_lookup import encoder_of
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

_BLOCK = 64
"""The number of documents read at a time."""


@dataclasses.dataclass(frozen=True)
class TextMeasures:
    """The size of documents as text and as tokens, and their compressibility."""

    num_bytes: int
    """The size of their texts."""
    num_tokens: int
    """The number of their tokens, including those that end documents."""
    is_whole: bool
    """Whether all documents of the set were measured."""
    compressors: dict[str, float]
    """The bits per byte of gzip and xz, and of xz primed with the training text if that was given and is not too large;
    empty unless all documents of the set were measured."""

    @property
    def bytes_per_token(self) -> float:
        """The mean bytes of text in a token."""
        return self.num_bytes / self.num_tokens


def measure_text(
    config: TextDataConfig,
    max_bytes: int,
    training: Sequence[TextDataConfig] = (),
    max_training_bytes: int = 0,
) -> TextMeasures:
    """Measure the documents of a set, up to a limit.

    Args:
        config: The set. Tokens on disk are decoded with their tokenizer.
        max_bytes: The approximate number of bytes of text to read.
        training: The training sets, to prime a compressor with.
        max_training_bytes: Compressors are not primed if there is more training text than this.

    Returns:
        The measures.
    """
    part = _read_up_to([config], max_bytes)
    if not part.text:
        raise ValueError(f"There is no text in {config}: give a set that has some.")
    compressors = {}
    if part.is_whole:
        primer = _read_up_to(training, max_training_bytes)
        compressors = compressed_bits_per_byte(part.text, primer.text if primer.is_whole and primer.text else None)
    return TextMeasures(len(part.text), part.num_tokens, part.is_whole, compressors)


class _Part(NamedTuple):
    """The first documents of some sets."""

    text: bytes
    num_tokens: int
    is_whole: bool
    """Whether all documents were read."""


def _read_up_to(configs: Sequence[TextDataConfig], max_bytes: int) -> _Part:
    """Read the documents of sets in turn, up to about `max_bytes`."""
    texts, num_bytes, num_tokens = [], 0, 0
    for text, length in itertools.chain.from_iterable(map(_read, configs)):
        if num_bytes >= max_bytes:
            return _Part(b"".join(texts), num_tokens, is_whole=False)
        texts.append(text)
        num_bytes += len(text)
        num_tokens += length
    return _Part(b"".join(texts), num_tokens, is_whole=True)


def _read(config: TextDataConfig) -> Iterator[tuple[bytes, int]]:
    """Yield the text of each document and the number of its tokens, including the one that ends it."""
    source = open_source(config, "measured")
    vocabulary = source.vocabulary or Vocabulary.of_tokenizer(encoder_of(config))  # raises if no tokenizer is named
    tokenizer = vocabulary.load_tokenizer()
    num_ends = int(source.eod_token_id is not None)
    num_documents = len(source.documents)
    for first in range(0, num_documents, _BLOCK):
        for tokens in source.documents.read(range(first, min(first + _BLOCK, num_documents))):
            if len(tokens):
                text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
                yield text.encode(), len(tokens) + num_ends
