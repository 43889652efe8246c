"""Load tokenizers by name or path."""

import os
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER, ByteTokenizer, FileTokenizer, tokenizer_file

_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_tokenizer(
    tokenizer_path: str | Path,
    add_bos: bool,
    add_eos: bool,
    hf_access_token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Any:
    """Load a tokenizer.

    Args:
        tokenizer_path: `byte` for the bytes of a text, which needs no file; otherwise a folder, a `tokenizer.json` or a
            name on the Hugging Face hub. A local `tokenizer.json` needs no `transformers`.
        add_bos: Start each text with the token for the beginning of a sequence.
        add_eos: End each text with the token for the end of a sequence.
        hf_access_token: The token for the hub.
        cache_dir: The folder of downloads.

    Returns:
        A tokenizer of `transformers`, or one with the part of its interface that data pipelines need.
    """
    if str(tokenizer_path) == BYTE_TOKENIZER:
        return ByteTokenizer(add_bos, add_eos)
    file = tokenizer_file(tokenizer_path)
    is_local = Path(tokenizer_path).exists()
    if not is_local and _is_path(str(tokenizer_path)):
        raise ConfigError(
            f"There is no tokenizer at {tokenizer_path}: give a folder with a tokenizer.json, or that file."
        )
    try:
        auto_tokenizer = _import_auto_tokenizer()
    except ImportError as error:
        if file is None:
            raise ImportError(
                f"The tokenizer {str(tokenizer_path)!r} is not a local tokenizer.json and needs transformers: "
                f'pip install "xlstm_jax[hf]", or set tokenizer_path="{BYTE_TOKENIZER}" for the bytes of a text.'
            ) from error
        return FileTokenizer(file, add_bos, add_eos)
    if file is not None and file.name != "tokenizer.json":
        return FileTokenizer(file, add_bos, add_eos)
    try:
        return auto_tokenizer.from_pretrained(
            str(tokenizer_path if file is None else file.parent),
            add_bos_token=add_bos,
            add_eos_token=add_eos,
            token=hf_access_token,
            cache_dir=cache_dir,
        )
    except Exception as error:  # The library has no specific error for a file that is no tokenizer.
        if not is_local:
            raise
        cause = " ".join(str(error).split())
        raise ConfigError(f"{tokenizer_path} is not a valid tokenizer: {cause}") from error


def _is_path(text: str) -> bool:
    """Return whether a text cannot be a name on the hub, `name` or `owner/name`."""
    return Path(text).is_absolute() or text.startswith((".", "~")) or text.endswith(".json") or text.count("/") > 1


def _import_auto_tokenizer() -> Any:
    """Import `AutoTokenizer` without the warning that torch is not installed, which tokenizers do not need."""
    given = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        from transformers import AutoTokenizer
    finally:
        if given is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = given
    return AutoTokenizer
