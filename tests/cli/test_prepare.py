"""The command `prepare` passes on what it is asked for, and says what it has done."""

import json

import pytest

from xlstm_jax.cli import prepare as command_module
from xlstm_jax.cli.main import main


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
    assert message.count("\n") == 1
    assert f"{output / 'train'}: 2 documents, 6 tokens, 1 shard, left out: 1 × empty document. " in message
    assert (
        f"GrainArrayRecordsDataConfig(data_path=Path('{output}'), tokenize_data=False, tokenizer_path='byte'" in message
    )


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
    assert captured.err.startswith("ValueError: There is no file")
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
    assert "The same command goes on" in capsys.readouterr().err
