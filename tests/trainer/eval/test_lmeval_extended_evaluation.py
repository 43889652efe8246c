"""Tasks of lm-eval on a model in training: the answers are those of single passes of the model, on every mesh."""

import json
import logging
import math
import pathlib
import random
import re
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("lm_eval")

import yaml
from processes import run_two
from trainer.eval.requests import (
    CHUNK,
    CONTEXTS,
    MESHES,
    MODEL,
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
from trainer.runs import SizedTokenLoader, make_trainer

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig, fuse_document_results
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig

TOLERANCE = {"rtol": 1e-6, "atol": 1e-4}


def assert_answers(answers, expected):
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
    np.testing.assert_allclose([x for x, _ in answers], [x for x, _ in expected], **TOLERANCE)


# Log-likelihoods.


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


# Generation.


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


# Whole tasks.

QUESTIONS = [
    {"question": f"{SENTENCE} {number}?", "choices": [f"yes{number}", f"not{number}", "sure"], "answer": number % 3}
    for number in range(6)
]
PAGES = [{"page": SENTENCE}, {"page": SENTENCE * 3 + " Yes, I saw it."}]
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "tiny_pages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": [], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [{"question": row["question"], "text": expected_text(row["question"], 4)} for row in QUESTIONS]
    texts[0]["text"] = "something else"
    for (name, task), rows in zip(TASKS.items(), (QUESTIONS, PAGES, texts, texts), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))
    group = {"group": "tiny", "task": ["tiny_choice"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Keep data sets and caches of requests in a folder of the test, and the network out of it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "requests"))


def task_evaluation(folder, *names, **options):
    options = {"include_path": folder, "include_defaults": False, "bootstrap_iters": 0} | options
    return evaluation_on(evaluation_tasks=list(names), **options)


@pytest.mark.parametrize("is_infinite", [True, False])
def test_tasks_have_the_metrics_of_independent_answers(tasks, is_infinite):
    window = None if is_infinite else WINDOW
    names = ["tiny_choice", "tiny_pages", "tiny_text"]
    results = task_evaluation(tasks, *names, use_infinite_eval=is_infinite).run_evaluate()
    assert list(results) == names

    scores = [
        [expected_answer(f"Q: {row['question']}\nA:", f" {choice}", window)[0] for choice in row["choices"]]
        for row in QUESTIONS
    ]
    accuracy = np.mean([np.argmax(score) == row["answer"] for score, row in zip(scores, QUESTIONS, strict=True)])
    assert results["tiny_choice"]["acc,none"] == accuracy

    total = sum(expected_answer("", row["page"], window)[0] for row in PAGES)
    num_bytes = sum(len(row["page"]) for row in PAGES)
    np.testing.assert_allclose(results["tiny_pages"]["byte_perplexity,none"], math.exp(-total / num_bytes), rtol=1e-5)
    np.testing.assert_allclose(results["tiny_pages"]["bits_per_byte,none"], -total / num_bytes / math.log(2), rtol=1e-6)

    if is_infinite:
        np.testing.assert_allclose(results["tiny_text"]["exact_match,none"], 5 / 6)


def prompts_of(evaluation):
    """Return the contexts of the requests that tasks make."""
    found = []

    def answer(requests):
        found.extend(request.args[0] for request in requests)
        return [(-1.0, False)] * len(requests)

    evaluation.loglikelihood = answer
    results = evaluation.run_evaluate()
    return found, results


def test_results_are_numbers_and_those_that_do_not_apply_are_nan(tasks):
    _, results = prompts_of(task_evaluation(tasks, "tiny_choice"))
    (result,) = results.values()
    assert result.keys() == {"acc,none", "acc_stderr,none", "sample_len"}
    assert math.isnan(result["acc_stderr,none"])
    assert result["sample_len"] == 6


def test_groups_have_results_too(tasks):
    _, results = prompts_of(task_evaluation(tasks, "tiny"))
    assert results["tiny"]["acc,none"] == results["tiny_choice"]["acc,none"]


def test_a_task_can_be_a_file(tasks):
    evaluation = evaluation_on(evaluation_tasks=[str(tasks / "tiny_choice.yaml")], include_defaults=False)
    _, results = prompts_of(evaluation)
    assert list(results) == ["tiny_choice"]


def test_prompts_are_made_as_the_config_says(tasks):
    plain, _ = prompts_of(task_evaluation(tasks, "tiny_choice"))
    assert len(plain) == 18
    limited, results = prompts_of(task_evaluation(tasks, "tiny_choice", limit_requests=2))
    assert limited == plain[:6]
    assert results["tiny_choice"]["sample_len"] == 2
    instructed, _ = prompts_of(task_evaluation(tasks, "tiny_choice", system_instruction="Be brief. "))
    assert instructed == [f"Be brief. {prompt}" for prompt in plain]
    shown, _ = prompts_of(task_evaluation(tasks, "tiny_choice", num_fewshot=2))
    assert [prompt.count("Q:") for prompt in shown] == [3] * 18


def test_prompts_are_written_with_the_chat_template_that_is_named(tasks, monkeypatch):
    class ChatTokenizer(ByteTokenizer):
        def apply_chat_template(self, chat, *, chat_template, tokenize, add_generation_prompt, continue_final_message):
            assert (tokenize, continue_final_message) == (False, not add_generation_prompt)
            lines = [f"<{turn['role']}>{turn['content']}" for turn in chat]
            return "".join([f"[{chat_template}]", *lines, "<assistant>" * add_generation_prompt])

    monkeypatch.setattr("xlstm_jax.dataset.tokenizers.text_encoder.load_tokenizer", lambda *_, **__: ChatTokenizer())
    for name, shown in ((True, None), ("brief", "brief")):
        options = {"apply_chat_template": name, "system_instruction": "Be kind."}
        (prompt, *_), _ = prompts_of(task_evaluation(tasks, "tiny_choice", **options))
        assert prompt == f"[{shown}]<system>Be kind.<user>Q: {QUESTIONS[0]['question']}\nA:<assistant>"


@pytest.mark.parametrize("is_cached", [True, False])
def test_requests_are_kept_on_disk_if_asked_for(tasks, tmp_path, is_cached):
    prompts_of(task_evaluation(tasks, "tiny_choice", cache_requests=is_cached))
    assert len(list(tmp_path.glob("requests/requests-tiny_choice*"))) == is_cached


def test_standard_errors_and_prompts_are_reported_if_asked_for(tasks, caplog):
    with caplog.at_level(logging.INFO, "lm_eval"):
        _, results = prompts_of(task_evaluation(tasks, "tiny_choice", write_out=True, bootstrap_iters=10))
    assert "context prompt (starting on next line)" in caplog.text
    assert results["tiny_choice"]["acc_stderr,none"] > 0


def test_standard_errors_need_no_further_processes(tasks, monkeypatch):
    monkeypatch.delattr("multiprocessing.Pool")
    _, results = prompts_of(task_evaluation(tasks, "tiny_perplexity", bootstrap_iters=10))
    assert math.isfinite(results["tiny_perplexity"]["perplexity_stderr,none"])


def test_an_evaluation_leaves_the_random_numbers_of_others_alone(tasks):
    evaluation = task_evaluation(tasks, "tiny_choice")
    drawn = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        prompts_of(evaluation)
        drawn.append((random.random(), np.random.random()))  # noqa: NPY002
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_processes_that_lm_eval_gives_no_results_to_have_none(tasks, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert prompts_of(task_evaluation(tasks, "tiny_choice"))[1] == {}


# In a run.


def test_results_of_validations_and_tests_are_logged_under_the_names_of_tasks(tasks, tmp_path, caplog):
    config = LMEvalEvaluationConfig(
        tokenizer_path="byte",
        evaluation_tasks=["tiny_choice", "tiny_pages"],
        include_path=tasks,
        include_defaults=False,
        infinite_eval_chunksize=CHUNK,
        limit_requests=2,
        debug=True,
    )
    logger = LoggerConfig(log_path=tmp_path, log_tools=[FileLoggerConfig()])
    trainer = make_trainer(model=MODEL, logger=logger, callbacks=[config])
    trainer.global_step = 30
    with caplog.at_level(logging.INFO, "xlstm_jax"):
        trainer.callbacks[0].on_validation_epoch_start(epoch_idx=1, step_idx=20)
        trainer.test_model(SizedTokenLoader(trainer.mesh, num_batches=1), apply_callbacks=True)
    assert caplog.text.count("LMEval results: ") == 2
    for task, metric in (("tiny_choice", "acc,none"), ("tiny_pages", "byte_perplexity,none")):
        lines = (tmp_path / f"file_logs/metrics_{task}.jsonl").read_text().splitlines()
        first, second = map(json.loads, lines)
        assert (first["log_step"], second["log_step"]) == (20, 30)
        assert first[metric] == second[metric]


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
