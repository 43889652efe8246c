"""Runs to plan."""

import dataclasses

from trainer.runs import ADAMW, PARALLEL

from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.planning.setup import Setup
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig

SHAPE = XLSTMConfig(
    vocab_size=64, embedding_dim=32, num_heads=4, num_blocks=4, chunk_size=8, ffn_dim=64, loss_chunk_size=16
)
LLAMA = LlamaConfig(vocab_size=64, embedding_dim=32, num_blocks=4, head_dim=8, ffn_dim=64, loss_chunk_size=16)


def make_setup(
    *,
    dp=1,
    fsdp=1,
    tp=1,
    fsdp_gather_dtype=None,
    shape=SHAPE,
    remat="none",
    accumulation=1,
    rows=16,
    length=24,
    optimizer=ADAMW,
    **options,
):
    """Describe a run; further options are those of the trainer."""
    parallel = dataclasses.replace(
        PARALLEL,
        data_axis_size=dp,
        fsdp_axis_size=fsdp,
        model_axis_size=tp,
        fsdp_gather_dtype=fsdp_gather_dtype,
    )
    return Setup(
        trainer=LLMTrainerConfig(
            gradient_accumulate_steps=accumulation, gradient_accumulate_scan=accumulation > 1, logger=None, **options
        ),
        model=ModelConfig(
            model_class=LlamaTransformer if isinstance(shape, LlamaConfig) else XLSTM,
            parallel=parallel,
            model_config=dataclasses.replace(shape, remat=remat, parallel=parallel),
        ),
        optimizer=optimizer,
        batch_size=rows,
        context_length=length,
        num_devices=dp * fsdp * tp,
    )
