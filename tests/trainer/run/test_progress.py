"""The progress of a run survives a checkpoint, also one that an older version wrote."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import freeze

from xlstm_jax.trainer.run.progress import Progress

OLDER = """{
    "tokens_seen": 640, "clock": "3f2a", "seconds": {"step": 2.5}, "num_drawn": 6, "num_epochs_finished": 2,
    "train_metrics": {"loss": {"mean": {"value": 3.5, "count": 12}}}, "skipped_batches": [5], "num_rollbacks": 1
}"""
"""What a run stored before the validated step was added."""


def test_all_fields_come_back_from_a_checkpoint():
    metrics = freeze({"loss": {"mean": {"value": jnp.float32(3.5), "count": jnp.arange(2)}}})
    saved = Progress(
        step=7,
        num_drawn=9,
        num_epochs_finished=2,
        tokens_seen=640,
        train_metrics=metrics,
        skipped_batches={5, 3},
        num_rollbacks=1,
        validated_step=6,
    )
    restored = Progress()
    restored.restore(json.loads(json.dumps(saved.to_document())), step=7)
    jax.tree.map(np.testing.assert_array_equal, restored.train_metrics, metrics.unfreeze())
    restored.train_metrics = saved.train_metrics
    assert restored == saved


def test_a_checkpoint_of_an_older_version_is_restored():
    progress = Progress(validated_step=3)
    progress.restore(json.loads(OLDER), step=5)
    assert (progress.step, progress.num_drawn, progress.num_epochs_finished) == (5, 6, 2)
    assert (progress.tokens_seen, progress.skipped_batches, progress.num_rollbacks) == (640, {5}, 1)
    assert progress.train_metrics["loss"]["mean"]["value"] == 3.5
    assert progress.validated_step is None


def test_a_state_without_progress_counts_one_batch_per_step():
    progress = Progress(tokens_seen=3, skipped_batches={2}, train_metrics=freeze({}))
    progress.restore({}, step=4)
    assert progress == Progress(step=4, num_drawn=4)
