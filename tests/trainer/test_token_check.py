"""No token id that a model does not have gets into it unnoticed, whatever it comes from."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from meshes import make_mesh
from trainer.runs import VOCAB_SIZE, TokenLoader, draw_batch, make_trainer

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset import SyntheticDataConfig, TextFilesDataConfig, create_data_iterator
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.trainer import token_check
from xlstm_jax.trainer.callbacks.extended_evaluation import ExtendedEvaluationConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig
from xlstm_jax.trainer.run.batches import BatchStream
from xlstm_jax.trainer.token_check import TokenCheck

CHECK = TokenCheck(VOCAB_SIZE)
BYTES = Vocabulary.of_tokenizer(TextEncoder("byte"))
OTHER = Vocabulary(20, "other shards", digest="1234")


def batch_with(token, name="targets", *, counts=True):
    """Return a batch on the host with a token id of ours where it counts, or where it does not."""
    batch = draw_batch(0, 0)
    segmentation = np.array(getattr(batch, f"{name}_segmentation"))
    tokens = np.array(getattr(batch, name))
    segmentation[0, 0], tokens[0, 0] = int(counts), token
    return dataclasses.replace(batch, **{name: tokens, f"{name}_segmentation": segmentation})


def loader_with(token, name="targets", mesh=None):
    """Return a loader of a user, whose first batch has a token id of ours."""
    return TokenLoader(mesh or make_mesh(), num_batches=2, transform=lambda *_: batch_with(token, name))


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(logger=None)


@pytest.mark.parametrize("place", [lambda batch: batch, jax.device_put], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ["inputs", "targets"])
@pytest.mark.parametrize("token", [VOCAB_SIZE, 2**31 - 1, -1, -100])
def test_an_id_that_the_model_does_not_have_is_named_with_the_size_of_its_vocabulary(token, name, place):
    message = f"^The {name} of a batch hold the token id {token}, but the model's vocab_size is {VOCAB_SIZE}, so"
    with pytest.raises(ConfigError, match=message):
        CHECK.check_batch(place(batch_with(token, name)), loader=[])


@pytest.mark.parametrize("name", ["inputs", "targets"])
@pytest.mark.parametrize("token", [VOCAB_SIZE, -100])
def test_padding_and_masked_targets_may_be_any_number(token, name):
    CHECK.check_batch(batch_with(token, name, counts=False), loader=[])
    CHECK.check_batch(batch_with(VOCAB_SIZE - 1, name), loader=[])


def test_ids_of_more_than_32_bits_are_seen_before_devices_cut_them():
    batch = dataclasses.replace(draw_batch(0, 0), targets=np.full(draw_batch(0, 0).targets.shape, 2**32 + 1))
    loader = MultiHostDataLoadIterator([batch], make_mesh())
    with pytest.raises(ConfigError, match="token id 4294967297"):
        list(CHECK.check_batches(iter(loader), loader))


def test_what_has_no_tokens_or_no_vocabulary_is_not_compared():
    CHECK.check_batch(Batch(inputs=np.full((2, 2), 1e9), targets=np.full((2, 2), 10**9)), loader=[])
    TokenCheck(None).check_batch(batch_with(10**6), loader=[])
    TokenCheck(None).check_data({"train": SimpleNamespace(vocabulary=OTHER)}, {})


def test_a_model_says_how_many_ids_it_has(trainer):
    llama = LlamaConfig(vocab_size=40, embedding_dim=16, num_blocks=1, head_dim=8)
    config = ModelConfig(model_class=LlamaTransformer, parallel=ParallelConfig(), model_config=llama)
    assert config.num_token_ids == 40
    assert ModelConfig(model_class=LlamaTransformer, parallel=ParallelConfig()).num_token_ids is None
    assert trainer.token_check.num_ids == VOCAB_SIZE


def test_of_batches_on_accelerators_the_first_of_each_pass_is_looked_at(monkeypatch):
    monkeypatch.setattr(token_check, "_is_on_host", lambda _: False)
    good, bad = (jax.device_put(batch_with(token)) for token in (0, VOCAB_SIZE))
    assert len(list(CHECK.check_batches(iter([good, bad]), loader=[]))) == 2
    with pytest.raises(ConfigError, match=f"token id {VOCAB_SIZE}"):
        next(CHECK.check_batches(iter([bad, good]), loader=[]))


def test_our_loaders_are_believed_what_they_saw_on_the_host(monkeypatch):
    monkeypatch.setattr(token_check, "_is_on_host", lambda _: False)
    monkeypatch.setattr(token_check, "find_token_ranges", None)
    loader = MultiHostDataLoadIterator([batch_with(0), batch_with(VOCAB_SIZE)], make_mesh(), prefetch=2)
    batches = CHECK.check_batches(iter(loader), loader)
    next(batches)
    with pytest.raises(ConfigError, match=f"token id {VOCAB_SIZE}"):
        next(batches)
    synthetic = create_data_iterator(
        SyntheticDataConfig(vocab_size=VOCAB_SIZE, global_batch_size=2, max_target_length=4), make_mesh()
    )
    next(CHECK.check_batches(iter(synthetic), synthetic))


def test_every_batch_that_a_run_draws_is_looked_at():
    batches = [batch_with(0), batch_with(1), batch_with(-7, "inputs")]
    stream = BatchStream(batches, CHECK)
    stream.next(begins_epoch=True)
    stream.next(begins_epoch=False)
    with pytest.raises(ConfigError, match="inputs of a batch hold the token id -7"):
        stream.next(begins_epoch=False)


# The paths of a trainer.


def test_training_stops_at_an_id_that_the_model_does_not_have(trainer):
    with pytest.raises(ConfigError, match=f"targets of a batch hold the token id {VOCAB_SIZE}"):
        trainer.train_model(loader_with(VOCAB_SIZE), num_train_steps=1)
    assert (trainer.global_step, int(trainer.state.step)) == (0, 0)


@pytest.mark.parametrize("is_named", [False, True])
def test_validation_sets_are_looked_at_before_training(is_named, trainer):
    bad = loader_with(-3, "inputs")
    with pytest.raises(ConfigError, match="inputs of a batch hold the token id -3"):
        trainer.train_model(loader_with(0), {"a": bad} if is_named else bad, num_train_steps=1)


def test_evaluations_and_tests_stop_at_an_id_that_the_model_does_not_have(trainer):
    for evaluate in (trainer.test_model, lambda loader: trainer.eval_model(loader, "val", 0)):
        with pytest.raises(ConfigError, match=f"targets of a batch hold the token id {VOCAB_SIZE}"):
            evaluate(loader_with(VOCAB_SIZE))


def test_extended_evaluations_stop_at_an_id_that_the_model_does_not_have(trainer):
    evaluation = ExtendedEvaluationConfig().create(trainer)
    with pytest.raises(ConfigError, match=f"targets of a batch hold the token id {VOCAB_SIZE}"):
        evaluation.eval_model(loader_with(VOCAB_SIZE))


def test_data_with_more_ids_than_the_model_is_refused_before_a_run_starts(trainer, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    config = TextFilesDataConfig(
        data_path=tmp_path / "text.txt", tokenizer_path="byte", global_batch_size=4, max_target_length=4, worker_count=0
    )
    texts, symbols = create_data_iterator(config, trainer.mesh), SimpleNamespace(vocabulary=Vocabulary(9, "symbols"))
    for name, data in {
        "train": {"train_loader": texts},
        "val": {"train_loader": symbols, "val_loader": texts},
        "val/b": {"train_loader": symbols, "val_loader": {"a": symbols, "b": texts}},
        "test": {"train_loader": symbols, "test_loader": texts},
    }.items():
        with pytest.raises(ConfigError, match=rf"^{name}: there are 257 token ids .* vocab_size is {VOCAB_SIZE}"):
            trainer.train_model(**data, num_train_steps=1)
    with pytest.raises(ConfigError, match=r"^test: there are 257 token ids"):
        trainer.test_model(texts)


def test_validation_data_of_another_tokenizer_is_refused_before_a_run_starts(trainer):
    train, other = (SimpleNamespace(vocabulary=Vocabulary(20, "shards", digest=digest)) for digest in ("12", "34"))
    with pytest.raises(ConfigError, match=r"^val/b: shards, digest 34 is another tokenizer than shards, digest 12"):
        trainer.train_model(train, {"a": train, "b": other}, num_train_steps=1)


def test_a_prefix_with_an_id_that_the_model_does_not_have_is_refused(trainer):
    generate = trainer.get_generate_fn(max_length=4)
    prefix, mask = np.array([[1, VOCAB_SIZE]]), np.array([[0, 1]])
    for wrong in ((prefix, None), (prefix, mask), (prefix[:, ::-1], mask), (prefix[0], None)):
        with pytest.raises(ConfigError, match=f"prefixes hold the token id {VOCAB_SIZE}, but"):
            generate(trainer.state, jax.random.key(0), *wrong)


def test_samples_of_a_prompt_that_the_model_has_no_ids_for_are_refused(trainer):
    with pytest.raises(ConfigError, match=r"tokens of the prompt 'a' hold the token id 97, but .* vocab_size is 32"):
        TextSamplesConfig(prompts=["a"]).create(trainer)
    with pytest.raises(ConfigError, match=r"prompt \[1, -2\] hold the token id -2"):
        TextSamplesConfig(prompts=[[1, -2]]).create(trainer)
    TextSamplesConfig(prompts=[[1, 2]]).create(trainer)


def test_samples_of_another_tokenizer_than_the_data_are_refused_before_a_run_starts(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "callbacks", [TextSamplesConfig(prompts=[[1, 2]]).create(trainer)])
    trainer.check_data(train=SimpleNamespace(vocabulary=dataclasses.replace(BYTES, size=20)))
    with pytest.raises(ConfigError, match=r"^TextSamples: tokenizer 'byte', .* is another tokenizer than other shards"):
        trainer.train_model(SimpleNamespace(vocabulary=OTHER), num_train_steps=1)


def test_tasks_of_lm_eval_with_a_tokenizer_that_does_not_fit_the_model_are_refused(trainer):
    config = LMEvalEvaluationConfig(tokenizer_path="byte", evaluation_tasks=["none"])
    message = rf"^LMEvalEvaluationConfig: there are 257 token ids .* vocab_size is {VOCAB_SIZE}"
    with pytest.raises(ConfigError, match=message):
        config.create(trainer)
