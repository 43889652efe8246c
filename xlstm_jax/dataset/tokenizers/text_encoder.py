"""Encode many texts at once into arrays of tokens."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xlstm_jax.dataset.tokenizers.light import LightTokenizer, config_file, tokenizer_file
from xlstm_jax.dataset.tokenizers.loading import load_tokenizer


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A tokenizer that is loaded on first use; only these fields are sent to workers."""

    tokenizer_path: str
    add_bos: bool = False
    add_eos: bool = False
    hf_access_token: str | None = dataclasses.field(default=None, repr=False)
    cache_dir: str | Path | None = None

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, as integers of 32 bits."""
        tokenizer, texts = self.tokenizer, list(texts)
        if isinstance(tokenizer, LightTokenizer):
            return tokenizer.encode_arrays(texts)
        if hasattr(tokenizer, "backend_tokenizer"):
            # Bypass the wrapper, which also collects masks and token types, and ignore truncation settings of the file.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            rows = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]
        else:
            rows = tokenizer(texts)["input_ids"]
        return [np.array(row, np.int32) for row in rows]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return load_tokenizer(
            self.tokenizer_path, self.add_bos, self.add_eos, self.hf_access_token, cache_dir=self.cache_dir
        )

    @property
    def eod_token_id(self) -> int | None:
        """The token that ends a document, if the tokenizer has one."""
        return self.tokenizer.eos_token_id

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that determines the tokens, wherever the tokenizer is stored."""
        bos = self.tokenizer.bos_token_id if self.add_bos else None
        eos = self.tokenizer.eos_token_id if self.add_eos else None
        return hashlib.sha256(json.dumps([self._rules(), bos, eos], sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _rules(self) -> Any:
        file = tokenizer_file(self.tokenizer_path)
        if file is not None:
            config = config_file(file)
            options = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
            rules = {**json.loads(file.read_text(encoding="utf-8")), "config": options}
        elif isinstance(self.tokenizer, LightTokenizer):
            return type(self.tokenizer).__name__
        elif hasattr(self.tokenizer, "backend_tokenizer"):
            rules = json.loads(self.tokenizer.backend_tokenizer.to_str())
        else:
            return sorted(self.tokenizer.get_vocab().items())
        return {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}  # never applied
