"""Tasks of lm-eval on a model in training: the answers are those of single passes of the model, on every mesh."""

import json
import logging
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval")


from processes import run_two
from trainer.eval.requests import (
    CHUNK,
    CONTEXTS,
    MESHES,
    REQUESTS,
    ROWS,
    SENTENCE,
    WINDOW,
    default_evaluation,
    encode,
    evaluation_on,
    expected_answer,
    expected_text,
    expected_tokens,
    log_probabilities,
    request,
    trainer_on,
)

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig, fuse_document_results

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.slow]

TOLERANCE = {"rtol": 1e-6, "atol": 1e-4}


def assert_answers(answers, expected):
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
    np.testing.assert_allclose([x for x, _ in answers], [x for x, _ in expected], **TOLERANCE)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_log_likelihoods_of_documents_of_any_length_are_those_of_single_passes(sizes):
    answers = evaluation_on(sizes).loglikelihood([request(*args) for args in REQUESTS])
    assert_answers(answers, [expected_answer(*args) for args in REQUESTS])


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_log_likelihoods_in_windows_are_those_of_single_passes_over_windows(sizes):
    evaluation = evaluation_on(sizes, use_infinite_eval=False)
    answers = evaluation.loglikelihood([request(*args) for args in REQUESTS])
    assert_answers(answers, [expected_answer(*args, window=WINDOW) for args in REQUESTS])


def test_windows_that_hold_whole_documents_change_nothing():
    evaluation = evaluation_on(use_infinite_eval=False, context_length=90)
    answers = evaluation.loglikelihood([request(*args) for args in REQUESTS])
    assert_answers(answers, [expected_answer(*args) for args in REQUESTS])


def test_the_likeliest_continuation_is_recognized():
    contexts = {letter: expected_tokens(encode(letter), 3) for letter in "abcdefgh"}
    context, tokens = next(item for item in contexts.items() if max(item[1]) < 128)
    text = bytes(tokens).decode()
    requests = [request(context, text), request(context, text[:2] + chr(tokens[2] ^ 1)), request(context, text[:2])]
    assert [is_greedy for _, is_greedy in default_evaluation().loglikelihood(requests)] == [True, False, True]


@pytest.mark.parametrize("is_infinite", [True, False])
def test_answers_come_in_the_order_of_requests_over_several_batches(is_infinite):
    lengths = [1 + 7 * index % 23 for index in range(2 * ROWS + 3)]
    requests = [request(SENTENCE[:length]) for length in lengths]
    answers = evaluation_on(use_infinite_eval=is_infinite, context_length=24).loglikelihood_rolling(requests)
    tokens = encode(SENTENCE)
    scores = log_probabilities(tokens[:-1])[np.arange(len(SENTENCE)), tokens[1:]]
    np.testing.assert_allclose(answers, np.cumsum(scores)[np.array(lengths) - 1], **TOLERANCE)


@pytest.mark.parametrize("is_infinite", [True, False])
def test_what_follows_the_end_of_a_document_knows_nothing_of_it(is_infinite):
    evaluation = evaluation_on(use_infinite_eval=is_infinite, context_length=24)
    evaluation.eos_token_id = ord("o")
    first, second = SENTENCE.split("o")
    tokens = encode(first + "o"), [ord("o"), *second.encode()]
    expected = sum(log_probabilities(part[:-1])[np.arange(len(part) - 1), part[1:]].sum() for part in tokens)
    np.testing.assert_allclose(evaluation.loglikelihood_rolling([request(SENTENCE)]), [expected], **TOLERANCE)


def test_the_state_before_the_first_chunk_can_be_made_by_others():
    evaluation = evaluation_on()
    (batch,) = evaluation._load([request("ab", "cd")])
    shapes = []

    def init_cache(shape):
        shapes.append(shape)
        return evaluation._chunk_reader(CHUNK, ROWS).init_cache(evaluation._eval_state())

    step = evaluation.create_recurrent_evaluation_step_function(CHUNK, cache_init_fn=init_cache)
    found, expected = (run(evaluation.trainer.state, batch, None) for run in (step, evaluation.eval_step))
    np.testing.assert_array_equal(
        *(metrics["loglikelihood"]["single_noreduce_wcount"]["value"] for metrics in (found, expected))
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))


def test_one_program_reads_documents_of_all_lengths():
    evaluation = evaluation_on()
    reader = evaluation._chunk_reader(CHUNK, ROWS)
    for length in (1, 30, 70):
        evaluation.loglikelihood([request("x" * length)])
    assert reader._read._cache_size() == 1


def test_an_evaluation_that_debugs_scales_log_likelihoods():
    evaluations = default_evaluation(), evaluation_on(debug=True)
    (plain,), (scaled,) = (evaluation.loglikelihood_rolling([request("ab", "cd")]) for evaluation in evaluations)
    np.testing.assert_allclose(scaled, 1e-4 * plain)


def test_log_likelihoods_that_are_nan_are_reported(caplog):
    evaluation = evaluation_on()
    rows = np.array([1.0, np.nan, np.nan])
    results = {f"{name}_single_noreduce_wcount": (rows, rows) for name in ("loglikelihood", "accuracies")}
    evaluation.eval_model = lambda *_, **__: results | {"document_idx_single_noreduce": np.arange(1, 4)}
    with caplog.at_level(logging.WARNING, "xlstm_jax"):
        evaluation.loglikelihood([request("a")] * 3)
    assert "2 of 3 log-likelihoods are NaN" in caplog.text


def test_rows_of_a_document_are_joined_and_those_of_padding_left_out():
    results = {
        "loglikelihood_single_noreduce_wcount": (np.array([-1.0, -2.0, -4.0, -8.0, 0.0]), np.array([1, 2, 1, 3, 0])),
        "accuracies_single_noreduce_wcount": (np.array([1, 2, 1, 2, 0]), np.array([1, 2, 1, 3, 0])),
        "document_idx_single_noreduce": np.array([7, 2, 7, 3, 0]),
        "sequence_idx_single_noreduce": np.array([1, 0, 0, 0, 0]),
    }
    assert fuse_document_results(results) == [(-2.0, True), (-8.0, False), (-5.0, True)]


@pytest.mark.parametrize("sizes", [{}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_texts_are_continued_with_the_likeliest_tokens(sizes):
    texts = evaluation_on(sizes).generate_until([request(context, {"max_gen_toks": 10}) for context in CONTEXTS])
    assert texts == [expected_text(context, 10) for context in CONTEXTS]


def test_prompts_in_windows_leave_room_for_what_is_generated():
    evaluation = evaluation_on(use_infinite_eval=False)
    texts = evaluation.generate_until([request(context, {"max_gen_toks": 10}) for context in CONTEXTS[-4:]])
    seen = [encode(context)[-(WINDOW - 10) :] for context in CONTEXTS[-4:]]
    assert texts == [ByteTokenizer().decode(expected_tokens(prompt, 10)) for prompt in seen]
    with pytest.raises(ValueError, match="generates 16 tokens, which leaves no room for prompts in context_length 16"):
        evaluation.generate_until([request("A", {"max_gen_toks": 16})])


def test_requests_with_other_options_get_what_they_ask_for():
    whole = expected_text("e", 12)
    options = [
        {"max_gen_toks": 3},
        {"max_gen_toks": 12, "until": whole[4]},
        {"max_gen_toks": 12, "until": ["nowhere", whole[6], whole[4]]},
        {"max_gen_toks": 12, "until": []},
        {"max_gen_toks": 12, "temperature": 0.7, "do_sample": False},
        {"max_gen_toks": 3},
    ]
    texts = default_evaluation().generate_until([request("e", option) for option in options])
    cut = whole.split(whole[4])[0]
    assert cut
    assert texts == [expected_text("e", 3), cut, cut.split(whole[6])[0], whole, whole, expected_text("e", 3)]


def test_texts_end_with_the_document():
    evaluation = evaluation_on()
    tokens = expected_tokens(encode("e"), 12)
    evaluation.eos_token_id = tokens[5]
    (text,) = evaluation.generate_until([request("e", {"max_gen_toks": 12})])
    assert text == ByteTokenizer().decode(tokens[: tokens.index(tokens[5])])


def test_a_temperature_draws_tokens_that_depend_on_the_seed(monkeypatch):
    evaluation = default_evaluation()
    warm = [request("e", {"max_gen_toks": 12, "temperature": 2.0})] * (ROWS + 2)
    texts = evaluation.generate_until(warm)
    assert len(set(texts)) == len(texts)
    assert evaluation.generate_until(warm) == texts
    monkeypatch.setattr(evaluation.trainer.trainer_config, "seed_eval", 5)
    assert not set(evaluation.generate_until(warm)) & set(texts)
    cold = request("e", {"max_gen_toks": 12, "temperature": 1e-6, "do_sample": True})
    assert evaluation.generate_until([cold]) == [expected_text("e", 12)]


def test_options_that_sampling_does_not_know_are_named(caplog):
    options = {"max_gen_toks": 12, "top_p": 0.9, "top_k": 3}
    with caplog.at_level(logging.WARNING, "xlstm_jax"):
        default_evaluation().generate_until([request("e", options)])
        assert caplog.text == ""
        default_evaluation().generate_until([request("e", options | {"temperature": 2.0})])
    assert "leaves out top_k, top_p" in caplog.text


def test_two_processes_have_the_same_answers_as_one(tmp_path):
    codes, output = run_two(pathlib.Path(__file__).with_name("one_of_two.py"), str(tmp_path))
    assert codes == [0, 0], output
    for index in range(2):
        answers = json.loads((tmp_path / f"{index}.json").read_text())
        assert_answers(answers["scores"], [expected_answer(*args) for args in REQUESTS])
        assert answers["texts"] == [expected_text(context, 10) for context in CONTEXTS[1:-1]]


def test_modes_can_have_other_names(monkeypatch):
    evaluation = evaluation_on(log_mode="ema_{task}")
    evaluation.run_evaluate = lambda: {"tiny_choice": {"acc,none": 0.5}}
    logged = {}
    monkeypatch.setattr(
        evaluation.trainer.logger,
        "log_host_metrics",
        lambda metrics, step, mode: logged.update({mode: (metrics, step)}),
    )
    evaluation.on_validation_epoch_start(1, 30)
    assert logged == {"ema_tiny_choice": ({"acc,none": 0.5}, 30)}


def test_an_evaluation_that_is_never_due_does_not_run_before_tests_either():
    evaluation = evaluation_on(every_n_epochs=-1)
    evaluation.run_evaluate = None
    evaluation.on_validation_epoch_start(1, 30)
    evaluation.on_test_epoch_start(1)


@pytest.mark.parametrize("is_infinite", [True, False])
def test_batches_are_prepared_as_the_config_says(monkeypatch, is_infinite):
    module = sys.modules["xlstm_jax.trainer.eval.lmeval_extended_evaluation"]
    name = "lmeval_preprocessing_pipeline" if is_infinite else "make_grain_llm_iterator"
    load, given = getattr(module, name), {}
    monkeypatch.setattr(module, name, lambda **options: given.update(options) or load(**options | {"worker_count": 0}))
    evaluation = evaluation_on(use_infinite_eval=is_infinite, worker_count=3, worker_buffer_size=2)
    evaluation.loglikelihood([request("ab", "cd")])
    assert (given["worker_count"], given["worker_buffer_size"], given["global_batch_size"]) == (3, 2, ROWS)
    assert (given["padding_multiple"] if is_infinite else given["max_target_length"]) == (
        CHUNK if is_infinite else WINDOW
    )


def test_batches_are_like_those_of_training_by_default():
    trainer = trainer_on()
    config = LMEvalEvaluationConfig(tokenizer_path="byte", evaluation_tasks=["none"])
    assert config.create(trainer).exmp_batch.inputs.shape == trainer.exmp_batch.inputs.shape


def test_the_extra_is_named_where_lm_eval_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'xlstm_jax[eval]'")):
        evaluation_on()


def test_a_tokenizer_without_chat_templates_is_refused():
    with pytest.raises(ValueError, match="'byte' has no chat templates"):
        evaluation_on(apply_chat_template=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation_tasks": []}, "name at least one task"),
        ({"log_mode": "val"}, "needs '{task}' in it"),
        ({"infinite_eval_chunksize": 0}, "infinite_eval_chunksize is 0"),
        ({"context_length": -1}, "context_length is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"main_process_only": True}, "main_process_only"),
    ],
)
def test_configs_that_cannot_be_right_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LMEvalEvaluationConfig(**{"tokenizer_path": "byte", "evaluation_tasks": ["none"]} | options)
