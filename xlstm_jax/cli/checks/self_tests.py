"""Numerical self-tests of the kernels on this device: each form is compared with a reference.

Forms of the mLSTM and the sLSTM are compared with the token-by-token reference, the reference with single steps, and
attention with an explicit softmax. The comparison covers outputs, final state, gradients of all inputs, and a sequence
processed in two parts with the state passed between them. An error is the largest absolute difference in an array,
relative to the largest magnitude in it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlstm_jax.cli.checks.kernels import KERNELS
from xlstm_jax.cli.checks.section import FAILED, PASSED, Section, first_line
from xlstm_jax.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from xlstm_jax.kernels.slstm import SLSTMState, slstm, slstm_step
from xlstm_jax.models.llama.attention import KVCache, append, cached_attention, empty_cache, multihead_attention
from xlstm_jax.models.llama.layer import SAMPLE_DTYPE, SAMPLE_HEAD_DIM

Arrays = Mapping[str, Any]
"""Arrays by the names used in the report."""
Run = Callable[[Any, Any], Any]
"""A function from inputs and a state to outputs and the next state."""

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Float32 rounds by 6e-8, which accumulates to 1e-6 here, on CPUs and on an H200; matmuls in TF32, which rounds by
5e-4, give errors of 3e-5 or more and must fail. Bfloat16 rounds by 4e-3; attention in it rounds a few times: 7e-3."""

LAWS = {"attention": "softmax"}
"""The implementation that the backends of a kernel are compared with, if it is not `reference`."""

IN_PARTS = "outputs in two parts"
BATCH, LENGTH, HEADS, QK_DIM, V_DIM, CHUNK_SIZE = 2, 88, 2, 64, 64, 32
IN_HALF = ("cudnn", "mosaic")
"""The backends that compute in bfloat16; their inputs are rounded to bfloat16 for all other backends too."""
PARTS = slice(0, 44), slice(44, LENGTH)
"""Parts of equal length, so that one compilation serves both; neither ends at a chunk boundary."""


def check_numbers(title: str) -> Section:
    """Test every form that can run, on one device of each kind."""
    section = Section(title, ("kernel", "backend", "device", "largest relative error", "limit", "in"))
    kinds = {device.device_kind: device for device in reversed(jax.local_devices())}
    for device in kinds.values():
        # By default, GPUs and TPUs multiply float32 at reduced precision, whose error could hide a wrong sum.
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            for kernel in KERNELS:
                measure = functools.cache(MEASURES[kernel.name])
                law = LAWS.get(kernel.name, "reference")
                for backend in kernel.backends:
                    if kernel.obstacle(backend) is None:
                        result, limit, place = _verdict(measure, backend, law)
                        section.add(kernel.name, backend, str(device), result, limit, place)
                        if result.startswith(FAILED):
                            told = f"{result.removeprefix(FAILED)}, limit {limit}, in {place}"
                            section.problems.append(f"{kernel.name} {backend} on {device}:{told}")
    return section


def _verdict(measure: Callable[[str], Arrays], backend: str, law: str = "reference") -> tuple[str, ...]:
    """Return the largest error, its limit and the array it occurs in; or the exception that was raised."""
    limit = LIMITS[SAMPLE_DTYPE.name if backend in IN_HALF else "float32"]
    try:
        actual, expected = measure(backend), dict(measure("steps" if backend == law else law))
        if IN_PARTS in actual:
            expected[IN_PARTS] = expected["outputs"]
        errors = {name: _relative_error(actual[name], expected[name]) for name in expected}
    except Exception as error:
        return f"{FAILED} {first_line(error)}", f"{limit:.0e}", "-"
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return f"{PASSED if errors[worst] <= limit else FAILED} {errors[worst]:.0e}", f"{limit:.0e}", worst


def _relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def _measure_mlstm(backend: str) -> Arrays:
    """Return all results of `backend` for random inputs; `steps` processes single tokens."""
    generator, heads = np.random.default_rng(0), (BATCH, LENGTH, HEADS)
    # The mean of queries and keys is 1, so that most dot products are positive: with mixed signs, some denominators
    # would be small differences of large numbers, which each form rounds differently.
    inputs = {name: generator.normal(1, 1, (*heads, QK_DIM)) for name in ("q", "k")}
    inputs |= {"v": generator.normal(size=(*heads, V_DIM))}
    inputs |= {"igate": generator.uniform(-4, 4, heads), "fgate": generator.uniform(4, 8, heads)}
    shapes = (BATCH, HEADS, QK_DIM, V_DIM), (BATCH, HEADS, QK_DIM), (BATCH, HEADS)
    memory, normalizer, stabilizer = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes)
    state = MLSTMState(memory, normalizer, stabilizer)

    def run(inputs: Arrays, state: MLSTMState) -> Any:
        form: Any = backend
        inputs = _in_half(inputs, "qkv") if backend in IN_HALF else inputs
        return mlstm(**inputs, state=state, return_state=True, chunk_size=CHUNK_SIZE, backend=form)

    def step(inputs: Arrays, state: MLSTMState) -> Any:
        return mlstm_step(**inputs, state=state)

    return _measure_recurrence(backend, run, step, _rounded(inputs, "qkv"), state)


def _measure_slstm(backend: str) -> Arrays:
    """Return all results of `backend` for random inputs; `steps` processes single tokens."""
    generator, heads = np.random.default_rng(0), (BATCH, LENGTH, HEADS, QK_DIM)
    ranges = ((-4, 4), (4, 8), (-2, 2), (-2, 2))  # i, f, z, o
    gates = np.stack([generator.uniform(*ends, heads) for ends in ranges], axis=2)
    inputs = {"gates": gates, "recurrent": generator.normal(size=(HEADS, QK_DIM, 4, QK_DIM)) * QK_DIM**-0.5}
    hidden, cell, stabilizer = jnp.asarray(generator.uniform(-1, 1, (3, BATCH, HEADS, QK_DIM)), jnp.float32)
    state = SLSTMState(hidden, cell, 1 + jnp.abs(cell), stabilizer)

    def run(inputs: Arrays, state: SLSTMState) -> Any:
        form: Any = backend
        inputs = _in_half(inputs, ["recurrent"]) if backend in IN_HALF else inputs
        return slstm(**inputs, state=state, return_state=True, backend=form)

    def step(inputs: Arrays, state: SLSTMState) -> Any:
        return slstm_step(**inputs, state=state)

    return _measure_recurrence(backend, run, step, _rounded(inputs, ["recurrent"]), state)


def _in_half(inputs: Arrays, names: Iterable[str]) -> dict[str, Any]:
    return {**inputs, **{name: inputs[name].astype(SAMPLE_DTYPE) for name in names}}


def _rounded(inputs: Arrays, names: Iterable[str]) -> Arrays:
    return {name: np.asarray(x, np.float32) for name, x in _in_half(inputs, names).items()}


def _measure_recurrence(backend: str, run: Run, step: Run, inputs: Arrays, state: Any) -> Arrays:
    if backend == "steps":
        return _measure_steps(jax.jit(step), inputs, state)
    results = _measure_sequence(run, inputs, state)
    if backend == "reference":  # It is compared with single steps, which pass the state on at every token.
        return results
    return {**results, IN_PARTS: _in_parts(jax.jit(run), inputs, state)}


def _measure_sequence(run: Run, inputs: Arrays, state: Any) -> Arrays:
    @jax.jit
    def everything(inputs: Arrays, state: Any) -> Arrays:
        def loss(inputs: Arrays, state: Any) -> Any:
            hidden, last = run(inputs, state)
            results = {"outputs": hidden, **_true_memory(last)}
            return _project(results), results

        (of_inputs, of_state), results = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, state)
        gradients = of_inputs | {f"state.{name}": x for name, x in _except_units(of_state).items()}
        return results | {f"gradient of {name}": x for name, x in gradients.items()}

    return everything(inputs, state)


def _in_parts(run: Run, inputs: Arrays, state: Any) -> jax.Array:
    """Return the outputs of a sequence processed in parts, with the state passed from one to the next."""
    outputs = []
    for part in PARTS:
        of_part, state = run(_at(inputs, part), state)
        outputs.append(of_part)
    return jnp.concatenate(outputs, axis=1)


def _measure_steps(step: Run, inputs: Arrays, state: Any) -> Arrays:
    hidden = []
    for position in range(LENGTH):
        of_token, state = step(_at(inputs, position), state)
        hidden.append(of_token)
    return {"outputs": jnp.stack(hidden, axis=1), **_true_memory(state)}


def _at(inputs: Arrays, positions: slice | int) -> Arrays:
    """Slice all inputs that are sequences; a recurrent kernel is not."""
    return {name: x[:, positions] if x.shape[:2] == (BATCH, LENGTH) else x for name, x in inputs.items()}


def _except_units(state: MLSTMState | SLSTMState) -> Arrays:
    return {name: x for name, x in state._asdict().items() if name != "stabilizer"}


def _true_memory(state: MLSTMState | SLSTMState) -> Arrays:
    """Return the memory with the stabilizer's scale undone, as each form may choose its own scale."""
    unit = lax.stop_gradient(jnp.exp(state.stabilizer))
    parts = {name: x for name, x in _except_units(state).items() if name != "hidden"}
    return {f"last {name}": x * unit.reshape(*unit.shape, *[1] * (x.ndim - unit.ndim)) for name, x in parts.items()}


def _project(results: Arrays) -> Any:
    """Return a scalar that depends on every element, with equal weight for every array."""
    total = 0.0
    for x in results.values():
        x = x.astype(jnp.float32)
        weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
        total += jnp.sum(x * weights) / lax.stop_gradient(jnp.max(jnp.abs(x)))
    return total


def _measure_attention(backend: str) -> Arrays:
    """Return all results of `backend` for random inputs, which are rounded to bfloat16 for every backend."""
    generator, dtype = np.random.default_rng(0), SAMPLE_DTYPE if backend in IN_HALF else jnp.float32
    heads = {"q": 2 * HEADS, "k": HEADS, "v": HEADS}
    drawn = {name: generator.normal(size=(BATCH, LENGTH, count, SAMPLE_HEAD_DIM)) for name, count in heads.items()}
    form: Any = backend
    attend: Any = _softmax_attention if backend == "softmax" else functools.partial(multihead_attention, backend=form)
    if backend == "mosaic":  # its kernels need document boundaries
        attend = functools.partial(attend, segment_ids=jnp.zeros((BATCH, LENGTH), int), contiguous_segments=True)

    @jax.jit
    def everything(inputs: Arrays) -> Arrays:
        def loss(inputs: Arrays) -> Any:
            results = {"outputs": attend(**inputs)}
            return _project(results), results

        gradients, results = jax.grad(loss, has_aux=True)(inputs)
        return results | {f"gradient of {name}": x for name, x in gradients.items()}

    @jax.jit
    def attend_to_cache(inputs: Arrays, cache: KVCache) -> tuple[Any, KVCache]:
        positions = cache.next_position[:, None] + jnp.arange(inputs["k"].shape[1])
        cache = append(cache, inputs["k"], inputs["v"], positions)
        return cached_attention(inputs["q"], cache, backend=form), cache

    inputs = {name: jnp.asarray(x, SAMPLE_DTYPE).astype(dtype) for name, x in drawn.items()}
    results = everything(inputs)
    if backend == "softmax":
        return results
    cache = empty_cache(BATCH, LENGTH, HEADS, SAMPLE_HEAD_DIM, dtype)
    return {**results, IN_PARTS: _in_parts(attend_to_cache, inputs, cache)}


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1), v)


MEASURES = {"mLSTM": _measure_mlstm, "sLSTM": _measure_slstm, "attention": _measure_attention}
