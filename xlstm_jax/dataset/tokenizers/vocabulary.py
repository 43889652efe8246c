"""The vocabulary of data, and the check that a model has an embedding row for each token id."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.loading import load_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

LOGGER = logging.getLogger(__name__)

_DIGEST_CHARACTERS = 12
"""The number of characters of a digest in messages."""


class MissingTokenizerError(ConfigError):
    """A tokenizer cannot be loaded from its location."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The token ids that data can hold, `0` to `size - 1`, and their tokenizer."""

    size: int
    origin: str
    """The origin of the vocabulary, for messages."""
    encoder: TextEncoder | None = None
    """The tokenizer; `None` if the tokens are not text."""
    digest: str | None = None
    """`TextEncoder.digest` of the tokenizer, which may be known even if the tokenizer is not available."""

    @staticmethod
    def of_tokenizer(encoder: TextEncoder) -> "Vocabulary":
        """Load a tokenizer and return its vocabulary.

        Raises:
            MissingTokenizerError: It cannot be loaded.
        """
        try:
            size, digest = len(encoder.tokenizer), encoder.digest
        except Exception as error:  # Libraries raise their own errors if the hub fails.
            raise _not_loaded(encoder, error) from error
        return Vocabulary(size, f"tokenizer {encoder.tokenizer_path!r}", encoder, digest)

    @property
    def description(self) -> str:
        """The origin with the start of the digest."""
        return self.origin if self.digest is None else f"{self.origin}, digest {self.digest[:_DIGEST_CHARACTERS]}"

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, without special tokens around texts.

        Raises:
            MissingTokenizerError: It cannot be loaded.
            ConfigError: There is none, or it has changed.
        """
        if self.encoder is None:
            raise ConfigError(f"There is no tokenizer for {self.origin}: its tokens are not text.")
        encoder = dataclasses.replace(self.encoder)  # without cached properties
        try:
            digest = encoder.digest
            loaded = load_tokenizer(
                encoder.tokenizer_path, False, False, encoder.hf_access_token, cache_dir=encoder.cache_dir
            )
        except Exception as error:
            raise _not_loaded(encoder, error, f" ({self.origin})") from error
        if self.digest is not None and digest != self.digest:
            raise ConfigError(_differs(dataclasses.replace(self, digest=digest, origin=_name(encoder)), self))
        return loaded

    def check_same_tokens(self, name: str, other: "Vocabulary") -> None:
        """Raise if another vocabulary belongs to another tokenizer, as far as both are known.

        Args:
            name: The owner of the other vocabulary, for messages.
            other: The other vocabulary.

        Raises:
            ConfigError: The digests of the tokenizers differ.
        """
        if self.digest is None or other.digest is None:
            return
        digest = other.digest
        if self.encoder is not None and other.encoder is not None:
            # Digests include the special tokens around texts, which may differ for the same tokenizer.
            flags = {"add_bos": self.encoder.add_bos, "add_eos": self.encoder.add_eos}
            if flags != {"add_bos": other.encoder.add_bos, "add_eos": other.encoder.add_eos}:
                encoder = dataclasses.replace(other.encoder, **flags)
                try:
                    digest = encoder.digest
                except Exception as error:
                    LOGGER.warning("%s was not compared with %s: %s", other.origin, self.origin, error)
                    return
        if digest != self.digest:
            raise ConfigError(f"{name}: {_differs(dataclasses.replace(other, digest=digest), self)}")


def check_vocabularies(num_ids: int | None, vocabularies: Mapping[str, Vocabulary | None]) -> None:
    """Raise unless a model has all token ids of some data, and all data has the same tokenizer.

    Args:
        num_ids: The number of token ids of the model, if it is known.
        vocabularies: The vocabularies by owner; `None` if unknown before the data is read.

    Raises:
        ConfigError: A vocabulary has more ids than the model, or another tokenizer than the first vocabulary.
    """
    known = {name: vocabulary for name, vocabulary in vocabularies.items() if vocabulary is not None}
    for name, vocabulary in known.items():
        if num_ids is not None and vocabulary.size > num_ids:
            raise ConfigError(
                f"{name}: there are {vocabulary.size} token ids ({vocabulary.description}), but the model's vocab_size "
                f"is {num_ids}: set vocab_size to {vocabulary.size} or more, or use data of the model's tokenizer."
            )
    reference = next((vocabulary for vocabulary in known.values() if vocabulary.digest is not None), None)
    if reference is not None:
        for name, vocabulary in known.items():
            reference.check_same_tokens(name, vocabulary)


def _differs(other: Vocabulary, reference: Vocabulary) -> str:
    return (
        f"{other.description} is another tokenizer than {reference.description}: the same token ids would mean other "
        "texts. Use one tokenizer for all."
    )


def _name(encoder: TextEncoder) -> str:
    return f"tokenizer {encoder.tokenizer_path!r}"


def _not_loaded(encoder: TextEncoder, error: Exception, origin: str = "") -> MissingTokenizerError:
    cause = " ".join(str(error).split())
    return MissingTokenizerError(
        f"tokenizer_path: {encoder.tokenizer_path!r}{origin} cannot be loaded ({cause}): set it to where the tokenizer "
        "is now."
    )
