"""Compare the lowered programs of all Hopper kernels with those of another commit. Needs jax 0.11, but no GPU.

    python benchmarks/lowered_kernels.py --against REV              # the working tree with a commit
    python benchmarks/lowered_kernels.py --write FOLDER             # keep the programs, to compare with several times
    python benchmarks/lowered_kernels.py --against FOLDER --only mlstm

Restructuring a kernel must not change its program: each is lowered for a Hopper GPU at every tiling, forward and
backward, and printed without source locations. The plain JAX around the kernels is compared as well, with its functions
numbered, since their names may change. Kernels keep their names: profiles and tests count them.
"""

import argparse
import difflib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from golden import ROOT, check_out
from jax.extend.mlir import ir

SHOWN_LINES = 20
"""Lines of the difference of a program that are printed."""
HEAD_DIMS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
NORM_WIDTHS = (64, 128, 192, 384, 640, 768, 1024, 1152, 1280, 2048, 2304, 3072, 4096)
HEAD_NORM_WIDTHS = (64, 128, 192, 256, 512, 1024)


class Case(NamedTuple):
    """A function of the public API, which exists at both commits, and the shapes of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def array(*shape: int, dtype: str = "bfloat16") -> Any:
    """Describe an array: as good as one where a program is only traced."""
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also computes the gradients of all floating-point arguments."""

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

        def of_floats(*floats: jax.Array) -> Any:
            given = iter(floats)
            merged = [next(given) if used else x for used, x in zip(is_float, leaves, strict=True)]
            return function(*jax.tree.unflatten(structure, merged))

        outputs, backward = jax.vjp(of_floats, *itertools.compress(leaves, is_float))
        return outputs, backward(outputs)

    return run


def mlstm_cases() -> Iterator[Case]:
    """Sequences whole, cut into segments and of one chunk, with and without state and documents; single tokens."""
    from xlstm_jax.kernels.mlstm import MLSTMState, mlstm, mlstm_step

    def sequence(return_state: bool) -> Callable[..., Any]:
        def run(q, k, v, igate, fgate, state, resets):
            options = {"state": state, "resets": resets, "return_state": return_state, "backend": "mosaic"}
            return mlstm(q, k, v, igate, fgate, **options)

        return with_gradients(run)

    def state_of(b: int, h: int, qk_dim: int, v_dim: int) -> MLSTMState:
        shapes = (b, h, qk_dim, v_dim), (b, h, qk_dim), (b, h)
        return MLSTMState(*(array(*shape, dtype="float32") for shape in shapes))

    for qk_dim, v_dim in HEAD_DIMS:
        for name, (b, s, h), has_state, has_resets, return_state in (
            ("documents", (2, 1024, 40), True, True, True),
            ("segments", (1, 8192, 2), False, False, True),
            ("document_segments", (1, 8192, 2), False, True, False),
            ("one_chunk", (2, 256, 40), False, False, False),
            ("one_short_chunk", (2, 128, 40), False, True, False),
        ):
            qk, gate = array(b, s, h, qk_dim), array(b, s, h, dtype="float32")
            state = state_of(b, h, qk_dim, v_dim) if has_state else None
            resets = array(b, s, dtype="bool") if has_resets else None
            arguments = qk, qk, array(b, s, h, v_dim), gate, gate, state, resets
            yield Case(f"mlstm/{qk_dim}_{v_dim}_{name}", sequence(return_state), arguments)
    qk, gate = array(1, 200, 2, 48), array(1, 200, 2, dtype="float32")
    yield Case("mlstm/padded", sequence(return_state=False), (qk, qk, array(1, 200, 2, 96), gate, gate, None, None))
    for (qk_dim, v_dim), (b, dtype) in itertools.product(HEAD_DIMS, ((1, "bfloat16"), (64, "float32"))):
        qk, gate = array(b, 8, qk_dim, dtype=dtype), array(b, 8, dtype="float32")
        arguments = qk, qk, array(b, 8, v_dim, dtype=dtype), gate, gate, state_of(b, 8, qk_dim, v_dim)
        yield Case(f"mlstm/{qk_dim}_{v_dim}_step_{dtype}", mlstm_step, arguments)


def slstm_cases() -> Iterator[Case]:
    """All layouts with all options, and the forward pass alone."""
    from xlstm_jax.kernels.slstm import SLSTMState, slstm

    def run(gates, recurrent, state, resets, mask):
        options = {"state": state, "resets": resets, "mask": mask, "backend": "mosaic"}
        return slstm(gates, recurrent, return_state=True, **options)

    for head_dim, dtype in itertools.product((64, 128, 192, 48), ("float32", "bfloat16")):
        inputs = array(9, 5, 4, 2, head_dim, dtype=dtype), array(2, head_dim, 4, head_dim)
        state, flags = SLSTMState(*[array(9, 2, head_dim, dtype="float32")] * 4), array(9, 5, dtype="bool")
        name = f"slstm/{head_dim}_{dtype}"
        yield Case(f"{name}_forward", run, (*inputs, state, None, None))
        for has_resets, has_mask in itertools.product((False, True), repeat=2):
            arguments = *inputs, state, flags if has_resets else None, flags if has_mask else None
            yield Case(f"{name}{'_documents' * has_resets}{'_mask' * has_mask}", with_gradients(run), arguments)


def attention_cases() -> Iterator[Case]:
    """All heads, with and without groups of queries, and rows that do not fill tiles."""
    from xlstm_jax.kernels.attention import document_attention

    def run(q, k, v, segment_ids):
        return document_attention(q, k, v, segment_ids, causal=True, scale=0.1, backend="mosaic")

    for head_dim, kv_heads, length in itertools.product((64, 128), (8, 2), (1024, 1000)):
        q, kv = array(2, length, 8, head_dim), array(2, length, kv_heads, head_dim)
        arguments = q, kv, kv, array(2, length, dtype="int32")
        yield Case(f"attention/{head_dim}_{kv_heads}_{length}", with_gradients(run), arguments)


def norm_cases() -> Iterator[Case]:
    """All widths."""
    from xlstm_jax.kernels.norms import gated_head_norm, rms_norm, rms_norm_with_skip

    for (name, norm), width in itertools.product({"rms": rms_norm, "skip": rms_norm_with_skip}.items(), NORM_WIDTHS):
        run = with_gradients(lambda x, scale, norm=norm: norm(x, scale, eps=1e-6))
        yield Case(f"norms/{name}_{width}", run, (array(65536, width), array(width, dtype="float32")))
    run = with_gradients(lambda hidden, gate, scale: gated_head_norm(hidden, gate, scale, eps=1e-6))
    for width in HEAD_NORM_WIDTHS:
        arguments = array(16384, 3, width), array(16384, 3 * width), array(3 * width, dtype="float32")
        yield Case(f"norms/gated_{width}", run, arguments)


def cross_entropy_cases() -> Iterator[Case]:
    """Several sizes, with a vocabulary that is whole and one that is split, capped and kept logits."""
    from xlstm_jax.kernels.cross_entropy import api

    def losses(cap: float | None, keep_logits: bool) -> Callable[..., Any]:
        def run(x, kernel, targets, dlosses):
            options = {"dtype": jnp.bfloat16, "cap": cap, "tokens_per_chunk": 1024}
            sums, kept = api.vocabulary_sums(x, kernel, targets, keep_logits=keep_logits, **options)
            return sums, api.gradients(x, kernel, targets, sums[0] + jnp.log(sums[1]), dlosses, kept, **options)

        return run

    sizes = (1024, 64, 50304), (1024, 768, 50240), (16384, 4096, 32000)
    for (tokens, features, vocabulary), cap, keeps in itertools.product(sizes, (None, 30.0), (False, True)):
        vectors = array(tokens, dtype="int32"), array(tokens, dtype="float32")
        arguments = array(tokens, features), array(features, vocabulary, dtype="float32"), *vectors
        name = f"cross_entropy/{tokens}_{features}_{vocabulary}{'_capped' * (cap is not None)}{'_kept' * keeps}"
        yield Case(name, losses(cap, keeps), arguments)


def pretend_hopper() -> None:
    """Let the public functions choose kernels for Hopper GPUs on any machine."""
    gpu = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    jax.default_backend = lambda: "gpu"
    jax.devices = lambda *_: [gpu]


def programs(case: Case) -> Iterator[tuple[str, str]]:
    """Lower a case, and return the program around its kernels and each of the kernels, by name."""
    lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("cuda",))
    yield "around_kernels", number_functions(re.sub(r'(kernel_hash|module) = "[^"]*"', r"\1", lowered.as_text()))
    module: Any = lowered.compiler_ir("stablehlo")
    module.context.allow_unregistered_dialects = True
    kernels = list(serialized_kernels(module.operation))
    if not kernels:
        sys.exit(f"{case.name} has no kernel: its function chose plain JAX.")
    for number, serialized in enumerate(kernels):
        kernel: Any = ir.Module.parse(serialized, module.context).operation
        name = ir.StringAttr(kernel.attributes["sym_name"]).value
        yield f"{number}_{name}", kernel.get_asm(enable_debug_info=False)


def number_functions(program: str) -> str:
    """Replace the names of functions by numbers."""
    names = dict.fromkeys(re.findall(r"func\.func \w+ @([\w.]+)", program))
    numbers = {name: str(number) for number, name in enumerate(names)}
    return re.sub(r"@([\w.]+)", lambda match: "@" + numbers.get(match[1], match[1]), program)


def serialized_kernels(operation: Any) -> Iterator[bytes]:
    """Return the kernels within an operation, in their order."""
    attributes = operation.attributes
    is_call = operation.name == "stablehlo.custom_call"
    if is_call and ir.StringAttr(attributes["call_target_name"]).value == "mosaic_gpu_v2":
        yield ir.StringAttr(ir.DictAttr(attributes["mhlo.backend_config"])["module"]).value_bytes
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from serialized_kernels(inner.operation)


def write(folder: Path, only: str) -> None:
    """Write the programs of all cases whose name has a match, with the package that is imported."""
    pretend_hopper()
    makers = mlstm_cases, slstm_cases, attention_cases, norm_cases, cross_entropy_cases
    for case in itertools.chain.from_iterable(maker() for maker in makers):
        if re.search(only, case.name):
            place = folder / case.name
            place.mkdir(parents=True)
            for name, text in programs(case):
                (place / name).write_text(text, encoding="utf-8")


def write_with(package: Path, folder: Path, only: str) -> None:
    """Write the programs of the package in a folder."""
    command = [sys.executable, __file__, "--write", folder, "--only", only]
    if subprocess.run(command, env={**os.environ, "PYTHONPATH": str(package)}).returncode:
        sys.exit(f"Lowering the kernels of the package in {package} failed.")


def read(folder: Path, only: str) -> dict[str, str]:
    """Return the programs of the cases in a folder whose name has a match."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    chosen = [file for file in files if re.search(only, str(file.parent.relative_to(folder)))]
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in chosen}


def compare(ours: dict[str, str], others: dict[str, str]) -> bool:
    """Print where programs differ, and return whether they are the same."""
    differing = [name for name in sorted(ours.keys() | others.keys()) if ours.get(name) != others.get(name)]
    for name in differing:
        if name not in ours or name not in others:
            print(f"{name}: only {'here' if name in ours else 'there'}")
            continue
        print(f"{name}: differs")
        lines = difflib.unified_diff(others[name].splitlines(), ours[name].splitlines(), n=1, lineterm="")
        for line in itertools.islice(lines, SHOWN_LINES):
            print(f"    {line[:200]}")
    print(f"{len(ours)} programs, of which {len(differing)} differ")
    return not differing


def main() -> int:
    """Lower, compare, and return the exit code: 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--against", metavar="REV", help="the commit to compare with, or a folder that --write filled")
    choice.add_argument("--write", metavar="FOLDER", type=Path, help="write the programs to a new folder")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only cases whose name has a match")
    args = parser.parse_args()
    if args.write is not None:
        write(args.write, args.only)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_with(ROOT, folder / "ours", args.only)
        others = Path(args.against)
        if not others.is_dir():
            others = folder / "theirs"
            write_with(check_out(args.against, folder / "package"), others, args.only)
        ours = read(folder / "ours", args.only)
        if not ours:
            sys.exit(f"No case has a match of {args.only!r}.")
        return 0 if compare(ours, read(others, args.only)) else 1


if __name__ == "__main__":
    sys.exit(main())
