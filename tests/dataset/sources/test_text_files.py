"""Files become documents: all of them, in a fixed order, with nothing lost and nothing wrong let through."""

import bz2
import gzip
import json
import logging
import lzma
import os
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm_jax.dataset.sources.text_files import TextFiles

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def json_lines(*objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def texts_of(*texts):
    return json_lines(*({"text": text} for text in texts))


def zstd(content):
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


def write_parquet(file, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
    return file


# Finding files


def test_a_file_of_plain_text_is_a_document(tmp_path):
    write(tmp_path, {"a.txt": "Häuser\r\nund Bäume"})
    assert list(TextFiles(tmp_path / "a.txt")) == ["Häuser\r\nund Bäume"]


def test_a_folder_is_read_with_all_below_it_in_the_order_of_paths(tmp_path):
    write(tmp_path, {"b.md": "3", "a/z.py": "2", "a/b/c.txt": "1", "c": "4"})
    assert list(TextFiles(str(tmp_path))) == ["1", "2", "3", "4"]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    write(tmp_path, {"a.txt": "seen", ".b.txt": "hidden", ".git/c.txt": "hidden", "d/.e.txt": "hidden"})
    assert list(TextFiles(tmp_path)) == ["seen"]


def test_a_hidden_folder_is_read_if_it_is_named(tmp_path):
    write(tmp_path, {".cache/a.txt": "seen"})
    assert list(TextFiles(tmp_path / ".cache")) == ["seen"]


def test_a_pattern_matches_files_and_folders(tmp_path):
    write(tmp_path, {"part1/a.txt": "1", "part2.txt": "2", "other/b.txt": "3"})
    assert list(TextFiles(tmp_path / "part*")) == ["1", "2"]
    assert list(TextFiles(f"{tmp_path}/**/b.txt")) == ["3"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    write(tmp_path, {"a[1].txt": "brackets", "a1.txt": "none"})
    assert list(TextFiles(tmp_path / "a[1].txt")) == ["brackets"]


def test_several_paths_are_read_in_their_order_and_no_file_twice(tmp_path):
    write(tmp_path, {"a.txt": "1", "b.txt": "2", "c.txt": "3"})
    files = TextFiles([tmp_path / "c.txt", tmp_path / "*.txt"])
    assert list(files) == ["3", "1", "2"]


def test_folders_behind_links_are_read_once_round(tmp_path):
    write(tmp_path, {"data/a.txt": "1", "elsewhere/b.txt": "2"})
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert list(TextFiles(tmp_path / "data")) == ["1", "2"]


@pytest.mark.parametrize("pattern", ["", "*"])
def test_pipes_in_folders_and_patterns_are_left_out(tmp_path, pattern):
    write(tmp_path, {"b.txt": "text"})
    os.mkfifo(tmp_path / "a.txt")
    assert list(TextFiles(tmp_path / pattern)) == ["text"]


def test_a_path_that_names_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is neither a file nor a folder"):
        TextFiles(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["missing", "missing/*.txt", "empty"])
def test_a_path_without_files_is_refused_by_its_name(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=name.partition("*")[0]):
        TextFiles(tmp_path / name, on_bad_data="skip")


# Formats


def test_documents_of_json_lines_are_one_field_of_each_object(tmp_path):
    content = "\n".join(['{"id": 1, "text": "a\\nb"}', "", '{"text": "ä€\\ud83d\\ude00"}'])
    write(tmp_path, {"a.jsonl": content, "b.ndjson": texts_of("c"), "c.json": b"\xef\xbb\xbf" + texts_of("d").encode()})
    assert list(TextFiles(tmp_path)) == ["a\nb", "ä€😀", "c", "d"]


def test_the_field_can_be_chosen(tmp_path):
    write(tmp_path, {"a.jsonl": json_lines({"text": "no", "body": "yes"})})
    assert list(TextFiles(tmp_path, column="body")) == ["yes"]


@pytest.mark.parametrize("suffix", [*COMPRESS, ".zst"])
def test_compressed_files_give_the_same_documents(tmp_path, suffix):
    compress = COMPRESS.get(suffix, zstd)
    plain, lines = b"first\nsecond\n" * 20, texts_of("eins", "zwei").encode()
    write(tmp_path, {f"a.txt{suffix}": compress(plain), f"b.jsonl{suffix}": compress(lines)})
    assert list(TextFiles(tmp_path)) == [plain.decode(), "eins", "zwei"]


def test_documents_of_parquet_are_the_rows_of_a_column(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", text=["a", "b", "ä"], other=[1, 2, 3])
    assert list(TextFiles(file)) == ["a", "b", "ä"]


def test_a_column_of_bytes_is_text(tmp_path):
    assert list(TextFiles(write_parquet(tmp_path / "a.parquet", text=["ä".encode()]))) == ["ä"]


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_what_needs_pyarrow_says_how_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {name: "x"})
    with pytest.raises(ImportError, match=r'pip install "xlstm_jax\[hf\]"'):
        list(TextFiles(tmp_path))


# Long files


def test_a_long_file_is_cut_at_the_ends_of_lines(tmp_path):
    write(tmp_path, {"a.txt": "one\ntwo\nthree\n"})
    assert list(TextFiles(tmp_path, max_document_bytes=8)) == ["one\ntwo\n", "three\n"]


def test_a_long_line_is_cut_between_characters(tmp_path):
    write(tmp_path, {"a.txt": "ab😀cd\nefghij"})
    assert list(TextFiles(tmp_path, max_document_bytes=5)) == ["ab", "😀c", "d\n", "efghi", "j"]


@pytest.mark.parametrize("limit", [9, None])
def test_a_file_of_the_allowed_size_is_not_cut(tmp_path, limit):
    write(tmp_path, {"a.txt": "one\ntwo\nx"})
    assert list(TextFiles(tmp_path, max_document_bytes=limit)) == ["one\ntwo\nx"]


@given(text=st.text(min_size=1, alphabet="ab\né€😀"), limit=st.integers(4, 12))
def test_the_parts_of_a_file_are_the_file(tmp_path_factory, text, limit):
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_bytes(text.encode())
    parts = list(TextFiles(file, max_document_bytes=limit))
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= limit for part in parts)


def test_documents_of_json_lines_are_never_cut(tmp_path):
    write(tmp_path, {"a.jsonl": texts_of("a\n" * 100)})
    assert list(TextFiles(tmp_path, max_document_bytes=10)) == ["a\n" * 100]


def test_no_limit_is_shorter_than_a_character(tmp_path):
    with pytest.raises(ValueError, match="max_document_bytes is 3"):
        TextFiles(write(tmp_path, {"a.txt": "x"}), max_document_bytes=3)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    content = b"some words on a line\n" * 400_000
    write(tmp_path, {f"a.txt{suffix}": gzip.compress(content, 1) if suffix else content})
    files = TextFiles(tmp_path)
    tracemalloc.start()
    assert sum(len(text) for text in files) == len(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(content) / 8


# Bad data

GZIP = gzip.compress(texts_of("good").encode() * 1000)
BAD = {
    "empty.txt": (b"", ": ", "empty file"),
    "empty.jsonl": (b"", ": ", "empty file"),
    "latin.txt": (b"good\nB\xe4ume\n", ", line 2: ", "no UTF-8"),
    "latin.jsonl": (texts_of("good").encode() + b'{"text": "B\xe4ume"}\n', ", line 2: ", "no UTF-8"),
    "broken.jsonl": (texts_of("good") + "\n" + '{"text": "cut o', ", line 3: ", "no JSON"),
    "deep.jsonl": (texts_of("good") + "[" * 100_000, ", line 2: ", "no JSON"),
    "list.jsonl": (texts_of("good") + '["text"]', ", line 2: ", "no JSON object"),
    "field.jsonl": (json_lines({"text": "good"}, {"body": "x"}), ", line 2: ", "missing field"),
    "number.jsonl": (json_lines({"text": "good"}, {"text": 3}), ", line 2: ", "no text"),
    "null.jsonl": (json_lines({"text": "good"}, {"text": None}), ", line 2: ", "no text"),
    "blank.jsonl": (texts_of("good", ""), ", line 2: ", "empty document"),
    "surrogate.jsonl": (texts_of("good") + '{"text": "\\ud83d"}', ", line 2: ", "no Unicode"),
    "cut.jsonl.gz": (GZIP[:-20], ", after document ", "damaged file"),
    "damaged.jsonl.gz": (GZIP[:30] + b"\0\0\0\0" + GZIP[34:], ", after document ", "damaged file"),
    "none.jsonl.gz": (b"no archive", ", after document ", "damaged file"),
    "cut.jsonl.bz2": (bz2.compress(b"x" * 1000)[:-10], ", after document ", "damaged file"),
    "none.jsonl.bz2": (b"no archive", ", after document ", "damaged file"),
    "cut.jsonl.xz": (lzma.compress(b"x" * 1000)[:-10], ", after document ", "damaged file"),
    "none.jsonl.xz": (b"no archive", ", after document ", "damaged file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_an_error_that_says_where_and_what_can_be_done(tmp_path, name):
    content, place, _ = BAD[name]
    write(tmp_path, {name: content})
    with pytest.raises(ValueError, match=r'on_bad_data="skip"') as info:
        list(TextFiles(tmp_path))
    assert str(info.value).startswith(f"{tmp_path / name}{place}")


@pytest.mark.parametrize("name", BAD)
def test_bad_data_can_be_left_out_and_is_counted_by_its_reason(tmp_path, name):
    content, _, reason = BAD[name]
    write(tmp_path, {name: content, "z.txt": "last"})
    files = TextFiles(tmp_path, on_bad_data="skip")
    texts = list(files)
    assert texts[-1] == "last"
    assert set(texts[:-1]) <= {"good"}
    assert files.skipped == {reason: 1}


def test_what_can_be_read_of_a_cut_archive_is_read(tmp_path):
    write(tmp_path, {"a.jsonl.gz": GZIP[:-20]})
    assert 500 < len(list(TextFiles(tmp_path, on_bad_data="skip"))) < 1000


def test_only_the_bad_part_of_a_long_file_is_left_out(tmp_path):
    write(tmp_path, {"a.txt": b"good\nB\xe4d\nalso good\n"})
    files = TextFiles(tmp_path, on_bad_data="skip", max_document_bytes=10)
    assert list(files) == ["also good\n"]
    assert files.skipped == {"no UTF-8": 1}


@pytest.mark.parametrize(
    ("columns", "place", "reason"),
    [
        ({"text": ["good", None]}, "row 2", "no text"),
        ({"text": ["good", ""]}, "row 2", "empty document"),
        ({"text": [1, 2]}, "row 1", "no text"),
        ({"text": ["good", b"\xff"]}, "row 2", "no UTF-8"),
        ({"body": ["x"]}, "no column 'text' among \\['body'\\]", "missing field"),
    ],
)
def test_bad_rows_of_parquet(tmp_path, columns, place, reason):
    pyarrow = pytest.importorskip("pyarrow")
    is_bytes = any(isinstance(value, bytes) for value in columns.get("text", []))
    file = write_parquet(
        tmp_path / "a.parquet",
        **{k: pyarrow.array(v, pyarrow.binary() if is_bytes else None) for k, v in columns.items()},
    )
    with pytest.raises(ValueError, match=place):
        list(TextFiles(file))
    files = TextFiles(file, on_bad_data="skip")
    assert set(files) <= {"good"}
    assert reason in files.skipped


def test_a_damaged_parquet_file_is_bad_data(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", text=["a"] * 100)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet, after document 0: it cannot be read to its end"):
        list(TextFiles(file))


def test_files_that_cannot_be_read_are_bad_data(tmp_path):
    write(tmp_path, {"b.txt": "good"})
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    files = TextFiles(tmp_path, on_bad_data="skip")
    assert list(files) == ["good"]
    assert files.skipped == {"damaged file": 1}


def test_one_warning_says_how_many_documents_were_left_out_and_why(tmp_path, caplog):
    write(tmp_path, {"a.jsonl": texts_of("good", "", "") + "x\n"})
    files = TextFiles(tmp_path, on_bad_data="skip")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert list(files) == ["good"]
        (record,) = caplog.records
        assert record.getMessage().endswith(": 2 × empty document, 1 × no JSON.")


def test_an_unknown_way_to_treat_bad_data_is_refused(tmp_path, unchecked_shapes):
    with pytest.raises(ValueError, match="on_bad_data is 'ignore'"):
        TextFiles(write(tmp_path, {"a.txt": "x"}), on_bad_data="ignore")


# Positions and samples


@pytest.fixture
def several(tmp_path):
    """Files of which one has a bad document."""
    write(
        tmp_path,
        {"a.jsonl": texts_of("0", "", "1", "2"), "b.txt": "3", "c.jsonl.gz": gzip.compress(texts_of("4").encode())},
    )
    return tmp_path


def test_reading_can_begin_at_every_document(several):
    documents = list(TextFiles(several, on_bad_data="skip").documents())
    assert [text for _, text in documents] == ["0", "1", "2", "3", "4"]
    for index, (position, _) in enumerate(documents):
        assert list(TextFiles(several, on_bad_data="skip").documents(position)) == documents[index:]


def test_the_bytes_read_grow_to_those_of_all_files(several):
    files = TextFiles(several, on_bad_data="skip")
    read = [files.num_bytes_read for _ in files] + [files.num_bytes_read]
    assert read == sorted(read)
    assert read[-1] == files.num_bytes == sum(file.stat().st_size for file in several.iterdir())


def test_a_sample_has_a_share_of_every_file(tmp_path):
    write(tmp_path, {f"{name}.jsonl": texts_of(*(name * 10 for _ in range(100))) for name in "abcd"})
    texts = list(TextFiles(tmp_path).sample(400))
    assert [text[0] for text in texts] == ["a"] * 10 + ["b"] * 10 + ["c"] * 10 + ["d"] * 10


def test_a_sample_of_many_small_files_is_no_larger_than_asked_for(tmp_path):
    write(tmp_path, {f"{number:02}.txt": "x" * 10 for number in range(50)})
    assert len(list(TextFiles(tmp_path).sample(100))) == 10


def test_a_sample_that_is_larger_than_the_files_is_all_of_them(tmp_path):
    write(tmp_path, {"a.txt": "1", "b.txt": "22"})
    assert list(TextFiles(tmp_path).sample(1000)) == ["1", "22"]


def test_the_description_changes_with_the_size_of_a_file(tmp_path):
    before = TextFiles(write(tmp_path, {"a.txt": "x"})).describe()
    assert TextFiles(tmp_path).describe() == before
    assert TextFiles(write(tmp_path, {"a.txt": "xy"})).describe() != before
    assert json.loads(json.dumps(before)) == before


@pytest.mark.parametrize("place", [0, 5000, 65_535])
def test_the_description_changes_with_every_byte_of_a_small_file(tmp_path, place):
    content = b"x" * 65_536
    before = TextFiles(write(tmp_path, {"a.txt": content})).describe()
    write(tmp_path, {"a.txt": content[:place] + b"y" + content[place + 1 :]})
    assert TextFiles(tmp_path).describe() != before


@pytest.mark.parametrize("place", [4095, 1_000_000 - 4096])
def test_the_description_changes_with_both_ends_of_a_large_file(tmp_path, place):
    content = b"x" * 1_000_000
    before = TextFiles(write(tmp_path, {"a.txt": content})).describe()
    write(tmp_path, {"a.txt": content[:place] + b"y" + content[place + 1 :]})
    assert TextFiles(tmp_path).describe() != before
