"""Documents become rows and batches, each host in an order of its own that can be gone on with at any batch."""

import itertools
import json
import logging
import math

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import make_mesh

from xlstm_jax.dataset import Batch, LLMBatch
from xlstm_jax.dataset.grain_iterator import (
    make_grain_llm_dataset,
    make_grain_llm_iterator,
    make_grain_multihost_iterator,
    shard_grain_dataset,
)

pytestmark = pytest.mark.slow

END = 9


def document(*tokens):
    return {name: np.array(tokens, np.int32) for name in ("inputs", "targets")}


def numbered(count, offset=1):
    """Documents of one token each, by which they are known."""
    return [document(offset + index) for index in range(count)]


def rows_of(documents, *, num_hosts=1, host=0, **options):
    defaults = {"global_batch_size": 2, "max_target_length": 8, "shuffle": False, "data_shuffle_seed": 3}
    options = {**defaults, "num_epochs": 1, "shift_target": False, "eod_token_id": END, **options}
    return make_grain_llm_dataset(host, num_hosts, documents, **options)


def iterator_of(documents, *, num_hosts=1, host=0, **options):
    defaults = {"global_batch_size": 2, "max_target_length": 8, "shuffle": False, "data_shuffle_seed": 3}
    options = {**defaults, "worker_count": 0, "shift_target": False, "eod_token_id": END, **options}
    return make_grain_llm_iterator(host, num_hosts, make_mesh(dp=2), documents, **options)


def stacked(rows):
    rows = list(rows)
    return {name: np.stack([row[name] for row in rows]).tolist() for name in rows[0]}


def first_tokens(rows):
    return [int(row["targets"][0]) for row in rows]


def first_fit(documents, length, num_bins):
    """Pack lists of tokens as the books say: rows are lists of documents."""
    rows = []
    bins = [[] for _ in range(num_bins)]
    for tokens in documents:
        fitting = [row for row in bins if sum(map(len, row)) + len(tokens) <= length]
        if not fitting:
            rows += bins
            bins = [[] for _ in range(num_bins)]
            fitting = bins
        fitting[0].append(tokens)
    return [row for row in rows + bins if row]


def padded(values, length):
    values = list(values)
    return values + [0] * (length - len(values))


GOLDEN = [document(1, 2, 3, END), document(4, 5, END), document(6, 7, END), document(8, END)]


def test_documents_are_packed_as_documented():
    (batch,) = iterator_of(GOLDEN, num_epochs=1, grain_packing=True)
    assert type(batch) is LLMBatch
    assert batch.inputs.tolist() == [[9, 1, 2, 3, 9, 4, 5, 9], [9, 6, 7, 9, 8, 9, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 3, 9, 4, 5, 9, 0], [6, 7, 9, 8, 9, 0, 0, 0]]
    for segmentation in (batch.inputs_segmentation, batch.targets_segmentation):
        assert segmentation.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 0, 0, 0]]
    for position in (batch.inputs_position, batch.targets_position):
        assert position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 1, 0, 0, 0]]
    borders = [[1, 0, 0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1, 0, 0]]
    assert batch.get_document_borders().astype(int).tolist() == borders


def test_documents_are_padded_as_documented():
    batch = next(iterator_of(GOLDEN))
    assert batch.inputs.tolist() == [[9, 1, 2, 3, 9, 0, 0, 0], [9, 4, 5, 9, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 3, 9, 0, 0, 0, 0], [4, 5, 9, 0, 0, 0, 0, 0]]
    for segmentation in (batch.inputs_segmentation, batch.targets_segmentation):
        assert segmentation.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    borders = [[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    assert batch.get_document_borders().astype(int).tolist() == borders


def test_without_packing_a_row_is_segmented_at_the_ends_of_documents_in_it():
    row = stacked(rows_of([document(1, END, 2, 3, END)], max_target_length=6))
    assert row["inputs"] == [[END, 1, END, 2, 3, END]]
    assert row["targets"] == [[1, END, 2, 3, END, 0]]
    assert row["targets_segmentation"] == [[1, 1, 2, 2, 2, 0]]
    assert row["targets_position"][0][:5] == [0, 1, 0, 1, 2]


def test_targets_can_be_shifted_instead_of_inputs():
    row = stacked(rows_of([document(END, 1, 2)], shift_target=True, max_target_length=5))
    assert row["inputs"] == [[END, 1, 2, 0, 0]]
    assert row["targets"] == [[1, 2, 0, 0, 0]]
    assert row["inputs_segmentation"] == [[1, 1, 1, 0, 0]]
    assert row["targets_segmentation"] == [[1, 1, 0, 0, 0]]


@pytest.mark.parametrize("grain_packing", [False, True])
def test_without_a_shift_inputs_are_targets(grain_packing):
    row = stacked(rows_of([document(1, 2, END)], shift=False, max_target_length=4, grain_packing=grain_packing))
    for name in ("inputs", "targets"):
        assert row[name] == [[1, 2, END, 0]]
        assert row[f"{name}_segmentation"] == [[1, 1, 1, 0]]


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=20), num_bins=st.integers(1, 4))
def test_each_document_is_packed_into_the_first_row_that_has_room(lengths, num_bins):
    starts = itertools.accumulate(lengths, initial=10)
    documents = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]
    packed = stacked(
        rows_of(
            [document(*tokens) for tokens in documents],
            max_target_length=7,
            grain_packing=True,
            grain_packing_bin_count=num_bins,
            shift=False,
        )
    )
    rows = first_fit(documents, 7, num_bins)
    assert packed["targets"] == [padded(itertools.chain(*row), 7) for row in rows]
    segments = [[index for index, tokens in enumerate(row, 1) for _ in tokens] for row in rows]
    assert packed["inputs_segmentation"] == [padded(row, 7) for row in segments]
    positions = [[index for tokens in row for index in range(len(tokens))] for row in rows]
    assert packed["targets_position"] == [padded(row, 7) for row in positions]


@pytest.mark.parametrize(("options", "num_bins"), [({}, 3), ({"grain_packing_bin_count": 2}, 2)])
def test_by_default_a_host_fills_as_many_rows_at_a_time_as_it_has_in_a_batch(options, num_bins):
    documents = [[1, 2, 3], [4, 4, 4], [5, 6], [7, 7, 7], [8], [2, 2]]
    rows = rows_of(
        [document(*tokens) for tokens in [*documents, *documents]],
        num_hosts=2,
        global_batch_size=6,
        max_target_length=4,
        grain_packing=True,
        shift=False,
        **options,
    )
    expected = first_fit(documents, 4, num_bins)
    assert expected != first_fit(documents, 4, 5 - num_bins)
    assert stacked(rows)["targets"] == [padded(itertools.chain(*row), 4) for row in expected]


def test_a_document_that_is_longer_than_a_row_is_refused_by_packing():
    rows = rows_of([document(1, 2), document(1, 2, 3, 4, 5)], max_target_length=4, grain_packing=True)
    with pytest.raises(ValueError, match="document of 5 tokens does not fit into a row of max_target_length 4"):
        list(rows)


def test_a_document_that_is_longer_than_a_row_is_a_longer_row_without_packing():
    long = list(range(1, 8))
    (row,) = rows_of([document(*long)], max_target_length=4)
    assert row["targets"].tolist() == long
    assert row["inputs"].tolist() == [END, *long[:-1]]
    assert row["targets_segmentation"].tolist() == [1] * 7


def test_rows_that_come_padded_stay_as_they_are():
    row = {**document(1, END), "inputs_segmentation": np.array([1, 1]), "targets_segmentation": np.array([1, 0])}
    (made,) = rows_of([row], apply_padding=False)
    assert made["inputs"].tolist() == [END, 1]
    assert made["targets_segmentation"].tolist() == [1, 0]


class Add(grain.transforms.Map):
    """Adds to all tokens."""

    def __init__(self, number):
        self.number = number

    def map(self, element):
        return {name: tokens + self.number for name, tokens in element.items()}


class Double(grain.transforms.Map):
    """Doubles all tokens."""

    def map(self, element):
        return {name: tokens * 2 for name, tokens in element.items()}


def test_operations_are_applied_one_after_the_other():
    assert first_tokens(rows_of(numbered(3), operations=[Add(1), Double()])) == [4, 6, 8]


@settings(deadline=None)
@given(length=st.integers(0, 30), count=st.integers(1, 7))
def test_hosts_read_parts_that_lie_one_after_the_other(length, count):
    dataset = grain.MapDataset.range(length)
    parts = [list(shard_grain_dataset(dataset, index, count)) for index in range(count)]
    assert parts == [part.tolist() for part in np.array_split(np.arange(length), count)]


def test_hosts_that_do_not_exist_or_have_no_document_are_refused():
    with pytest.raises(ValueError, match="no host 2 among 2"):
        shard_grain_dataset(grain.MapDataset.range(5), 2, 2)
    with pytest.raises(ValueError, match="2 documents are too few for 3 hosts"):
        rows_of(numbered(2), num_hosts=3)


def test_batches_that_cannot_be_shared_by_all_hosts_are_refused():
    with pytest.raises(ValueError, match="global_batch_size 4 is not a multiple of the 3 hosts"):
        iterator_of(numbered(9), num_hosts=3, global_batch_size=4)


def test_each_host_makes_its_part_of_a_batch():
    batches = [next(iterator_of(numbered(12), num_hosts=2, host=host, global_batch_size=4)) for host in range(2)]
    assert [batch.targets[:, 0].tolist() for batch in batches] == [[1, 2], [7, 8]]


def test_every_epoch_is_another_permutation_of_the_documents_of_a_host():
    tokens = first_tokens(rows_of(numbered(21), num_hosts=2, shuffle=True, num_epochs=3))
    epochs = [tokens[start : start + 11] for start in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tokens == first_tokens(rows_of(numbered(21), num_hosts=2, shuffle=True, num_epochs=3))


@pytest.mark.parametrize("grain_packing", [False, True])
def test_the_order_of_a_host_is_that_of_the_sum_of_its_index_and_the_seed(grain_packing):
    options = {"shuffle": True, "grain_packing": grain_packing, "max_target_length": 2, "grain_packing_bin_count": 3}
    second = stacked(rows_of(numbered(20), num_hosts=2, host=1, data_shuffle_seed=5, **options))
    alone = stacked(rows_of(numbered(20)[10:], data_shuffle_seed=6, **options))
    other = stacked(rows_of(numbered(20)[10:], data_shuffle_seed=5, **options))
    assert second == alone != other


def test_without_a_number_of_epochs_rows_never_end():
    rows = rows_of(numbered(3), num_epochs=None)
    assert first_tokens(itertools.islice(rows, 10)) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(
    ("lengths", "weights"),
    [(10, None), ([10], [3.0]), ([10, 7], None), ([10, 7], [0.5, 0.1]), ([3, 6, 9], [1.0, 2.0, 3.0])],
)
def test_an_epoch_ends_when_the_data_set_that_lasts_longest_has_been_read(lengths, weights, drop_remainder):
    per_set = [lengths] if isinstance(lengths, int) else lengths
    shares = np.array(weights or [1] * len(per_set)) / sum(weights or [1] * len(per_set))
    num_rows = max(int(round(length / share, 6)) for length, share in zip(per_set, shares, strict=True))
    rows = rows_of(numbered(5), num_epochs=None)
    iterator = make_grain_multihost_iterator(
        rows if isinstance(lengths, int) else [rows] * len(lengths),
        lengths,
        make_mesh(dp=2),
        global_batch_size=4,
        dataloading_host_count=1,
        dataset_weights=weights,
        worker_count=0,
        drop_remainder=drop_remainder,
    )
    assert len(iterator) == (num_rows // 4 if drop_remainder else math.ceil(num_rows / 4))
    assert len(list(iterator)) == len(iterator)
    assert iterator.dataset_size == num_rows


def test_an_epoch_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="no batch: 3 rows are fewer than global_batch_size 4"):
        iterator_of(numbered(3), global_batch_size=4)
    assert len(iterator_of(numbered(3), global_batch_size=4, drop_remainder=False)) == 1


def mixed(packed_sets, weights, lengths=None):
    return make_grain_multihost_iterator(
        packed_sets,
        lengths or [12] * len(packed_sets),
        make_mesh(dp=2),
        global_batch_size=2,
        dataloading_host_count=1,
        dataset_weights=weights,
        worker_count=0,
    )


def test_rows_are_mixed_by_weight_after_they_are_packed():
    options = {"grain_packing": True, "max_target_length": 3, "num_epochs": None, "shift": False}
    small, large = rows_of(numbered(12), **options), rows_of(numbered(12, offset=100), **options)
    rows = np.concatenate([batch.targets for batch in mixed([small, large], [0.75, 0.25])])
    is_large = rows >= 100
    assert (is_large.all(axis=1) | ~is_large.any(axis=1)).all()
    assert is_large[:, 0].sum() == len(rows) / 4
    assert rows[~is_large[:, 0]][:4].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def test_data_sets_without_a_length_or_a_positive_weight_are_refused():
    rows = rows_of(numbered(2))
    with pytest.raises(ValueError, match="2 data sets come with 1 lengths and 2 weights"):
        mixed([rows, rows], None, lengths=[12])
    with pytest.raises(ValueError, match="2 data sets come with 2 lengths and 1 weights"):
        mixed([rows, rows], [1.0])
    with pytest.raises(ValueError, match=r"dataset_weights are \[1.0, 0.0\], but must be positive"):
        mixed([rows, rows], [1.0, 0.0])


def test_a_batch_is_of_the_class_that_is_asked_for():
    rows = grain.MapDataset.source(numbered(4)).to_iter_dataset()
    batch = next(
        make_grain_multihost_iterator(
            rows, 4, make_mesh(dp=2), 2, dataloading_host_count=1, worker_count=0, batch_class=Batch
        )
    )
    assert type(batch) is Batch
    assert batch.inputs.tolist() == [[1], [2]]


@pytest.mark.parametrize("use_thread_prefetch", [False, True])
def test_after_a_reset_every_epoch_is_the_same(use_thread_prefetch):
    iterator = iterator_of(numbered(9), shuffle=True, reset_after_epoch=True, use_thread_prefetch=use_thread_prefetch)
    first, second = ([batch.targets[:, 0].tolist() for batch in iterator] for _ in range(2))
    assert len(first) == 4
    assert first == second


def test_batches_grow_by_the_factors_of_their_steps():
    iterator = iterator_of(numbered(40), num_hosts=2, global_batch_size=4, batch_rampup_factors={1: 2.0, 3: 3.0})
    sizes = [len(batch.targets) for _, batch in zip(range(5), iterator, strict=False)]
    assert sizes == [2, 4, 4, 6, 6]


def test_hosts_whose_rows_may_end_at_different_steps_are_warned_of(caplog):
    uneven = [
        {"grain_packing": True},
        {"drop_remainder": False},
        {"batch_rampup_factors": {1: 2.0}},
    ]
    even = [{}, {"num_epochs": None, "grain_packing": True}, {"num_hosts": 1, "grain_packing": True}]
    for options in uneven + even:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            iterator_of(numbered(7), **{"num_hosts": 2, "num_epochs": 1, **options})
        assert ("end at different steps" in caplog.text) == (options in uneven)


def test_with_whole_batches_hosts_of_unequal_parts_have_equally_many():
    for host in range(2):
        assert len(list(iterator_of(numbered(9), num_hosts=2, host=host, global_batch_size=4, num_epochs=1))) == 2


def variable_documents(count):
    generator = np.random.default_rng(0)
    return [document(*generator.integers(10, 99, generator.integers(1, 7)), END) for _ in range(count)]


def contents(batches):
    return [(batch.inputs.tolist(), batch.targets.tolist(), batch.targets_segmentation.tolist()) for batch in batches]


def epochs_of(iterator):
    while True:
        yield from iterator


def take(iterator, count):
    return contents(itertools.islice(epochs_of(iterator), count))


RAMPUP = {2: 2.0, 5: 1.0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grain_packing": True},
        {"grain_packing": True, "batch_rampup_factors": RAMPUP},
        {"grain_packing": True, "batch_rampup_factors": RAMPUP, "use_thread_prefetch": True},
        {"use_thread_prefetch": True},
    ],
    ids=["padded", "packed", "packed, rampup", "packed, rampup, thread", "padded, thread"],
)
def test_a_restored_iterator_goes_on_with_exactly_the_next_batch(options):
    def make():
        return iterator_of(variable_documents(11), shuffle=True, **options)

    whole, states = [], []
    iterator = make()
    for _ in range(12):
        states.append(json.dumps(iterator.get_state()))
        whole += take(iterator, 1)
    for stop in (0, 3, 8):
        restored = make()
        restored.set_state(json.loads(states[stop]))
        assert take(restored, 4) == whole[stop : stop + 4]


def test_with_workers_too_a_restored_iterator_goes_on_with_exactly_the_next_batch():
    def make():
        sets = [
            rows_of(documents, shuffle=True, num_epochs=None, grain_packing=True)
            for documents in (variable_documents(11), numbered(7, offset=100))
        ]
        return make_grain_multihost_iterator(
            sets,
            [11, 7],
            make_mesh(dp=2),
            global_batch_size=2,
            dataloading_host_count=1,
            dataset_weights=[2.0, 1.0],
            worker_count=2,
            batch_rampup_factors=RAMPUP,
        )

    first, second = make(), make()
    assert [len(inputs) for inputs, _, _ in take(first, 3)] == [2, 2, 4]
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert take(second, 5) == take(first, 5)


def test_without_packing_workers_do_not_change_the_order():
    alone, together = (
        iterator_of(variable_documents(11), shuffle=True, batch_rampup_factors=RAMPUP, worker_count=count)
        for count in (0, 2)
    )
    assert take(together, 9) == take(alone, 9)


def test_workers_that_pack_lose_no_document():
    iterator = iterator_of(numbered(11), num_epochs=1, grain_packing=True, worker_count=2, drop_remainder=False)
    targets = np.concatenate([batch.targets for batch in iterator])
    assert sorted(targets[targets > 0].tolist()) == list(range(1, 12))
