"""The command `prepare` passes on what it is asked for, and says what it has done."""

import json
import re
import shlex

import pytest

from xlstm_jax.cli import prepare as command_module
from xlstm_jax.cli.main import main
from xlstm_jax.dataset.sources.registry import open_source
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_config import build_run


@pytest.fixture
def source(tmp_path):
    return tmp_path / "texts.jsonl"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "prepared"


def test_the_command_says_what_it_has_written_and_what_to_do_next(source, output, capsys):
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "", "two")))
    assert main(["prepare", str(source), "--output", str(output), "--workers", "0", "--on-bad-data", "skip"]) == 0
    message = capsys.readouterr().out
    assert message.splitlines() == [
        f"{output / 'train'}: 2 documents, 6 tokens, 1 shard, skipped: 1 × empty document",
        f"Train on it:  xlstm-jax train data=prepared data.data_path={output} data.validation=null",
    ]


def test_the_command_that_is_shown_trains_on_all_that_was_written(source, tmp_path, capsys, monkeypatch):
    source.write_text("".join(json.dumps({"text": f"text {number} of it"}) + "\n" for number in range(50)))
    monkeypatch.chdir(tmp_path)
    options = ["--validation-share", "0.3", "--train-tokenizer", "300", "--workers", "0"]
    assert main(["prepare", str(source), "--output", "my texts", *options]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("Train on it:  "))
    assert words[:2] == ["xlstm-jax", "train"]
    data = build_run(compose(words[2:])).data
    for config in (data.first, data.validation["validation"]):
        assert len(open_source(config, "texts").documents) > 5


def test_a_split_of_another_name_is_the_one_that_the_command_trains_on(source, tmp_path, capsys):
    source.write_text(json.dumps({"text": "a text"}))
    output = tmp_path / "prepared"
    assert main(["prepare", str(source), "--output", str(output), "--split", "other", "--workers", "0"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("Train on it:  "))
    assert build_run(compose(words[2:])).data.first.split == "other"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "../x"], "split is '../x', but must be a name that a folder can have"),
        (["--split", ""], "split is '', but must be a name"),
        (["--split", "tokenizer"], "split is 'tokenizer', but that folder is for a tokenizer"),
        (["--validation-share", "0.1", "--split", "train"], "validation_share makes two splits of one: leave it out"),
        (["--train-tokenizer", "3"], "vocab_size is 3, but"),
        (["--train-tokenizer", "10000000000"], "vocab_size is 10000000000, but must be at most 4194304."),
        (["--tokenizer", "none/tokenizer.json"], "There is no tokenizer at none/tokenizer.json: give a folder"),
        (["--workers", "-1"], "num_workers is -1"),
        (["--shard-megabytes", "nan"], "shard_megabytes is nan"),
        (["--max-document-bytes", "1"], "max_document_bytes is 1, but must be at least 4."),
    ],
)
def test_a_wrong_option_is_one_line(options, message, source, output, capsys):
    source.write_text(json.dumps({"text": "a text"}))
    assert main(["prepare", str(source), "--output", str(output), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize("name", ["tokenizer.json", "other.json"])
def test_a_broken_tokenizer_is_one_line(name, source, output, tmp_path, capsys):
    source.write_text(json.dumps({"text": "a text"}))
    file = tmp_path / name
    file.write_text('{"version": "1.0", "model": {"type": "BPE"')
    assert main(["prepare", str(source), "--output", str(output), "--tokenizer", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file} ")
    assert "is not a valid tokenizer" in line


def test_the_standard_library_has_its_own_splits(output, capsys):
    assert main(["prepare", "stdlib", "--output", str(output), "--validation-share", "0.1"]) == 2
    assert capsys.readouterr().err == "validation_share makes two splits of one, but stdlib has two: leave it out.\n"


def test_a_folder_that_was_prepared_otherwise_is_one_line(source, output, capsys):
    source.write_text(json.dumps({"text": "a text"}))
    command = ["prepare", str(source), "--output", str(output), "--workers", "0"]
    assert main(command) == 0
    assert main([*command, "--add-eos"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"other options \(add_eos: False there, True here; .*tokenizer_digest: \w{12}\.\.\. there", line)


def test_every_option_of_the_command_reaches_the_function(source, output, monkeypatch):
    asked = {}
    monkeypatch.setattr(command_module, "prepare", lambda **options: asked.update(options) or {})
    monkeypatch.setattr(command_module, "_describe_result", lambda *_: "")
    command = (
        f"prepare a b --output {output} --split s --validation-share 0.5 --train-tokenizer 300 --train-megabytes 2 "
        "--add-bos --add-eos --column c --on-bad-data skip --max-document-bytes 0 --shard-megabytes 3 --workers 4 "
        "--overwrite --verify"
    )
    assert main(command.split()) == 0
    assert asked == {
        "sources": ["a", "b"],
        "output": str(output),
        "split": "s",
        "validation_share": 0.5,
        "train_vocab_size": 300,
        "train_megabytes": 2.0,
        "add_bos": True,
        "add_eos": True,
        "column": "c",
        "on_bad_data": "skip",
        "max_document_bytes": None,
        "shard_megabytes": 3.0,
        "num_workers": 4,
        "overwrite": True,
        "verify": True,
    }


def test_the_command_fails_with_a_message_and_no_traceback(tmp_path, capsys):
    assert main(["prepare", str(tmp_path / "missing"), "--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("There is no file")
    assert captured.out == ""


def test_a_share_that_is_none_is_a_wrong_setting(source, output, capsys):
    assert main(["prepare", str(source), "--output", str(output), "--validation-share", "2"]) == 2
    assert capsys.readouterr().err == "--validation-share is 2.0, but must be more than 0 and less than 1.\n"


def test_a_size_that_is_no_number_is_a_wrong_setting(source, output, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prepare", str(source), "--output", str(output), "--max-document-bytes", "abc"])
    assert stop.value.code == 2
    assert "--max-document-bytes: invalid int value: 'abc'" in capsys.readouterr().err


def test_the_command_can_be_stopped_and_says_so(source, output, capsys, monkeypatch):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "prepare", stop)
    assert main(["prepare", str(source), "--output", str(output)]) == 130
    assert "The same command resumes" in capsys.readouterr().err
