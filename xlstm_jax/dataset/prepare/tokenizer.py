"""Train the tokenizer of an output folder, once."""

import json
import shutil
from pathlib import Path

from xlstm_jax.dataset.prepare.resume import find_differences, prepared_differently
from xlstm_jax.dataset.prepare.splits import Split
from xlstm_jax.dataset.tokenizers.light import train_tokenizer

_TRAINED_ON_FILE = "trained_on.json"
_TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", _TRAINED_ON_FILE}


def train_once(folder: Path, split: Split, vocab_size: int, num_bytes: int, overwrite: bool) -> None:
    """Train a tokenizer unless the folder already has one, which must then be of the same text and options."""
    facts = {**split.describe(), "vocab_size": vocab_size, "num_bytes_of_sample": num_bytes}
    trained_on = folder / _TRAINED_ON_FILE
    if folder.exists():
        earlier = json.loads(trained_on.read_text()) if trained_on.exists() else {}
        if not find_differences(earlier, facts):
            return
        if not overwrite:
            raise prepared_differently(folder, find_differences(earlier, facts), f"use it with --tokenizer {folder}")
        unknown = sorted({file.name for file in folder.iterdir()} - _TOKENIZER_FILES)
        if unknown or not earlier:
            raise ValueError(
                f"{folder} has files that training a tokenizer does not write: move {', '.join(unknown) or 'it'} away."
            )
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    train_tokenizer(split.sample(num_bytes), vocab_size, temporary)
    (temporary / _TRAINED_ON_FILE).write_text(json.dumps(facts, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
