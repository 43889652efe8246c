"""Generation with the model of a train state."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from xlstm_jax.common_types import PyTree, TrainState
from xlstm_jax.distributed.array_utils import fold_rng_over_axis
from xlstm_jax.distributed.data_parallel import gather_params
from xlstm_jax.inference.generate import as_rows, generate
from xlstm_jax.inference.sampling import greedy_sampling, temperature_sampling
from xlstm_jax.trainer.optimizer.schedule_free import get_eval_params
from xlstm_jax.trainer.user_functions import init_model_state, model_takes

__all__ = ["generate_tokens", "greedy_sampling", "temperature_sampling"]


def generate_tokens(
    state: TrainState,
    rng: jax.Array,
    prefix_tokens: jax.Array,
    prefix_mask: jax.Array | None,
    cache: PyTree | None = None,
    max_length: int = 2048,
    eod_token_id: int = -1,
    token_sample_fn: Callable[[jax.Array, jax.Array], jax.Array] = temperature_sampling,
    gather_params_once: bool = False,
    data_axis_name: str = "dp",
    fsdp_axis_name: str = "fsdp",
    param_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Continue sequences of tokens; inside `jax.shard_map`, those of this device.

    Args:
        state: The train state. Its `apply_fn` is that of a model which takes a `state` and has `init_state`. If the
            model also takes `last_only`, only the logits of the last position of a prompt are materialised.
        rng: The random key, replicated.
        prefix_tokens: The prefixes of the sequences, `[batch, length]`, or `[batch]` for one token each.
        prefix_mask: Which tokens of the prefixes are given; the others are generated.
        cache: The state of the model before the first token; empty by default.
        max_length: The length of the sequences.
        eod_token_id: A sequence ends once this token is generated; below 0, none ends early.
        token_sample_fn: Chooses tokens from logits and a key.
        gather_params_once: Whether to all-gather sharded parameters once, not for each token: faster, if they fit in
            memory.
        data_axis_name: The mesh axis over which rows are sharded.
        fsdp_axis_name: The mesh axis over which rows and parameters are sharded.
        param_dtype: The precision of the parameters; their own by default.

    Returns:
        The tokens `[batch, max_length]`, zeros after the end of a sequence, and a mask of the tokens before its end.
    """
    prefix_tokens, prefix_mask = as_rows(prefix_tokens, prefix_mask)
    params = get_eval_params(getattr(state, "opt_state", ()), state.params)
    if param_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    if gather_params_once:
        params = gather_params(params, fsdp_axis_name)
    variables = {"params": params, **(state.mutable_variables or {})}

    only_last = {"last_only": True} if model_takes(state.apply_fn, "last_only") else {}

    def advance(tokens: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        return state.apply_fn(variables, tokens, state=cache, return_state=True, **only_last)

    if cache is None:
        cache = init_model_state(state.apply_fn, variables, prefix_tokens.shape[0])
    axis_names = data_axis_name, fsdp_axis_name
    return generate(
        advance,
        cache,
        fold_rng_over_axis(rng, axis_names),
        prefix_tokens,
        prefix_mask,
        max_length=max_length,
        eod_token_id=eod_token_id,
        token_sample_fn=token_sample_fn,
        axis_names=axis_names,
    )
