"""Tokens/s and memory of the training step of PyTorch peers, at the shape of a recipe and on the same random tokens.

    python benchmarks/peers/torch_step.py --experiment xlstm_160m --peer xlstm --batch 16
    python benchmarks/peers/torch_step.py --experiment llama_160m --peer llama-documents --batch 16

| peer | what it is | documents |
|---|---|---|
| xlstm | `xLSTMLarge` of xlstm 2.0.6, mlstm-kernels 2.0.6, `xl_chunk`, chunks of 128, float32 gates | not separated |
| llama | a Llama in plain PyTorch, attention by `scaled_dot_product_attention` with cuDNN | not separated |
| llama-flash | the same with PyTorch's FlashAttention | not separated |
| llama-documents | the same with `flex_attention` and a block mask of the documents of each batch | separated |

All of them: `torch.compile` of model and loss, parameters and fused AdamW in float32, autocast to bfloat16, gradients
clipped to a norm of 1. A batch that does not fit into memory is halved until one fits. Nothing of JAX runs but the
recipe's settings and the draw of tokens, on the CPU.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from xlstm_jax.dataset.synthetic_dataloading import draw_packed_batch
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_config import build_run

PEERS = ("xlstm", "llama", "llama-flash", "llama-documents")
NUM_BATCHES = 4
GIB = 2**30
Inputs = dict[str, Tensor]


def with_wide_gates(_: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give the peer's cell float32 gates: compiling its kernels for bfloat16 ones, Triton 3.6 aborts."""
    return args, inputs | {name: inputs[name].float() for name in ("i", "f")}


class XLSTM(nn.Module):
    """The peer's xLSTM at the shape of a recipe."""

    def __init__(self, config: XLSTMConfig, kernel: str):
        from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

        super().__init__()
        others = {"sequence_kernel": "native_sequence__native", "step_kernel": "native"}
        self.model = xLSTMLarge(
            xLSTMLargeConfig(
                embedding_dim=config.embedding_dim,
                num_heads=config.num_heads,
                num_blocks=config.num_blocks,
                vocab_size=config.vocab_size,
                mode="train",
                chunkwise_kernel=kernel,
                chunk_size=128,
                return_last_states=True,
                **({} if torch.cuda.is_available() else others),
            )
        )
        for block in self.model.backbone.blocks:
            block.mlstm_layer.mlstm_backend.register_forward_pre_hook(with_wide_gates, with_kwargs=True)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits."""
        logits = self.model(inputs["inputs"])
        return logits[0] if isinstance(logits, tuple) else logits


class RMSNorm(nn.Module):
    """A norm that computes in float32 and returns the dtype that it was given."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features `[b, h, s, d]` by angles of `[b, 1, s, d / 2]`."""
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward layer, each on a residual branch."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        dim, hidden = config.embedding_dim, config.ffn_hidden_dim
        self.head_dim, self.num_kv_heads = config.head_dim, config.kv_heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim, config.norm_eps), RMSNorm(dim, config.norm_eps)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Transform `[b, s, d]`."""
        normed = self.attention_norm(x)
        q = self.query(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = (
            part.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
            for part in self.key_value(normed).chunk(2, -1)
        )
        attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """A Llama at the shape of a recipe; its residual stream is in bfloat16."""

    def __init__(self, config: LlamaConfig, *, separates_documents: bool):
        super().__init__()
        self.config, self.separates_documents = config, separates_documents
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_blocks))
        self.norm = RMSNorm(config.embedding_dim, config.norm_eps)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)

    def forward(self, inputs: Inputs, mask: Any = None) -> Tensor:
        """Return the logits."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, device=inputs["inputs"].device, dtype=torch.float32) / half
        positions = (
            inputs["positions"]
            if self.separates_documents
            else torch.arange(inputs["inputs"].shape[1], device=exponents.device).expand_as(inputs["inputs"])
        )
        angles = positions[:, None, :, None] * self.config.theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(inputs["inputs"]).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, cos, sin, lambda q, k, v: self.attend(q, k, v, mask))
        return self.head(self.norm(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attend causally, and within documents if they are separated."""
        enable_gqa = q.shape[1] != k.shape[1]
        if self.separates_documents:
            # Compiled for a CPU, PyTorch 2.13 reads fused inputs in a wrong layout; `check_documents` would notice.
            q, k, v = (x.contiguous() for x in (q, k, v))
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=enable_gqa)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)


def document_mask(segments: Tensor, create_block_mask: Callable[..., Any]) -> Any:
    """Return the block mask of causal attention within documents."""

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (query >= key) & (segments[b, query] == segments[b, key])

    batch_size, length = segments.shape
    return create_block_mask(is_visible, batch_size, None, length, length, device=segments.device)


def check_documents(config: LlamaConfig, device: str) -> None:
    """Raise an error if compiled attention within documents differs from a model that gets each document by itself."""
    config = dataclasses.replace(config, num_blocks=1)
    packed = Llama(config, separates_documents=True).to(device)
    alone = Llama(config, separates_documents=False).to(device)
    alone.load_state_dict(packed.state_dict())
    (inputs, *_) = draw_batches(1, 2048, config.vocab_size, device, mean_document_length=300)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        mask = document_mask(inputs["segments"], torch.compile(create_block_mask, dynamic=False))
        (logits,) = torch.compile(packed, dynamic=False)(inputs, mask)
        for segment in inputs["segments"].unique():
            is_inside = inputs["segments"][0] == segment
            (expected,) = alone({"inputs": inputs["inputs"][:, is_inside]})
            difference = (logits[is_inside] - expected).float().norm() / expected.float().norm()
            if not difference < 0.02:
                raise RuntimeError(
                    f"Logits of document {segment} are off by {difference:.1%}: flex_attention is wrong."
                )


def draw_batches(
    batch_size: int, length: int, vocab_size: int, device: str, mean_document_length: int = 1000
) -> list[Inputs]:
    """Draw the tokens that benchmarks of the recipes train on."""
    batches = []
    for index in range(NUM_BATCHES):
        drawn = draw_packed_batch(
            (0, index),
            batch_size=batch_size,
            length=length,
            vocab_size=vocab_size,
            mean_document_length=mean_document_length,
        )
        arrays = {
            "inputs": drawn.inputs,
            "targets": drawn.targets,
            "positions": drawn.inputs_position,
            "segments": drawn.inputs_segmentation,
        }
        batches.append({name: torch.tensor(array, dtype=torch.long, device=device) for name, array in arrays.items()})
    return batches


def build(options: argparse.Namespace, config: Any, device: str) -> nn.Module:
    """Build a peer at the shape of a recipe."""
    if options.peer == "xlstm":
        model: nn.Module = XLSTM(config, options.kernel)
    else:
        model = Llama(config, separates_documents=options.peer == "llama-documents")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return model.to(device)


def attention_backends(peer: str) -> Any:
    """Return the context in which attention takes one implementation."""
    if not torch.cuda.is_available() or peer in ("xlstm", "llama-documents"):
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION if peer == "llama" else SDPBackend.FLASH_ATTENTION])


def measure(options: argparse.Namespace, config: Any, length: int, batch_size: int) -> dict[str, Any]:
    """Train for some steps and time them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    begin = time.perf_counter()
    model = build(options, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = itertools.cycle(draw_batches(batch_size, length, config.vocab_size, device))

    def loss_of(inputs: Inputs, *mask: Any) -> Tensor:
        logits = model(inputs, *mask)
        return functional.cross_entropy(logits.flatten(0, 1).float(), inputs["targets"].flatten())

    compiled, create_mask = loss_of, create_block_mask
    if options.compile:  # Made eagerly, a mask holds all pairs of positions for a while.
        compiled, create_mask = torch.compile(loss_of, dynamic=False), torch.compile(create_block_mask, dynamic=False)

    def step() -> Tensor:
        inputs = next(batches)
        mask = [document_mask(inputs["segments"], create_mask)] if options.peer == "llama-documents" else []
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(inputs, *mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    with attention_backends(options.peer):
        for _ in range(2):
            loss = step()
        synchronize()
        first, seconds = time.perf_counter() - begin, []
        for _ in range(options.groups):
            start = time.perf_counter()
            for _ in range(options.steps):
                loss = step()
            synchronize()
            seconds.append((time.perf_counter() - start) / options.steps)
    if not torch.isfinite(loss):
        raise RuntimeError(f"The loss of {options.peer} is {loss.item()}.")
    step_seconds = statistics.median(seconds)
    return {
        "peer": options.peer,
        "batch": batch_size,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": batch_size * length / step_seconds,
        "step_ms": 1e3 * step_seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0,
        "first_steps_seconds": first,
        "loss": loss.item(),
    }


def measure_largest(options: argparse.Namespace, config: Any, length: int) -> dict[str, Any]:
    """Measure with the batch that was requested, or half of it until it fits."""
    batch_size, too_large = options.batch, []
    while True:
        try:
            return measure(options, config, length, batch_size) | {"out_of_memory": too_large}
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
        too_large.append(batch_size)
        batch_size //= 2
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", required=True, help="the recipe whose shape to take")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the experiment")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, at most")
    parser.add_argument("--kernel", default="chunkwise--triton_xl_chunk", help="the peer's form of the mLSTM")
    parser.add_argument("--eager", dest="compile", action="store_false", help="do not compile")
    parser.add_argument("--groups", type=int, default=5, help="groups of steps that are timed")
    parser.add_argument("--steps", type=int, default=4, help="steps of a group")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    options = parser.parse_intermixed_args()
    run = build_run(compose([f"experiment={options.experiment}", "data=synthetic", *options.overrides]))
    config = run.model.model_config
    if isinstance(config, LlamaConfig) == (options.peer == "xlstm"):
        parser.error(f"experiment={options.experiment} is no {options.peer.partition('-')[0]}")
    torch.set_float32_matmul_precision("high")
    if options.peer == "llama-documents":
        check_documents(config, "cuda" if torch.cuda.is_available() else "cpu")
    row = measure_largest(options, config, run.context_length)
    columns = {
        "peer": row["peer"],
        "batch": row["batch"],
        "parameters": f"{row['parameters']:,}",
        "step, ms": f"{row['step_ms']:.1f}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "peak, GiB": f"{row['peak_gib']:.1f}",
        "first two steps, s": f"{row['first_steps_seconds']:.1f}",
    }
    print(
        f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n| {' | '.join(map(str, columns.values()))} |", flush=True
    )
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
