"""Local batches become global ones, and an iterator goes on where it stopped."""

import json
import time

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.checkpoint.loaders import gather_states, own_states
from xlstm_jax.dataset import LLMBatch
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator, get_next_batch_sharded

SERIAL = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def rows(index):
    return {"x": np.full((4, 2), index)}


class Endless:
    """Counts its batches without end, and knows where it is."""

    def __init__(self, encode=dict, decode=dict):
        self.encode, self.decode = encode, decode

    def __iter__(self):
        return EndlessIterator(self)


class EndlessIterator:
    """Stands at an index; the loader says how its state looks."""

    def __init__(self, loader):
        self.loader, self.index = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.index += 1
        return rows(self.index - 1)

    def get_state(self):
        return self.loader.encode({"index": self.index})

    def set_state(self, state):
        self.index = self.loader.decode(state)["index"]


def to_bytes(state):
    return b"\xff" + json.dumps(state).encode()


def from_bytes(state):
    return json.loads(state[1:])


def grain_rows(count=None):
    return grain.MapDataset.range(10).seed(1).shuffle().repeat(count).map(rows).to_iter_dataset(SERIAL)


LOADERS = {
    "dictionaries": lambda: Endless(),
    "bytes": lambda: Endless(to_bytes, from_bytes),
    "grain": grain_rows,
    "list": lambda: [rows(index) for index in range(50)],
    "one-shot": lambda: EndlessIterator(Endless(to_bytes, from_bytes)),
}


def make_iterator(loader, **options):
    return MultiHostDataLoadIterator(loader, make_mesh(dp=2, tp=2), **options)


def indices(batches):
    return [int(np.asarray(batch["x"])[0, 0]) for batch in batches]


def test_rows_are_split_over_all_devices_in_their_order():
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
    iterator = make_iterator([LLMBatch.from_inputs(tokens)])
    batch = next(iterator)
    assert type(batch) is LLMBatch
    np.testing.assert_array_equal(batch.targets, tokens)
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding.spec == P(iterator.global_mesh.axis_names)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 3)}
    for shard, device in zip(batch.targets.addressable_shards, iterator.global_mesh.devices.flat, strict=True):
        assert shard.device == device
        np.testing.assert_array_equal(shard.data, tokens[shard.index])


@pytest.mark.parametrize("array", [np.zeros((6, 2)), np.zeros(())], ids=["six rows", "no rows"])
def test_rows_that_do_not_split_are_refused_by_name(array):
    with pytest.raises(ValueError, match=r"array \['x'\] .* multiple of the 4 devices"):
        next(make_iterator([{"x": array}]))


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_has_its_length_and_the_next_one_goes_on(loader):
    iterator = make_iterator(LOADERS[loader](), iterator_length=3)
    assert len(iterator) == 3
    order = indices(iterator) + indices(iterator)
    if loader == "grain":
        assert order == indices(batch for _, batch in zip(range(6), grain_rows(), strict=False))
    else:
        assert order == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("loader", LOADERS)
def test_after_a_reset_every_epoch_is_the_same(loader):
    iterator = make_iterator(LOADERS[loader](), iterator_length=3, reset_after_epoch=True)
    first = indices(iterator)
    next(iter(iterator))
    assert indices(iterator) == first


@pytest.mark.parametrize("loader", LOADERS)
def test_reset_goes_back_to_the_first_batch(loader):
    iterator = make_iterator(LOADERS[loader](), iterator_length=3)
    first = indices(iterator)
    iterator.reset()
    assert iterator.get_state()["step"] == 0
    assert indices(iterator) == first


def test_without_a_length_an_epoch_is_what_the_loader_has():
    iterator = make_iterator([rows(0), rows(1)], reset_after_epoch=True)
    assert [indices(iterator) for _ in range(2)] == [[0, 1], [0, 1]]
    with pytest.raises(TypeError, match="has no length"):
        len(iterator)


@pytest.mark.parametrize(("bound", "expected"), [(2, [0, 1]), (9, [0, 1, 2])])
def test_an_upper_bound_ends_an_epoch_but_is_not_its_length(bound, expected):
    loader = [rows(index) for index in range(3)]
    iterator = make_iterator(loader, iterator_length=bound, length_is_upper_bound=True)
    with pytest.raises(TypeError, match="has no length"):
        len(iterator)
    assert indices(iterator) == expected


@settings(deadline=None, max_examples=30)
@given(
    loader=st.sampled_from(sorted(LOADERS)),
    length=st.integers(1, 5),
    stop=st.integers(0, 11),
    reset=st.booleans(),
    prefetch=st.integers(0, 3),
)
def test_a_restored_iterator_goes_on_with_exactly_the_next_batch(loader, length, stop, reset, prefetch):
    def epochs(iterator):
        while True:
            yield from indices(iterator)

    def take(iterator, count):
        return [index for _, index in zip(range(count), epochs(iterator), strict=False)]

    def draw(iterator, count):
        """Draw batches as a trainer does: one at a time, epoch after epoch."""
        for step in range(count):
            batches = iter(iterator) if step % length == 0 else iterator
            yield int(np.asarray(next(batches)["x"])[0, 0])

    options = {"iterator_length": length, "reset_after_epoch": reset}
    whole = take(make_iterator(LOADERS[loader](), **options), stop + 6)
    first, second = (make_iterator(LOADERS[loader](), **options, prefetch=prefetch) for _ in range(2))
    assert list(draw(first, stop)) == whole[:stop]
    state = first.get_state()
    assert set(state) == {"step", "iterator_length", "iterator"}
    second.set_state(json.loads(json.dumps(state)))
    assert second.get_state() == state
    assert take(second, 6) == whole[stop:]


def test_prefetching_goes_on_over_the_ends_of_a_loader():
    iterator = make_iterator([rows(0), rows(1)], reset_after_epoch=True, prefetch=3)
    assert [indices(iterator) for _ in range(3)] == [[0, 1]] * 3


def test_where_prefetching_fails_the_iterator_stays_after_the_last_batch_and_can_go_on():
    class Flaky(Endless):
        is_broken = True

        def __iter__(self):
            return FlakyIterator(self)

    class FlakyIterator(EndlessIterator):
        def __next__(self):
            if self.index == 2 and self.loader.is_broken:
                self.index = 100  # It was in the midst of something.
                raise OSError("the disk is gone")
            return super().__next__()

    loader = Flaky()
    iterator = make_iterator(loader, prefetch=2)
    assert indices([next(iterator), next(iterator)]) == [0, 1]
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(iterator)
        assert iterator.get_state() == state
    loader.is_broken = False
    assert indices([next(iterator)]) == [2]


def test_shapes_that_all_processes_pad_together_are_not_prefetched():
    with pytest.raises(ValueError, match="set prefetch=0"):
        make_iterator(Endless(), pad_shapes=True, prefetch=1)


def test_a_state_goes_through_a_checkpoint():
    first, second = (make_iterator(Endless(to_bytes, from_bytes), iterator_length=4) for _ in range(2))
    next(first)
    second.set_state(own_states(json.loads(json.dumps(gather_states({"train": first}))))["train"])
    assert indices(second) == [1, 2, 3]


def test_an_iterator_can_be_set_back_to_where_it_was():
    iterator = make_iterator(LOADERS["list"](), iterator_length=3)
    next(iter(iterator))
    position = iterator.get_state()
    assert indices(iterator) == [1, 2, 3]
    iterator.set_state(position)
    assert indices(iterator) == [1, 2]


def test_after_an_epoch_a_restored_iterator_begins_the_next():
    first, second = (make_iterator(Endless(), iterator_length=2) for _ in range(2))
    assert indices(first) == [0, 1]
    second.set_state(first.get_state())
    assert indices(second) == [2, 3]


def test_without_a_length_too_an_iterator_that_is_set_back_begins_the_next_epoch():
    iterator = make_iterator([rows(0), rows(1)], reset_after_epoch=True)
    assert indices(iterator) == [0, 1]
    iterator.set_state(iterator.get_state())
    assert indices(iterator) == [0, 1]


def test_a_loop_after_a_drawn_batch_is_a_whole_epoch():
    iterator = make_iterator(Endless(), iterator_length=3)
    iterator.set_state({"step": 1, "iterator_length": 3, "iterator": {"index": 1}})
    next(iterator)
    assert indices(iterator) == [2, 3, 4]


def test_a_state_of_other_epochs_is_refused():
    state = make_iterator(Endless(), iterator_length=4).get_state()
    with pytest.raises(ValueError, match="epochs of 4 batches, but here they have 3"):
        make_iterator(Endless(), iterator_length=3).set_state(state)


def test_a_generator_cannot_go_back():
    iterator = make_iterator((rows(index) for index in range(9)), iterator_length=3)
    position = iterator.get_state()
    next(iterator)
    with pytest.raises(ValueError, match="at batch 1 and cannot go back to 0: a generator can be read once"):
        iterator.set_state(position)


def test_a_reset_opens_the_loader_once_an_epoch_and_closes_what_it_leaves():
    opened = []

    class Closable(EndlessIterator):
        is_closed = False

        def close(self):
            self.is_closed = True

    class Loader(Endless):
        def __iter__(self):
            opened.append(Closable(self))
            return opened[-1]

    iterator = make_iterator(Loader(), iterator_length=2, reset_after_epoch=True)
    list(iterator)
    assert [each.is_closed for each in opened] == [False]
    list(iterator)
    assert [each.is_closed for each in opened] == [True, False]


def test_arrays_are_padded_to_the_largest_shape_of_all_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, [8, 4, 3, 5]]))
    batch = {"a": np.ones((4, 3), np.int32), "b": np.ones((4, 5), np.float32)}
    padded = get_next_batch_sharded(iter([batch]), make_mesh(dp=2), pad=True, pad_value=-7)
    expected = np.full((8, 4), -7)
    expected[:4, :3] = 1
    np.testing.assert_array_equal(padded["a"], expected)
    np.testing.assert_array_equal(padded["b"], np.ones((4, 5)))
    assert padded["a"].dtype == np.int32


def test_arrays_are_padded_only_where_asked(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert next(make_iterator([rows(0)]))["x"].shape == (4, 2)


def test_a_loader_that_ends_with_an_epoch_makes_no_empty_one():
    class Passes(EndlessIterator):
        """Stops after every four batches, and goes on if it is asked again."""

        has_stopped = True

        def __next__(self):
            if self.index % 4 == 0 and not self.has_stopped:
                self.has_stopped = True
                raise StopIteration
            self.has_stopped = False
            return super().__next__()

        def get_state(self):
            return [self.index, self.has_stopped]

        def set_state(self, state):
            self.index, self.has_stopped = state

    for prefetch in (0, 2):
        iterator = make_iterator(Passes(Endless()), iterator_length=4, prefetch=prefetch)
        assert [len(indices(iterator)) for _ in range(3)] == [4, 4, 4]


def test_shutting_an_iterator_down_shuts_its_loader_down_and_leaving_a_generator_does_not():
    class Stoppable(Endless):
        is_down = False

        def shut_down(self):
            self.is_down = True

    def generate(iterator):
        yield from iterator

    loader = Stoppable()
    iterator = make_iterator(loader, prefetch=1)
    generator = generate(iterator)
    next(generator)
    generator.close()
    assert indices([next(iterator)]) == [1]
    assert not loader.is_down
    iterator.shut_down()
    assert loader.is_down


def test_statistics_are_those_of_the_batches_that_were_returned_not_of_those_prefetched():
    class Counting(EndlessIterator):
        def get_statistics(self):
            return {"drawn": float(self.index)}

    iterator = MultiHostDataLoadIterator(Counting(Endless()), make_mesh(), prefetch=3)
    for count in range(1, 6):
        next(iterator)
        time.sleep(0.02)  # The thread runs ahead.
        assert iterator.get_statistics() == {"drawn": count}
    iterator.set_state(iterator.get_state())
    assert iterator.get_statistics() == {"drawn": 5}
    iterator.shut_down()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_ranges_of_token_ids_are_those_of_the_batch_that_was_returned_last(prefetch):
    batches = [LLMBatch.from_inputs(np.full((4, 2), index)) for index in range(5)]
    iterator = MultiHostDataLoadIterator(batches, make_mesh(), prefetch=prefetch)
    assert iterator.token_ranges == {}
    for index, _ in enumerate(iterator):
        assert iterator.token_ranges == {"inputs": (0, index), "targets": (index, index)}
