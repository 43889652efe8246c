"""Drill: damaged tokenizers.

Each case damages a copy of the folder of a trained tokenizer, and loads it. The right answers: the same tokens, or an
error of one line, by the package, that names the folder or the file.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from drills.bad_shards import Damage, read_damaged, written
from drills.damage import replace_by_folder, truncate
from drills.outcomes import Result, run_case

from xlstm_jax.dataset.hf_tokenizer import load_tokenizer
from xlstm_jax.dataset.tokenizers.light import train_tokenizer

TEXTS = [f"Document {index} of the drill." for index in range(20)]


def tokenizers(generator: random.Random) -> Iterator[tuple[str, Damage]]:
    """Damaged folders of a tokenizer."""
    for content in (b"", b"{", b"{}", b"[]", b"null", b"\xff", b'{"model": 3}'):
        yield f"tokenizer.json is {content!r}", written("tokenizer.json", content)
        yield f"tokenizer_config.json is {content!r}", written("tokenizer_config.json", content)
    yield "no tokenizer.json", lambda folder: (folder / "tokenizer.json").unlink()
    yield "no folder of the tokenizer", shutil.rmtree
    for number in range(3):
        yield f"cut tokenizer.json {number}", lambda folder: truncate(folder / "tokenizer.json", generator)
    yield "folder as tokenizer.json", lambda folder: replace_by_folder(folder / "tokenizer.json", generator)


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Damage up to `count` copies of a tokenizer, drawn from all kinds, and load them."""
    generator = random.Random(seed)
    source = train_tokenizer(TEXTS, 300, folder / "tokenizer")
    expected = encode(source)
    cases = list(tokenizers(generator))
    if count < len(cases):
        cases = generator.sample(cases, count)

    def read(copy: Path) -> str | None:
        return None if encode(copy) == expected else "other tokens"

    return [
        run_case(name, lambda: read_damaged(name, damage, source, folder / f"copy_{index}", read))  # noqa: B023
        for index, (name, damage) in enumerate(cases)
    ]


def encode(folder: Path) -> list[int]:
    """Load a tokenizer, and return tokens and the size of the vocabulary. Without its config it has no special ones."""
    tokenizer = load_tokenizer(folder, add_bos=False, add_eos=False)
    return [*tokenizer(TEXTS[3])["input_ids"], len(tokenizer)]
