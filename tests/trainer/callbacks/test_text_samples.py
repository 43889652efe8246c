"""What the model writes is kept as text, the same for the same parameters."""

import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from trainer.runs import make_trainer, model_config

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer, train_tokenizer
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.logger import Logger
from xlstm_jax.trainer.logger.base_logger import LoggerTool

pytestmark = pytest.mark.slow


class Reader(LoggerTool):
    """Keeps the texts that it is given."""

    def __init__(self):
        self.texts = []

    def log_text(self, name, text, step):
        self.texts.append((name, text, step))


class Parrot:
    """A trainer whose model repeats a text, and ends after it."""

    def __init__(self, path, text=b" and more"):
        self.log_path, self.text = path, list(text)
        self.state, self.global_step, self.asked = None, 7, []
        self.logger = Logger(None)
        self.logger.log_tools = [Reader()]

    def get_generate_fn(self, max_length, eod_token_id, token_sample_fn):
        def generate(state, rng, prefix, mask):
            self.asked.append((prefix, mask))
            prefix = np.asarray(prefix)
            mask = np.ones(prefix.shape, bool) if mask is None else np.asarray(mask)
            tokens, is_valid = np.zeros((2, len(prefix), max_length), np.int32)
            for row, (tokens_of_row, is_given) in enumerate(zip(prefix, mask, strict=True)):
                whole = [*tokens_of_row[is_given], *self.text][:max_length]
                tokens[row, : len(whole)], is_valid[row, : len(whole)] = whole, 1
            return tokens, is_valid.astype(bool)

        return generate


def write(trainer, **options):
    """Write samples at an evaluation; return the text of the file."""
    callback = TextSamplesConfig(max_length=16, **options).create(trainer)
    callback.on_validation_epoch_end({}, epoch_idx=1, step_idx=30)
    return (trainer.log_path / "samples/step_30.txt").read_text(encoding="utf-8")


def test_each_evaluation_writes_prompts_and_continuations(tmp_path):
    assert write(Parrot(tmp_path), prompts=["Once", "One day"]) == (
        "--- 'Once'\n and more\n\n--- 'One day'\n and more\n"
    )


def test_the_tools_of_the_logger_get_whole_texts(tmp_path):
    trainer = Parrot(tmp_path)
    write(trainer, prompts=["Once"])
    assert trainer.logger.log_tools[0].texts == [("'Once' continued", "Once and more", 30)]


def test_a_tokenizer_may_be_named_by_its_path(tmp_path):
    folder = train_tokenizer(["Once upon a time"] * 20, 280, tmp_path / "tokenizer")
    trainer = Parrot(tmp_path, text=b"")
    assert "--- 'Once upon'" in write(trainer, prompts=["Once upon"], tokenizer=str(folder))
    assert trainer.asked[0][0].shape[1] < len("Once upon")


def test_a_test_writes_samples_too(tmp_path):
    callback = TextSamplesConfig(prompts=["Once"]).create(Parrot(tmp_path))
    callback.on_test_epoch_end({}, 1)
    assert (tmp_path / "samples/step_7.txt").exists()


def test_the_log_shows_how_samples_begin(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "xlstm_jax"):
        TextSamplesConfig(prompts=["A"], max_length=500).create(Parrot(None, b"xy" * 200)).write(30)
    assert f"Sample at step 30: 'A' ... '{'xy' * 40}'" in caplog.text


def test_prompts_may_be_tokens_and_be_continued_more_than_once(tmp_path):
    trainer = Parrot(tmp_path)
    text = write(trainer, prompts=["Hi", [72]], num_samples=2)
    assert text.count("--- 'Hi'") == text.count("--- 'H'") == 2
    (prefix, mask), *_ = trainer.asked
    np.testing.assert_array_equal(prefix, [[72, 105], [72, 105], [72, 0], [72, 0]])
    np.testing.assert_array_equal(mask, [[True, True], [True, True], [True, False], [True, False]])


def test_prompts_of_one_length_are_read_in_one_pass(tmp_path):
    trainer = Parrot(tmp_path)
    write(trainer, prompts=["Hi", "Ho"])
    assert trainer.asked[0][1] is None


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    trainer = Parrot(tmp_path)
    TextSamplesConfig(prompts=["Hi"]).create(trainer).write(30)
    assert trainer.asked
    assert not list(tmp_path.iterdir())


class Words:
    """A tokenizer of words, which wraps tokens as the library tokenizers does."""

    words = ("one", "two", "three")

    def encode(self, text):
        return SimpleNamespace(ids=[self.words.index(word) for word in text.split()])

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)


def test_any_tokenizer_will_do(tmp_path):
    assert write(Parrot(tmp_path, [2, 2]), prompts=["two one"], tokenizer=Words()) == "--- 'two one'\nthree three\n"


def test_bytes_that_are_no_text_are_replaced():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
    assert tokenizer.decode([72, 0xC3, 105, 300, 33]) == "H\ufffdi\ufffd!"


@pytest.mark.parametrize("prompt", ["", "as long as it can be"[:16]])
def test_a_prompt_that_leaves_nothing_to_do_is_refused(prompt):
    with pytest.raises(ValueError, match=f"has {len(prompt)} tokens.*max_length 16"):
        TextSamplesConfig(prompts=[prompt], max_length=16).create(Parrot(None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"temperature": -1.0}, r"temperature is -1\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"main_process_only": True}, "all processes have to take part"),
    ],
)
def test_a_bad_config_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TextSamplesConfig(**({"prompts": ["Hi"]} | options))


@pytest.fixture(scope="module")
def trainer():
    """The trainer of a byte-level model over two devices."""
    return make_trainer({"fsdp": 2}, model=model_config(vocab_size=256))


def test_the_same_parameters_give_the_same_samples_by_one_program(trainer, caplog):
    callback = TextSamplesConfig(prompts=["Once upon", "A"], max_length=20, num_samples=2).create(trainer)
    first = callback.generate()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        assert callback.generate() == first
    assert "ompiling" not in caplog.text
    assert len(set(first)) == 4
    other = TextSamplesConfig(prompts=["Once upon", "A"], max_length=20, num_samples=2, seed=1).create(trainer)
    assert other.generate() != first


def test_prompts_of_several_lengths_are_continued_as_if_alone(trainer):
    def likeliest(*prompts):
        return TextSamplesConfig(prompts=list(prompts), max_length=20, temperature=0.0).create(trainer).generate()

    assert likeliest("Once upon", "A") == likeliest("Once upon") + likeliest("A")
