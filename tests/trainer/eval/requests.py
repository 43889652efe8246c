"""Requests, evaluations of a small model of bytes on several meshes, and their answers from one pass for each."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from trainer.runs import make_trainer, model_config

from xlstm_jax.dataset.tokenizers.light import ByteTokenizer
from xlstm_jax.trainer.eval.lmeval_extended_evaluation import LMEvalEvaluationConfig
from xlstm_jax.utils.partitioned import is_partitioned, unboxed

END = 256
CHUNK, WINDOW, ROWS = 8, 16, 8
MESHES = [{}, {"dp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}]
MODEL = model_config(vocab_size=264)

SENTENCE = "The cat sat on the mat."
REQUESTS = [
    *((SENTENCE[:split], SENTENCE[split:]) for split in (0, 3, 10, 22)),
    *((SENTENCE * 3, end) for end in (" Yes, I saw it.", " No, I did not.")),
    (SENTENCE, SENTENCE + SENTENCE + " Yes, I saw it."),
    ("A", "B"),
    ("", ""),
    (SENTENCE * 3, ""),
]
"""Of three lengths only: each is a program of its own for the single passes."""

CONTEXTS = ["A", *((SENTENCE + SENTENCE)[:length] for length in (38, 46, 35, 44, 31, 41, 24, 27)), ""]
"""More than a batch; those of the first one have chunks in common."""


def request(*args):
    """Ask for something, as lm-eval does."""
    return SimpleNamespace(args=args)


@functools.cache
def trainer_on(**sizes):
    """Build a trainer whose predictions depend on what came before: the weights are larger than at first."""
    trainer = make_trainer(sizes, model=MODEL, logger=None)
    trainer.state = trainer.state.replace(params=jax.tree.map(lambda x: 3 * x, trainer.state.params))
    return trainer


def evaluation_on(sizes=None, **options):
    """Build an evaluation."""
    defaults = {
        "tokenizer_path": "byte",
        "evaluation_tasks": ["none"],
        "infinite_eval_chunksize": CHUNK,
        "context_length": WINDOW,
        "batch_size": ROWS,
    }
    return LMEvalEvaluationConfig(**defaults | options).create(trainer_on(**(sizes or {})))


@functools.cache
def default_evaluation():
    """Build an evaluation that tests share, and with it the programs that it has compiled."""
    return evaluation_on()


@functools.cache
def whole_model():
    """Return the model outside any mesh, as a function from tokens to logits."""
    params = trainer_on().state.params
    params = jax.tree.map(lambda x: jnp.array(unboxed(x)), params, is_leaf=is_partitioned)
    apply = jax.jit(MODEL.model_class(MODEL.model_config).apply)
    return lambda tokens: np.array(apply({"params": params}, jnp.array([tokens])), np.float64)[0]


def log_probabilities(tokens):
    """Compute the log-probabilities of all tokens after each of the given ones, in one pass."""
    logits = whole_model()(tokens)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def expected_answer(context, text, window=None):
    """Compute the log-likelihood of a text, and whether it is the likeliest one, with passes over whole windows."""
    space = len(context) - len(context.rstrip())
    num_targets = len(text.encode()) + space
    tokens = np.array([END, *(context + text).encode()])
    num_inputs = len(tokens) - 1
    window = window or max(num_inputs, 1)
    loglikelihood, is_greedy = 0.0, True
    for begin in range(0, num_inputs, window):
        end = min(begin + window, num_inputs)
        start = max(end - window, 0)
        first = max(begin, num_inputs - num_targets)
        if first < end:
            scores = log_probabilities(tokens[start:end])[first - start :]
            targets = tokens[first + 1 : end + 1]
            loglikelihood += scores[np.arange(len(targets)), targets].sum()
            is_greedy &= bool((scores.argmax(-1) == targets).all())
    return loglikelihood, is_greedy


def encode(context):
    """Return the tokens of a prompt."""
    return [END, *context.encode()]


def expected_tokens(prompt, num_tokens, *, length=96):
    """Continue a prompt with the likeliest tokens; one pass over all tokens so far finds each of them."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        padding = [0] * (length - len(tokens))  # What comes later changes nothing, and one program serves all lengths.
        tokens.append(int(whole_model()([*tokens, *padding])[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def expected_text(context, num_tokens):
    """Continue a context with the text of the likeliest tokens."""
    return ByteTokenizer().decode(expected_tokens(encode(context), num_tokens))
