"""Loaders that only have a `__next__` are gone through as often as validations and callbacks need."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AXES, make_mesh
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.trainer.callbacks.extended_evaluation import ExtendedEvaluation, ExtendedEvaluationConfig
from xlstm_jax.trainer.data_module import ReplayedIterator, as_replayable


class Counting(ExtendedEvaluation):
    """Counts batches."""

    def eval_function(self, params, apply_fn, batch, rng):
        return {"batches": {"value": 1.0, "count": 1, "log_modes": ["single_noreduce_wcount"]}}, None

    def on_extended_evaluation_end(self, final_metrics):
        self.trainer.counts.append(sum(len(values) for values, _ in final_metrics.values()))


class CountingConfig(ExtendedEvaluationConfig):
    """Makes the evaluation."""

    def create(self, trainer, data_module=None):
        trainer.counts = []
        return Counting(self, trainer, data_module)


def test_every_validation_and_evaluation_sees_all_batches_of_an_iterator():
    results = []
    for wrap in (list, iter):
        trainer = make_regression(callbacks=[CountingConfig()])
        test_loaders = {"a": wrap(draw_batches(3, seed=1)), "b": wrap(draw_batches(1, seed=2))}
        results.append(trainer.train_model(draw_batches(2), wrap(draw_batches(3, seed=1)), test_loaders, num_epochs=2))
        assert trainer.counts == [3, 3, 4]
    for name in ("val_epoch_1", "val_epoch_2", "test"):
        losses = [{key: value for key, value in each[name].items() if "loss" in key} for each in results]
        assert losses[0] == losses[1]


class Restarting:
    """An iterator that starts anew by itself."""

    def __init__(self):
        self.left = []

    def __iter__(self):
        self.left = [1, 2, 3]
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize("make", [lambda: iter([1, 2, 3]), Restarting], ids=["generator", "restarting"])
def test_each_pass_begins_with_the_first_batch_also_after_one_that_was_left(make):
    batches = ReplayedIterator(make())
    assert list(itertools.islice(batches, 1)) == [1]
    assert list(itertools.islice(batches, 2)) == [1, 2]
    for _ in range(3):
        assert list(batches) == [1, 2, 3]


def test_loaders_that_can_be_gone_through_again_are_left_as_they_are():
    class Resumable(Restarting):
        def get_state(self):
            return len(self.left)

        def set_state(self, state):
            pass

    loaders = {"list": [1], "resumable": Resumable(), "none": None}
    assert all(as_replayable(loaders)[name] is loader for name, loader in loaders.items())


def test_batches_on_a_mesh_are_kept_on_the_host_and_come_back_in_their_places():
    sharding = NamedSharding(make_mesh(dp=4, tp=2), P(AXES))
    first = {"x": jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding), "name": "a", "host": np.arange(3)}
    batches = ReplayedIterator(iter([first]))
    assert next(batches) is first
    (again,) = batches
    assert again["x"].sharding == sharding
    np.testing.assert_array_equal(again["x"], np.arange(16.0).reshape(8, 2))
    assert again["name"] == "a"
    np.testing.assert_array_equal(again["host"], np.arange(3))


def test_batches_of_a_loader_that_reuses_its_buffer_are_kept_as_they_were():
    def draw(buffer):
        for index in range(3):
            buffer[:] = index
            yield buffer

    batches = ReplayedIterator(draw(np.zeros(2)))
    assert [batch[0] for batch in batches] == [batch[0] for batch in batches] == [0, 1, 2]


def test_an_iterator_larger_than_the_limit_is_gone_through_once_and_then_refused():
    batches = ReplayedIterator(iter([np.zeros(2**17)] * 3), max_bytes=2**21)
    assert len(list(batches)) == 3
    with pytest.raises(ValueError, match=r"list_iterator.* more than the 2 MiB .*pass a list"):
        list(batches)
