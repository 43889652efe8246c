"""How much text a set holds and what compressors make of it, beside which a model's bits per byte stand."""

import dataclasses
from collections.abc import Iterator

from xlstm_jax.dataset.compressors import compressed_bits_per_byte
from xlstm_jax.dataset.configs import TextDataConfig
from xlstm_jax.dataset.hf_tokenizer import load_tokenizer
from xlstm_jax.dataset.source_opening import open_source

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
    """The bits per byte of gzip and xz, which know nothing before the first byte; empty unless it is the whole set."""

    @property
    def bytes_per_token(self) -> float:
        """The mean bytes of text in a token."""
        return self.num_bytes / self.num_tokens


def measure_text(config: TextDataConfig, max_bytes: int) -> TextMeasures:
    """Measure the documents of a set, or the first of them.

    Args:
        config: The set. Tokens on disk are turned back into text with its tokenizer.
        max_bytes: About how many bytes of text to read.

    Returns:
        The measures.
    """
    texts, num_bytes, num_tokens, is_whole = [], 0, 0, True
    for text, length in _read(config):
        if num_bytes >= max_bytes:
            is_whole = False
            break
        texts.append(text)
        num_bytes += len(text)
        num_tokens += length
    if not num_bytes:
        raise ValueError(f"There is no text in {config}: give a set that has some.")
    compressors = compressed_bits_per_byte(b"".join(texts)) if is_whole else {}
    return TextMeasures(num_bytes, num_tokens, is_whole, compressors)


def _read(config: TextDataConfig) -> Iterator[tuple[bytes, int]]:
    """Yield the text of each document and the number of its tokens, its end among them."""
    source = open_source(config, "measured")
    tokenizer = load_tokenizer(config.tokenizer_path, False, False, config.hf_access_token, config.hf_cache_dir)
    num_ends = int(source.eod_token_id is not None)
    num_documents = len(source.documents)
    for first in range(0, num_documents, _BLOCK):
        for tokens in source.documents.read(range(first, min(first + _BLOCK, num_documents))):
            if len(tokens):
                text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
                yield text.encode(), len(tokens) + num_ends
