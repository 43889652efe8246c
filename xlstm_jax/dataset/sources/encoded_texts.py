"""Texts that are tokenised as they are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from xlstm_jax.dataset.sources.source import Texts
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder


class EncodedTexts:
    """The `Documents` of some texts, tokenised as they are read.

    Args:
        texts: The texts.
        encoder: The tokenizer.
    """

    num_tokens = None

    def __init__(self, texts: Texts, encoder: TextEncoder):
        self._texts = texts
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of some documents."""
        texts = self._texts.read(indices)
        # An empty text would consist of special tokens only.
        return [tokens if text else tokens[:0] for text, tokens in zip(texts, self._encoder(texts), strict=True)]

    @property
    def tokenizer_digest(self) -> str:
        """The digest of the tokenizer."""
        return self._encoder.digest

    def describe(self) -> dict[str, Any]:
        """Return what identifies these documents."""
        return {"documents": len(self), "texts": self._texts.digest, "tokenizer": self.tokenizer_digest}
