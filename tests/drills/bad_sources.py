"""Drill: files of bad text through `xlstm-jax prepare`.

Each case writes a file, a folder or a link, and prepares it. The right answers: the documents that are in it, or one
line of an error that names the file. Damage that leaves valid text cannot be noticed and is no fault.
"""

import bz2
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from drills.damage import run_command
from drills.outcomes import Outcome, Result, judge_output, run_case

from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer

TEXTS = ["The first of three documents.\n", "The second: ä, 漢, 🚢.\n", "The third.\n" * 20]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
LONG_LINE = 3 * 2**20
"""Bytes of a line without an end; one of 100 MB would be cut in the same way."""

Documents = list[str] | None
"""What has to be read; `None` if damage can change the text without a trace."""
Source = tuple[str, bytes, Documents]
"""The name of a file, its content, and the documents that are right besides an error."""


def plain() -> Iterator[Source]:
    """Files of plain text."""
    yield "empty.txt", b"", []
    yield "newlines.txt", b"\n\n\n", ["\n\n\n"]
    yield "nul.txt", b"a\0b\n", ["a\0b\n"]
    yield "only_nuls.txt", bytes(50), ["\0" * 50]
    yield "latin1.txt", "Schlo\xdf\n".encode("latin1"), []
    yield "utf16.txt", "text\n".encode("utf-16"), []
    yield "bom.txt", b"\xef\xbb\xbftext\n", ["\ufefftext\n"]
    yield "overlong.txt", b"a\xc0\xafb", []
    yield "surrogate.txt", b"a\xed\xa0\x80b", []
    yield "cut_character.txt", "a ä".encode()[:-1], []
    yield "carriage_returns.txt", b"a\r\nb\r\n", ["a\r\nb\r\n"]
    yield "long_line.txt", b"x" * LONG_LINE, None
    yield "long_line_of_wide_characters.txt", "漢".encode() * (LONG_LINE // 30), None
    yield "control.txt", bytes(range(1, 128)), [bytes(range(1, 128)).decode()]
    yield "no_suffix", b"text", ["text"]
    yield "image.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", []


def json_lines() -> Iterator[Source]:
    """Files of JSON lines."""
    good = b'{"text": "good"}\n'
    lines = {
        "empty": b"",
        "no_json": b"hello\n",
        "array": b'["a"]\n',
        "number": b"3\n",
        "null": b"null\n",
        "no_field": b'{"body": "a"}\n',
        "null_text": b'{"text": null}\n',
        "number_text": b'{"text": 3}\n',
        "list_text": b'{"text": ["a"]}\n',
        "object_text": b'{"text": {"a": 1}}\n',
        "empty_text": b'{"text": ""}\n',
        "cut": b'{"text": "good"}\n{"text": "cu',
        "single_quotes": b"{'text': 'a'}\n",
        "surrogate": b'{"text": "\\ud800"}\n',
        "invalid_utf8": b'{"text": "\xff"}\n',
        "nul": b'{"text": "a\0b"}\n',
        "deep": b'{"text": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
        "huge_number": b'{"text": "a", "x": ' + b"9" * 10_000 + b"}\n",
        "two_objects": b'{"text": "a"} {"text": "b"}\n',
        "pretty": json.dumps({"text": "a"}, indent=2).encode(),
    }
    for name, line in lines.items():
        yield f"{name}.jsonl", line, ["good"] if name == "cut" else []
        if name in ("no_json", "null_text", "deep", "huge_number", "surrogate"):
            yield f"{name}_after_a_good_one.jsonl", good + line, ["good"]
    yield "not_a_number.jsonl", b'{"text": "a", "x": NaN}\n', ["a"]
    yield "twice_the_same_field.jsonl", b'{"text": "a", "text": "b"}\n', ["b"]
    yield "byte_order_mark.jsonl", b"\xef\xbb\xbf" + good, ["good"]
    yield "blank_lines.jsonl", b"\n" + good + b"\n\n", ["good"]


def archives(generator: random.Random) -> Iterator[Source]:
    """Compressed files, damaged."""
    whole = gzip.compress(LINES, mtime=0)
    yield "empty.jsonl.gz", b"", []
    yield "plain.jsonl.gz", LINES, []
    yield "nothing.txt.gz", gzip.compress(b""), []
    yield "twice.jsonl.gz", whole + whole, TEXTS + TEXTS
    yield "garbage_behind.jsonl.gz", whole + b"garbage", TEXTS
    for index in range(4):
        yield f"cut_{index}.jsonl.gz", whole[: generator.randrange(1, len(whole))], []
        yield f"flipped_{index}.jsonl.gz", flip(whole, generator), TEXTS
    yield "cut.txt.bz2", bz2.compress(LINES)[:-5], None
    yield "gz_in_disguise.txt.bz2", whole, None
    yield "gz_in_disguise.jsonl", whole, []


def parquet(generator: random.Random) -> Iterator[Source]:
    """Parquet files: of other columns and damaged."""
    import pyarrow
    import pyarrow.parquet

    def written(**columns: object) -> bytes:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table(columns), sink)
        return sink.getvalue().to_pybytes()

    whole = written(text=TEXTS)
    yield "empty.parquet", b"", []
    yield "text.parquet", b"hello", []
    yield "magic.parquet", b"PAR1PAR1", []
    yield "no_rows.parquet", written(text=pyarrow.array([], pyarrow.string())), []
    yield "other_column.parquet", written(body=TEXTS), []
    yield "numbers.parquet", written(text=[1, 2]), []
    yield "lists.parquet", written(text=[["a"], ["b"]]), []
    yield "nulls.parquet", written(text=pyarrow.array([None, None], pyarrow.string())), []
    yield "bytes.parquet", written(text=[b"\xff", b"a"]), []
    yield "dictionary.parquet", written(text=pyarrow.array(TEXTS).dictionary_encode()), TEXTS
    for index in range(4):
        yield f"cut_{index}.parquet", whole[: generator.randrange(len(whole))], []
        yield f"flipped_{index}.parquet", flip(whole, generator), None


def flip(content: bytes, generator: random.Random) -> bytes:
    """Return a content with one bit flipped."""
    changed = bytearray(content)
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


Maker = Callable[[Path], str]
"""Makes something that is no file of text in a folder, and returns its path."""


def no_files() -> Iterator[tuple[str, Maker]]:
    """What is no file: each is an error."""

    def folder_named(name: str) -> Maker:
        return lambda place: str(_made(place / name))

    def link_to(target: str) -> Maker:
        return lambda place: _link(place / "link.txt", target)

    def pipe(place: Path) -> str:
        os.mkfifo(place / "pipe.txt")
        return str(place / "pipe.txt")

    yield "missing.txt", lambda place: str(place / "missing.txt")
    yield "empty folder", folder_named("empty")
    yield "folder.txt", folder_named("folder.txt")
    yield "folder.parquet", folder_named("folder.parquet")
    yield "folder.arecord", folder_named("folder.arecord")
    yield "dangling link", link_to("nowhere")
    yield "link to itself", link_to("link.txt")
    yield "pipe", pipe
    yield "pattern without matches", lambda place: str(place / "*.nothing")
    yield "unclosed pattern", lambda place: str(place / "[a")
    yield "empty name", lambda _: ""
    yield "name with a NUL", lambda place: str(place) + "/a\0b"
    yield "name that is too long", lambda place: str(place / ("a" * 300))
    yield "a file as a folder", lambda place: str(place / "text.txt" / "x")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _link(path: Path, target: str) -> str:
    path.symlink_to(target)
    return str(path)


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Prepare up to `count` bad sources, drawn from all kinds."""
    generator = random.Random(seed)
    sources = [*plain(), *json_lines(), *archives(generator), *parquet(generator)]
    cases = [(name, lambda place, s=source: _prepare_file(place, *s)) for source in sources for name in source[:1]]
    cases += [(name, lambda place, n=name, m=make: _prepare_no_file(place, n, m)) for name, make in no_files()]
    if count < len(cases):
        cases = generator.sample(cases, count)
    results = []
    for index, (name, run) in enumerate(cases):
        place = folder / f"source_{index}"
        place.mkdir(parents=True)
        results.append(run_case(name, lambda: run(place)))  # noqa: B023
    return results


def _prepare_file(place: Path, name: str, content: bytes, expected: Documents) -> Result:
    file = place / name
    file.write_bytes(content)
    result = _prepare(place, name, str(file), r"There are no documents|" + name.replace(".", r"\."))
    if result.outcome is not Outcome.OK or expected is None:
        return result
    found = _read(place / "prepared" / "train")
    if found == expected:
        return result
    return Result(name, Outcome.WRONG, f"the documents are {str(found)[:100]} instead of {str(expected)[:100]}")


def _prepare_no_file(place: Path, name: str, make: Maker) -> Result:
    (place / "text.txt").write_text("text")
    result = _prepare(place, name, make(place), "")
    if result.outcome is Outcome.OK:
        return Result(name, Outcome.WRONG, f"it was prepared: {_read(place / 'prepared' / 'train')}")
    return result


def _prepare(place: Path, name: str, path: str, pattern: str) -> Result:
    code, output = run_command("prepare", path, "--output", str(place / "prepared"), "--workers", "0")
    return judge_output(name, code, output, {0, 1, 2}, pattern)


def _read(folder: Path) -> list[str]:
    shards = TokenShards(folder)
    return [ByteTokenizer().decode(np.asarray(tokens)) for tokens in shards.read(range(len(shards)))]
