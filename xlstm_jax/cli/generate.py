"""Generate text from a trained model."""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from xlstm_jax.cli.shared.run_folders import RUN_HELP, add_outputs, checkpoint_step, find_run
from xlstm_jax.cli.shared.screen import describe_error, print_error, print_out
from xlstm_jax.configs import ConfigError, check_seed

BEST = "best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_folder", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "-p", "--prompt", action="append", default=[], help="the text to continue; may be repeated; by default, stdin"
    )
    parser.add_argument("-n", "--num-tokens", type=int, default=256, help="the maximum number of tokens to generate")
    parser.add_argument("-t", "--temperature", type=float, default=0.8, help="the temperature of sampling; 0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens with total probability P"
    )
    parser.add_argument("--seed", type=int, default=0, help="the random seed of sampling")
    parser.add_argument("--tokenizer", metavar="PATH", help="the tokenizer; by default, that of the run")
    parser.add_argument(
        "--step", type=_step_or_best, default=-1, metavar="N|best", help="the checkpoint; by default, the newest"
    )
    add_outputs(parser)


def _step_or_best(text: str) -> int | str:
    return text if text == BEST else checkpoint_step(text)


def run(args: argparse.Namespace) -> int:
    """Continue each prompt and print the texts."""
    try:
        _check(args)
        prompts = args.prompt or [sys.stdin.read()]
        folder = find_run(args.run_folder, args.outputs)
        texts = continue_texts(
            folder,
            prompts,
            tokenizer_path=args.tokenizer,
            num_tokens=args.num_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            step=args.step,
        )
    except ConfigError as error:
        print_error(str(error))
        return 2
    except (ImportError, OSError, ValueError) as error:
        print_error(describe_error(error))
        return 1
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if len(prompts) > 1:
            print_out(f"--- {index + 1} of {len(prompts)}")
        print_out(prompt + text)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Reject invalid sampling options before anything is loaded."""
    rules = {
        "--num-tokens": (args.num_tokens, args.num_tokens >= 1, "at least 1"),
        "--temperature": (args.temperature, args.temperature >= 0, "at least 0"),
        "--top-k": (args.top_k, args.top_k is None or args.top_k >= 1, "at least 1"),
        "--top-p": (args.top_p, args.top_p is None or 0 < args.top_p <= 1, "above 0 and at most 1"),
    }
    for name, (value, is_right, rule) in rules.items():
        if not is_right:
            raise ConfigError(f"{name} is {value}, but must be {rule}.")
    check_seed("--seed", args.seed)


def continue_texts(
    folder: Path,
    prompts: list[str],
    *,
    tokenizer_path: str | None = None,
    num_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int | str = -1,
) -> list[str]:
    """Return the continuations that a checkpoint of a run generates, one prompt at a time, on one device.

    Args:
        folder: The folder of the run.
        prompts: The texts to continue.
        tokenizer_path: The tokenizer; `None` for that of the run.
        num_tokens: The maximum number of tokens to generate per prompt.
        temperature: The temperature of sampling; 0 is greedy.
        top_k: Sample from this many likeliest tokens only.
        top_p: Sample from the likeliest tokens with this total probability.
        seed: The random seed of sampling.
        step: The step of the checkpoint, or "best"; negative for the newest valid one.

    Returns:
        The continuation of each prompt, without the prompt.

    Raises:
        ConfigError: The tokenizer differs from that of the run, or has more token ids than the model.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from xlstm_jax.dataset.tokenizers.vocabulary import check_vocabularies
    from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
    from xlstm_jax.inference.sampling import filtered_sampling
    from xlstm_jax.recipes.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
    vocabulary = _vocabulary_of(folder, tokenizer_path)
    tokenizer = vocabulary.load_tokenizer()
    end = tokenizer.eos_token_id
    rows = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    if any(not row for row in rows) and end is None:
        raise ValueError("A prompt is empty, and the tokenizer has no end token to start from: give a text.")
    rows = [row or [end] for row in rows]
    one_device = initialize_mesh(ParallelConfig(data_axis_size=1), np.array(jax.local_devices()[:1]))
    trainer: Any = _trainer_without_initialization().load_from_checkpoint(
        folder, batch_size=1, mesh=one_device, step_idx=-1 if step == BEST else step, load_best=step == BEST
    )
    check_vocabularies(trainer.token_check.num_ids, {"The tokenizer": vocabulary})
    sample = functools.partial(filtered_sampling, temperature=temperature, top_k=top_k, top_p=top_p)
    texts = []
    for row in rows:
        generate = trainer.get_generate_fn(
            max_length=len(row) + num_tokens, eod_token_id=-1 if end is None else end, token_sample_fn=sample
        )
        tokens, is_valid = generate(trainer.state, jax.random.key(seed), jnp.asarray([row], jnp.int32))
        written = np.asarray(tokens[0])[np.asarray(is_valid[0])][len(row) :]
        texts.append(tokenizer.decode(written.tolist(), skip_special_tokens=True))
    return texts


def _trainer_without_initialization() -> Any:
    """Return a trainer class that initialises parameters with zeros, as a checkpoint replaces them anyway."""
    import jax
    import jax.numpy as jnp

    from xlstm_jax.trainer.llm.trainer import LLMTrainer

    class ZeroTrainer(LLMTrainer):
        def run_model_init(self, exmp_input: Any, init_rng: jax.Array) -> Any:
            shapes = jax.eval_shape(super().run_model_init, exmp_input, init_rng)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return ZeroTrainer


def _vocabulary_of(folder: Path, tokenizer_path: str | None) -> Any:
    """Return the vocabulary of a tokenizer, after checking it against the vocabulary saved with the run, if any."""
    from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
    from xlstm_jax.dataset.tokenizers.vocabulary import MissingTokenizerError, Vocabulary
    from xlstm_jax.recipes.run_vocabulary import read_vocabulary

    kept = read_vocabulary(folder)
    path = tokenizer_path or _tokenizer_of(folder, kept)
    try:
        vocabulary = Vocabulary.of_tokenizer(TextEncoder(path))
    except MissingTokenizerError as error:
        if Path(path).exists():
            raise
        raise ConfigError(
            f"The tokenizer {path!r} is neither a path (relative to {Path.cwd()}) nor a name on the hub that can "
            "be loaded: give it with --tokenizer, or change to the folder where the run was started."
        ) from error
    if kept is not None:
        kept.check_same_tokens("--tokenizer" if tokenizer_path else "The tokenizer", vocabulary)
    return vocabulary


def _tokenizer_of(folder: Path, kept: Any) -> str:
    """Return the path of a run's tokenizer: from its data settings, or as saved when the run was last started."""
    from xlstm_jax.dataset.sources.vocabulary_lookup import find_vocabulary, is_local
    from xlstm_jax.recipes.compose import resolved
    from xlstm_jax.recipes.data import read_data
    from xlstm_jax.recipes.run import read_settings

    data = read_data(resolved(read_settings(folder)).get("data")).in_folder(folder)
    path, earlier = data.tokenizer_path, kept and kept.encoder and kept.encoder.tokenizer_path
    if path is None and (found := find_vocabulary(data.first)) is not None and found.encoder is not None:
        path = found.encoder.tokenizer_path
    if earlier is not None and (path is None or not is_local(path)):
        return earlier
    if path is None:
        raise ConfigError(f"The data of {folder} names no tokenizer, or it is missing: give one with --tokenizer.")
    return path
