"""Tokenizers that do not need `transformers`, with the part of its interface that data pipelines use."""

import abc
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from xlstm_jax.configs import ConfigError

BYTE_TOKENIZER = "byte"
"""The path that names the tokenizer of bytes."""
END_OF_DOCUMENT = "<|endoftext|>"
"""The text of the end of a document in tokenizers that are trained here."""
MAX_VOCAB_SIZE = 2**22
"""The largest vocabulary to train: memory for all of it is allocated, and common ones have up to 2**18 tokens."""


class LightTokenizer(abc.ABC):
    """Turns texts into tokens and back.

    Args:
        add_bos: Start each text with the token for the beginning, unless a call excludes special tokens.
        add_eos: End each text with the token for the end, unless a call excludes special tokens.
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    vocab_size: int
    truncation_side = "right"

    def __init__(self, add_bos: bool = False, add_eos: bool = False):
        self.add_bos_token = add_bos
        self.add_eos_token = add_eos

    @abc.abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without special tokens around them."""

    @abc.abstractmethod
    def decode(self, token_ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Return the text of some tokens; invalid bytes become replacement characters."""

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Return the `input_ids` of a text, or those of each of several texts.

        Args:
            text: The text, or several.
            add_special_tokens: Add the special tokens that the tokenizer was created with.
            truncation: Whether `max_length` applies.
            max_length: The largest number of tokens; longer texts are truncated at the `truncation_side`.
        """
        texts = [text] if isinstance(text, str) else list(text)
        rows = [row.tolist() for row in self.encode_arrays(texts, add_special_tokens=add_special_tokens)]
        if truncation and max_length is not None:
            is_right = self.truncation_side == "right"
            rows = [row[:max_length] if is_right else row[max(len(row) - max_length, 0) :] for row in rows]
        return {"input_ids": rows[0] if isinstance(text, str) else rows}

    def encode_arrays(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[np.ndarray]:
        """Return the tokens of each text as an array."""
        rows = self.encode_plain(texts)
        before = [self.bos_token_id] if add_special_tokens and self.add_bos_token else []
        after = [self.eos_token_id] if add_special_tokens and self.add_eos_token else []
        if not before and not after:
            return rows
        return [np.concatenate([np.array(before, np.int32), row, np.array(after, np.int32)]) for row in rows]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]


class ByteTokenizer(LightTokenizer):
    """The bytes of UTF-8 as tokens, and one more token for the end of a document, which can also start a text."""

    bos_token_id = eos_token_id = 256
    vocab_size = 257

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, token_ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Return the text of some bytes; invalid bytes and ids become replacement characters."""
        special = {self.eos_token_id: b"" if skip_special_tokens else END_OF_DOCUMENT.encode()}
        parts = (bytes([token]) if token < 256 else special.get(token, b"\xff") for token in map(int, token_ids))
        return b"".join(parts).decode("utf-8", errors="replace")


class FileTokenizer(LightTokenizer):
    """A `tokenizer.json` of the library `tokenizers`; its special tokens are in the `tokenizer_config.json` next to it.

    Args:
        path: The file, or its folder.
        add_bos: As for every tokenizer.
        add_eos: As for every tokenizer.
    """

    def __init__(self, path: Path, add_bos: bool = False, add_eos: bool = False):
        super().__init__(add_bos, add_eos)
        file = tokenizer_file(path)
        if file is None:
            raise ConfigError(f"There is no tokenizer.json at {path}.")
        self._tokenizer = _read_tokenizer(file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = config_file(file)
        special = json.loads(config.read_text()) if config.exists() else {}
        self.bos_token_id, self.eos_token_id = (self._special_token(special, name) for name in ("bos", "eos"))
        self.vocab_size = self._tokenizer.get_vocab_size()
        for name, is_set, token in (("bos", add_bos, self.bos_token_id), ("eos", add_eos, self.eos_token_id)):
            if is_set and token is None:
                raise ValueError(f"add_{name} is set, but {config} names no {name}_token.")

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, using one thread per core."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, token_ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Return the text of some tokens."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special_tokens)

    def _special_token(self, config: dict[str, Any], name: str) -> int | None:
        token = config.get(f"{name}_token")
        content = token["content"] if isinstance(token, dict) else token
        return None if content is None else self._tokenizer.token_to_id(content)


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing more specific.
        raise ConfigError(f"{file} is not a valid tokenizer: {error}. Give another one, or train it again.") from error


def tokenizer_file(path: str | Path) -> Path | None:
    """Return the `tokenizer.json` at a path, or in the folder at that path, if there is one."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    return file if file.name.endswith(".json") and file.is_file() else None


def config_file(file: Path) -> Path:
    """Return the file of the special tokens and options of a `tokenizer.json`, which may not exist."""
    return file.with_name("tokenizer_config.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> Path:
    """Train byte-level BPE, and save it for `load_tokenizer` and `transformers`.

    Args:
        texts: The training text.
        vocab_size: The number of tokens, including the 256 bytes and the end of a document.
        folder: The folder for `tokenizer.json` and `tokenizer_config.json`.

    Returns:
        The folder.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}, but 256 bytes and the end of a document need at least 257.")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {vocab_size}, but must be at most {MAX_VOCAB_SIZE}.")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return folder
