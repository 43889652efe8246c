"""The order of batches is a function of the seed and the step: not of processes, workers or interruptions."""

import json

import jax
import numpy as np
import pytest
from dataset.corpora import FaultyDocuments, ListedDocuments, random_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.grain_batch_rampup import stepwise_rampup_schedule
from xlstm_jax.dataset.order.batches import BatchOrder, OrderedBatches
from xlstm_jax.dataset.order.mixture import WeightSchedule
from xlstm_jax.dataset.sources.source import Source

pytestmark = pytest.mark.slow

ROWS, LENGTH, END = 8, 12, 999_999
DOCUMENTS = [random_documents(seed, 60, first_token=1 + 100_000 * seed) for seed in range(2)]


def make_batches(packing="stream", own_rows=np.arange, num_workers=0, num_sources=2, seed=5, **order):
    sources = [
        Source(ListedDocuments(rows), shuffle_seed=seed, eod_token_id=END, name=f"set_{index}")
        for index, rows in enumerate(DOCUMENTS[:num_sources])
    ]
    options = {
        "length": LENGTH,
        "num_rows": stepwise_rampup_schedule(ROWS, {}),
        "packing": packing,
        "num_bins": 5,
        "first_input": END,
        "weights": WeightSchedule(num_sources, [3, 1][:num_sources], {4: [1, 1][:num_sources]}),
    }
    return OrderedBatches(sources, BatchOrder(**options | order), own_rows, num_workers)


def rows_of_host(host, num_hosts):
    def own_rows(num_rows):
        return np.array_split(np.arange(num_rows), num_hosts)[host]

    return own_rows


def draw(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


of_packings = pytest.mark.parametrize("packing", ["stream", "first_fit", "none"])
rampups = st.sampled_from([{}, {3: 2.0}, {2: 0.5, 6: 1.5}])


@of_packings
@given(
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    num_steps=st.integers(0, 12),
    seed=st.integers(0, 5),
    factors=rampups,
)
@settings(max_examples=25, deadline=None)
def test_hosts_that_take_over_from_any_number_of_hosts_go_on_with_the_next_global_batch(
    packing, before, after, num_steps, seed, factors
):
    options = {"packing": packing, "seed": seed, "num_rows": stepwise_rampup_schedule(ROWS, factors)}
    expected = draw(make_batches(**options), num_steps + 6)
    hosts = [make_batches(own_rows=rows_of_host(host, before), **options) for host in range(before)]
    first = list(zip(*(draw(host, num_steps) for host in hosts), strict=True))
    states = [json.dumps(host.get_state()) for host in hosts]
    assert len(set(states)) == 1
    successors = [make_batches(own_rows=rows_of_host(host, after), **options) for host in range(after)]
    for host in successors:
        host.set_state(json.loads(states[0]))
    rest = list(zip(*(draw(host, 6) for host in successors), strict=True))
    found = [jax.tree.map(lambda *rows: np.concatenate(rows), *parts) for parts in first + rest]
    assert_same(found, expected)


@of_packings
def test_the_number_of_workers_changes_nothing(packing):
    expected = draw(make_batches(packing), 30)
    batches = make_batches(packing, num_workers=1)
    found = draw(batches, 10)
    state = json.loads(json.dumps(batches.get_state()))
    batches.shut_down()
    successor = make_batches(packing, num_workers=4)
    successor.set_state(state)
    found += draw(successor, 20)
    successor.shut_down()
    assert_same(found, expected)


def test_another_seed_gives_other_batches():
    first, second = (draw(make_batches(seed=seed), 1)[0] for seed in (5, 6))
    assert (first.targets != second.targets).any()


@of_packings
def test_a_pass_has_every_token_once_and_the_next_pass_another_order(packing):
    batches = make_batches(packing, num_sources=1, is_endless=False)
    expected = sorted(np.concatenate([np.append(row, END) for row in DOCUMENTS[0]]).tolist())
    passes = [list(batches) for _ in range(2)]
    for found in passes:
        targets = np.concatenate([batch.targets[batch.targets_segmentation > 0] for batch in found])
        assert sorted(targets.tolist()) == expected
    assert (passes[0][0].targets != passes[1][0].targets).any()


@pytest.mark.parametrize("num_passes", [0, 1])
def test_a_pass_goes_on_in_its_midst_and_ends_where_it_would_have(num_passes):
    batches = make_batches("first_fit", num_sources=1, is_endless=False)
    passes = [list(batches) for _ in range(3)]
    again = make_batches("first_fit", num_sources=1, is_endless=False)
    for _ in range(num_passes):
        list(again)
    first = draw(again, 3)
    successor = make_batches("first_fit", num_sources=1, is_endless=False)
    successor.set_state(again.get_state())
    assert_same(first + list(successor), passes[num_passes])
    assert_same(list(successor), passes[num_passes + 1])


def test_an_endless_iterator_that_stops_after_a_pass_changes_nothing_else():
    expected = draw(make_batches(), 60)
    batches = make_batches(stops_after_pass=True)
    found = [batch for _ in range(3) for batch in batches]
    positions = batches.get_state()["mixture"]["positions"]
    assert min(positions) // len(DOCUMENTS[0]) == 3
    assert_same(found[:60], expected[: len(found)])


def test_tokens_of_the_sources_have_the_shares_of_their_weights():
    batches = make_batches(weights=WeightSchedule(2, [3, 1]))
    targets = np.concatenate([batch.targets.reshape(-1) for batch in draw(batches, 100)])
    share = np.mean(targets[targets != END] > 100_000)
    assert abs(share - 0.25) < 0.01


@of_packings
def test_an_epoch_that_ends_inside_a_batch_does_not_delay_the_later_ones(packing):
    options = {"packing": packing, "num_sources": 1, "weights": None}
    endless, batches = make_batches(**options), make_batches(**options, stops_after_pass=True)
    num_documents, ends, expected = len(DOCUMENTS[0]), [], []
    for num_epochs in range(1, 9):
        ends.append(sum(1 for _ in batches) + (ends[-1] if ends else 0))
        while endless.get_state()["mixture"]["positions"][0] < num_epochs * num_documents:
            next(endless)
        expected.append(endless.get_state()["step"])
    assert ends == expected


def test_statistics_say_how_rows_are_filled_and_how_far_each_source_is():
    batches = make_batches("none", num_sources=1)
    found = draw(batches, 20)
    statistics = batches.get_statistics()
    segments = np.concatenate([batch.targets_segmentation for batch in found])
    assert statistics["utilization"] == pytest.approx(np.mean(segments > 0))
    assert statistics["documents_per_row"] == pytest.approx(np.mean(segments.max(axis=1)))
    assert statistics["epochs"] == batches.get_state()["mixture"]["positions"][0] / len(DOCUMENTS[0])
    assert statistics["skipped"] == 0


def test_skipped_documents_are_counted_across_a_restart():
    source = Source(FaultyDocuments(DOCUMENTS[0], faulty={1, 5}), on_bad_data="skip")
    order = BatchOrder(LENGTH, stepwise_rampup_schedule(ROWS, {}))
    batches = OrderedBatches([source], order)
    draw(batches, 15)
    successor = OrderedBatches([source], order)
    successor.set_state(batches.get_state())
    draw(batches, 15)
    draw(successor, 15)
    assert successor.get_statistics() == batches.get_statistics()
    assert batches.get_statistics()["skipped"] >= 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": LENGTH + 1}, "length: 12 in the state, 13 here"),
        ({"seed": 6}, r"sources\.0\.shuffle_seed: 5 in the state, 6 here"),
        ({"packing": "first_fit"}, "packing: stream in the state, first_fit here"),
        ({"num_sources": 1}, r"sources\.1\.documents: 60 in the state, absent here"),
        ({"weights": WeightSchedule(2)}, r"weights\.0\.0: 0\.75 in the state, 0\.5 here"),
    ],
)
def test_a_state_of_other_data_is_refused_with_the_difference(change, named):
    batches = make_batches()
    draw(batches, 3)
    with pytest.raises(ValueError, match=named):
        make_batches(**change).set_state(batches.get_state())


def test_a_refused_state_changes_nothing():
    batches = make_batches()
    expected = draw(make_batches(), 4)
    found = draw(batches, 2)
    with pytest.raises(ValueError, match="other data"):
        batches.set_state(make_batches(seed=6).get_state())
    assert_same(found + draw(batches, 2), expected)


def test_a_mixture_that_is_to_end_is_refused():
    with pytest.raises(ValueError, match="no common end"):
        make_batches(is_endless=False)


def test_a_source_that_enters_late_does_not_have_to_catch_up():
    weights = WeightSchedule(2, [1, 0], {60: [1, 1]})
    batches = make_batches(stops_after_pass=True, weights=weights)
    lengths = [sum(1 for _ in batches) for _ in range(12)]
    assert max(lengths) < 4 * min(lengths)


def test_documents_that_were_left_out_when_a_source_was_opened_are_counted():
    source = Source(ListedDocuments(DOCUMENTS[0]), num_skipped=3)
    batches = OrderedBatches([source], BatchOrder(LENGTH, stepwise_rampup_schedule(ROWS, {})))
    assert batches.get_statistics()["skipped"] == 3
