"""Texts that are tokenised as they are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from xlstm_jax.dataset.sources.source import Texts
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder


class EncodedTexts:
    """The documents of some texts, tokenised as they are read.

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
        # Of an empty text, special tokens would be all that there is to learn.
        return [tokens if text else tokens[:0] for text, tokens in zip(texts, self._encoder(texts), strict=True)]

    @property
    def tokenizer_digest(self) -> str:
        """What the tokenizer is known by."""
        return self._encoder.digest

    def describe(self) -> dict[str, Any]:
        """Return by what these documents are told from others."""
        return {"documents": len(self), "texts": self._texts.digest, "tokenizer": self.tokenizer_digest}
