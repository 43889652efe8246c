"""How much text a set holds and what compressors make of it, beside which a model's bits per byte stand."""

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
"""How many documents are read at a time."""


@dataclasses.dataclass(frozen=True)
class TextMeasures:
    """The size of some documents, as text and as tokens."""

    num_bytes: int
    """The bytes of their texts."""
    num_tokens: int
    """Their tokens, the ends of documents among them."""
    is_whole: bool
    """Whether these are all documents of the set."""
    compressors: dict[str, float]
    """The bits per byte of gzip and xz by themselves, and of xz primed with the training text where that was given and
    is not too large; empty unless these are all documents of the set."""

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
    """Measure the documents of a set, or the first of them.

    Args:
        config: The set. Tokens on disk are turned back into text with its tokenizer.
        max_bytes: About how many bytes of text to read.
        training: The sets that a model is trained on before it reads this one, to prime a compressor with.
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
    """Whether these are all documents."""


def _read_up_to(configs: Sequence[TextDataConfig], max_bytes: int) -> _Part:
    """Read the documents of sets, one set after the other, until there are about as many bytes as wanted."""
    texts, num_bytes, num_tokens = [], 0, 0
    for text, length in itertools.chain.from_iterable(map(_read, configs)):
        if num_bytes >= max_bytes:
            return _Part(b"".join(texts), num_tokens, is_whole=False)
        texts.append(text)
        num_bytes += len(text)
        num_tokens += length
    return _Part(b"".join(texts), num_tokens, is_whole=True)


def _read(config: TextDataConfig) -> Iterator[tuple[bytes, int]]:
    """Yield the text of each document and the number of its tokens, its end among them."""
    source = open_source(config, "measured")
    vocabulary = source.vocabulary or Vocabulary.of_tokenizer(encoder_of(config))  # which says that none is named
    tokenizer = vocabulary.load_tokenizer()
    num_ends = int(source.eod_token_id is not None)
    num_documents = len(source.documents)
    for first in range(0, num_documents, _BLOCK):
        for tokens in source.documents.read(range(first, min(first + _BLOCK, num_documents))):
            if len(tokens):
                text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
                yield text.encode(), len(tokens) + num_ends
