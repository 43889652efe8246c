"""Whole tasks of lm-eval: their metrics are those of independent answers, and they are run as the config says."""

import json
import logging
import math
import random

import numpy as np
import pytest
import yaml
from trainer.eval.requests import (
    CHUNK,
    MODEL,
    SENTENCE,
    WINDOW,
    evaluation_on,
    expected_answer,
    expected_text,
)
from trainer.runs import SizedTokenLoader, make_trainer

from xlstm_jax.dataset.tokenizers.light import ByteTokenizer
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.slow]

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
