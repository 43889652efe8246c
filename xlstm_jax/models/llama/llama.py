"""The Llama language model."""

from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.language_model import LanguageModel
from xlstm_jax.models.llama.config import LlamaConfig

__all__ = ["LlamaConfig", "LlamaTransformer"]


class LlamaTransformer(LanguageModel[LlamaConfig]):
    """A Llama language model.

    Attributes:
        config: The shape of the model.
    """

    config: LlamaConfig

    def __call__(
        self,
        idx: jax.Array,
        pos_idx: jax.Array | None = None,
        document_borders: jax.Array | None = None,
        train: bool = False,
        *,
        state: PyTree | None = None,
        return_state: bool = False,
        targets: jax.Array | None = None,
        last_only: bool = False,
    ) -> Any:
        """Run sequences of tokens through the model, as `LanguageModel` describes.

        Args:
            idx: The tokens, `[batch, length]`.
            pos_idx: The position of each token. By default, positions are counted from the state on, through documents.
            document_borders: Where documents begin, for `mask_across_document_boundaries`.
            train: Whether dropout is on.
            state: The state before the first token; empty by default.
            return_state: Whether to return the state after the last token too.
            targets: The target of each position.
            last_only: Whether to compute the logits of the last position only.

        Returns:
            Logits or losses, with `return_state` in a pair with the state.
        """
        if (state is not None or return_state) and not self.config.causal:
            raise ValueError("A model with causal=False has no state: its first tokens depend on those to come.")
        return super().__call__(
            idx,
            pos_idx,
            document_borders,
            train,
            state=state,
            return_state=return_state,
            targets=targets,
            last_only=last_only,
        )
