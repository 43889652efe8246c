"""Where in a sequence a language model is good, and whether its confidence can be trusted.

    python examples/extended_evaluation.py

A tiny xLSTM learns to predict loaded dice: every sequence is the throws of a die of its own, whose bias can only be
learnt from the throws before. So the loss falls along the sequence, and the best possible loss at each position is
known. The evaluation is a subclass of `ExtendedEvaluation`; it would run as it is on any mesh. On two CPU cores it all
takes half a minute, most of it compilation.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.dataset import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.callbacks.extended_evaluation import ExtendedEvaluation, ExtendedEvaluationConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

NUM_FACES, CONCENTRATION = 12, 0.3
NUM_STEPS, ROWS, LENGTH = 300, 32, 48


@dataclasses.dataclass(kw_only=True)
class CalibrationConfig(ExtendedEvaluationConfig):
    """How finely confidences are told apart."""

    num_bins: int = 5

    def create(self, trainer, data_module=None):
        """Build the callback."""
        return Calibration(self, trainer, data_module)


class Calibration(ExtendedEvaluation):
    """Reports the mean loss at each position, and how often predictions of each confidence are right."""

    def eval_function(self, params, apply_fn, batch, rng):
        """Compute the sums and counts of this device's rows."""
        del rng  # nothing is drawn
        logits = apply_fn(
            {"params": params},
            batch.inputs,
            pos_idx=batch.inputs_position,
            document_borders=batch.get_document_borders(),
            train=False,
        )
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        losses = -jnp.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
        confidence = jnp.exp(jnp.max(log_probs, axis=-1))
        is_hit = jnp.argmax(log_probs, axis=-1) == batch.targets

        is_target = batch.targets_segmentation != 0
        bins = jnp.arange(self.config.num_bins)
        bin_of_target = jnp.minimum((confidence * len(bins)).astype(int), bins[-1])
        is_in_bin = (bin_of_target[..., None] == bins) & is_target[..., None]
        in_bin = is_in_bin.sum((0, 1))
        metrics = {
            "loss_at": {"value": (losses * is_target).sum(0), "count": is_target.sum(0)},
            "confidence": {"value": (confidence[..., None] * is_in_bin).sum((0, 1)), "count": in_bin},
            "accuracy": {"value": (is_hit[..., None] & is_in_bin).sum((0, 1)), "count": in_bin},
            "share": {"value": in_bin, "count": jnp.full_like(in_bin, is_target.sum())},
        }
        return metrics, None

    def finalize_metrics(self, aggregated_metrics):
        """Add the expected calibration error: the mean distance between confidence and accuracy."""
        metrics = super().finalize_metrics(aggregated_metrics)
        gaps = np.abs(metrics["accuracy"] - metrics["confidence"])
        return metrics | {"calibration_error": float(np.sum(metrics["share"] * gaps))}


def throw_dice(seed: int) -> LLMBatch:
    """Throw one die for each row; the faces are the tokens from 1 on."""
    generator = np.random.default_rng(seed)
    bias = generator.dirichlet(np.full(NUM_FACES, CONCENTRATION), ROWS)
    throws = (generator.random((ROWS, LENGTH, 1)) > np.cumsum(bias, axis=-1)[:, None, :-1]).sum(-1)
    return LLMBatch.from_inputs((1 + throws).astype(np.int32))


def best_losses(batches: list[LLMBatch]) -> np.ndarray:
    """Compute the loss of who knows how dice are loaded, and counts: Bayes' rule."""
    throws = np.concatenate([batch.targets for batch in batches])
    is_face = np.eye(NUM_FACES)[throws - 1]
    seen = np.cumsum(is_face, axis=1) - is_face + CONCENTRATION
    return -np.log((seen * is_face).sum(-1) / seen.sum(-1)).mean(0)


def main() -> None:
    """Train, and evaluate before and after."""
    parallel = ParallelConfig(data_axis_size=jax.device_count())
    shape = XLSTMConfig(
        vocab_size=1 + NUM_FACES, embedding_dim=32, num_heads=2, num_blocks=1, chunk_size=16, parallel=parallel
    )
    trainer = LLMTrainer(
        LLMTrainerConfig(callbacks=[CalibrationConfig()], logger=None, enable_progress_bar=False),
        ModelConfig(model_class=XLSTM, parallel=parallel, model_config=shape),
        OptimizerConfig(name="adamw", scheduler=SchedulerConfig(name="cosine_decay", lr=1e-2, decay_steps=NUM_STEPS)),
        LLMBatch.get_dtype_struct(ROWS, LENGTH),
    )
    (evaluation,) = trainer.callbacks
    held_out = [throw_dice(seed) for seed in range(8)]
    before = evaluation.eval_model(held_out)
    trainer.train_model([throw_dice(8 + step) for step in range(NUM_STEPS)], num_train_steps=NUM_STEPS)
    after = evaluation.eval_model(held_out)

    print("position   untrained   trained   best possible")
    for position, best in list(enumerate(best_losses(held_out)))[:: LENGTH // 8]:
        print(f"{position:8}{before['loss_at'][position]:12.2f}{after['loss_at'][position]:10.2f}{best:16.2f}")
    print("\nconfidence   accuracy   share of tokens")
    for confidence, accuracy, share in zip(after["confidence"], after["accuracy"], after["share"], strict=True):
        if share > 0:
            print(f"{confidence:10.2f}{accuracy:11.2f}{100 * share:15.0f} %")
    errors = (metrics["calibration_error"] for metrics in (before, after))
    print("\nexpected calibration error: {:.3f} untrained, {:.3f} trained".format(*errors))


if __name__ == "__main__":
    main()
