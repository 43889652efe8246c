"""The token ids of data, and whether a model has a row for each of them."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.loading import load_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

LOGGER = logging.getLogger(__name__)

_DIGEST_CHARACTERS = 12
"""How much of a digest a message shows."""


class MissingTokenizerError(ConfigError):
    """A tokenizer cannot be loaded from where it should be."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The token ids that data can hold, `0` to `size - 1`, and the tokenizer that gives them a meaning."""

    size: int
    origin: str
    """What they were taken from, for messages."""
    encoder: TextEncoder | None = None
    """The tokenizer; `None` if the tokens are not those of a text."""
    digest: str | None = None
    """`TextEncoder.digest` of the tokenizer, which may be known where the tokenizer itself is not at hand."""

    @staticmethod
    def of_tokenizer(encoder: TextEncoder) -> "Vocabulary":
        """Return the vocabulary of a tokenizer, which is loaded.

        Raises:
            MissingTokenizerError: It cannot be loaded.
        """
        try:
            size, digest = len(encoder.tokenizer), encoder.digest
        except Exception as error:  # Libraries have errors of their own for what the hub does not give.
            raise _not_loaded(encoder, error) from error
        return Vocabulary(size, f"tokenizer {encoder.tokenizer_path!r}", encoder, digest)

    @property
    def description(self) -> str:
        """The origin with the beginning of the digest."""
        return self.origin if self.digest is None else f"{self.origin}, digest {self.digest[:_DIGEST_CHARACTERS]}"

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, to read and write texts without special tokens around them.

        Raises:
            MissingTokenizerError: It cannot be loaded.
            ConfigError: There is none, or it is no longer the same.
        """
        if self.encoder is None:
            raise ConfigError(f"There is no tokenizer for {self.origin}: its tokens are not those of a text.")
        encoder = dataclasses.replace(self.encoder)  # without what it has cached
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
        """Raise unless another vocabulary is of the same tokenizer, as far as both tokenizers are known.

        Args:
            name: What the other vocabulary belongs to, for messages.
            other: The other vocabulary.

        Raises:
            ConfigError: The digests of the tokenizers differ.
        """
        if self.digest is None or other.digest is None:
            return
        digest = other.digest
        if self.encoder is not None and other.encoder is not None:
            # A digest includes the special tokens that are put around texts, which may differ for the same tokenizer.
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
    """Raise unless a model can take all tokens of some data, and all of it is of one tokenizer.

    Args:
        num_ids: The number of token ids of the model, if it is known.
        vocabularies: The vocabularies by what they belong to; `None` for those that are not known before the data is
            read.

    Raises:
        ConfigError: One has more ids than the model, or is of another tokenizer than the first of them.
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
