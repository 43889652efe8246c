"""What `generate` refuses, in a line, before it loads a model; and how it loads one."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from trainer.runs import make_trainer

from xlstm_jax.cli import generate
from xlstm_jax.cli.main import main
from xlstm_jax.dataset.tokenizers.light import train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_vocabulary import read_vocabulary, write_vocabulary
from xlstm_jax.trainer.token_check import TokenCheck


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("-n", "0", "--num-tokens is 0, but must be at least 1."),
        ("-t", "-1", "--temperature is -1.0, but must be at least 0."),
        ("--top-k", "0", "--top-k is 0, but must be at least 1."),
        ("--top-p", "2", "--top-p is 2.0, but must be above 0 and at most 1."),
    ],
)
def test_a_number_that_sampling_cannot_use_is_a_wrong_setting(option, value, message, capsys):
    assert main(["generate", "a-run", "--prompt", "a text", option, value]) == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(compose(["experiment=demo"])))
    assert main(["generate", str(tmp_path), "--prompt", "a text", "--tokenizer", "not/to/be/found"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"The tokenizer 'not/to/be/found' is neither a path (relative to {tmp_path})")


def test_a_tokenizer_of_a_run_that_was_started_elsewhere_is_named_with_its_place(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data=prepared", "data.data_path=data/mine", "data.tokenizer_path=data/mine/tokenizer"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(compose(words)))
    assert main(["generate", str(tmp_path), "--prompt", "a text"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'data/mine/tokenizer'" in line
    assert f"relative to {tmp_path}" in line
    assert "change to the folder where the run was started" in line


def test_no_parameters_are_drawn_before_those_of_the_checkpoint_are_read():
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), make_trainer().state.params)
    zeros = make_trainer(trainer_class=generate._trainer_without_initialization()).state.params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), zeros) == shapes
    assert not any(np.any(x) for x in jax.tree.leaves(zeros))


def keep_vocabulary(folder, path):
    """Make the folder of a run that was trained on the tokens of a tokenizer."""
    (folder / "config.yaml").write_text(yaml.safe_dump(compose(["data=prepared", "data.data_path=not/here"])))
    write_vocabulary(folder, Vocabulary.of_tokenizer(TextEncoder(path)))


def test_the_tokenizer_of_a_run_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["a text"], 260, tmp_path / "mine")
    keep_vocabulary(tmp_path, "mine")
    monkeypatch.chdir(tmp_path.parent)
    vocabulary = generate._vocabulary_of(tmp_path, None)
    assert vocabulary.encoder.tokenizer_path == str(tmp_path / "mine")
    assert vocabulary.size == read_vocabulary(tmp_path).size


def test_another_tokenizer_than_that_of_the_run_is_a_wrong_setting(tmp_path, capsys):
    train_tokenizer(["a text"], 260, tmp_path / "mine")
    keep_vocabulary(tmp_path, str(tmp_path / "mine"))
    assert main(["generate", str(tmp_path), "--prompt", "a text", "--tokenizer", "byte"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--tokenizer: tokenizer 'byte', digest ")
    assert f"is another tokenizer than {tmp_path}/vocabulary.json" in line


def test_a_tokenizer_with_more_tokens_than_the_model_is_a_wrong_setting(tmp_path, capsys, monkeypatch):
    trainer = SimpleNamespace(load_from_checkpoint=lambda *_, **__: SimpleNamespace(token_check=TokenCheck(256)))
    monkeypatch.setattr(generate, "_trainer_without_initialization", lambda: trainer)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(compose(["data=formal_task"])))
    assert main(["generate", str(tmp_path), "--prompt", "a text", "--tokenizer", "byte"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("The tokenizer: there are 257 token ids (tokenizer 'byte'")
    assert "the model's vocab_size is 256" in line
