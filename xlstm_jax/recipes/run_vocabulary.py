"""The vocabulary file of a run: its token ids and its tokenizer, saved in the folder of the run."""

import json
from pathlib import Path

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.utils.files import write_atomically

VOCABULARY_FILE = "vocabulary.json"


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Save the vocabulary of a run; the path of a local tokenizer becomes absolute."""
    encoder = vocabulary.encoder
    path = None if encoder is None else encoder.tokenizer_path
    content = {
        "size": vocabulary.size,
        "tokenizer_path": str(Path(path).resolve()) if path is not None and Path(path).exists() else path,
        "tokenizer_digest": vocabulary.digest,
        "add_bos": encoder is not None and encoder.add_bos,
        "add_eos": encoder is not None and encoder.add_eos,
    }
    write_atomically(folder / VOCABULARY_FILE, json.dumps(content, indent=2) + "\n")


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a run; `None` if its folder has none."""
    file = folder / VOCABULARY_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        path = content["tokenizer_path"]
        encoder = None if path is None else TextEncoder(path, content["add_bos"], content["add_eos"])
        return Vocabulary(content["size"], str(file), encoder, content["tokenizer_digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): delete it, and give the tokenizer yourself.") from error
