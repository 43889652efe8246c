"""A search finds the cheapest run that fits, and says so if there is none."""

import io

import pytest
from planning.setups import make_setup
from rich.console import Console

from xlstm_jax.planning import search as search_module
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.compiled import CompiledMemory, compile_here
from xlstm_jax.planning.memory import state_memory
from xlstm_jax.planning.search import search
from xlstm_jax.planning.tables import render_search
from xlstm_jax.utils.accelerators import find_accelerator

pytestmark = pytest.mark.slow

H100 = find_accelerator("h100")
SMALL = {"remats": ("none", "full"), "model_sizes": (1,)}


def text_of(renderable):
    output = io.StringIO()
    Console(file=output, width=90).print(renderable)
    return " ".join(output.getvalue().split())


@pytest.fixture
def needs(monkeypatch):
    """Let tests say what a step needs, by remat and accumulation; and count what is compiled."""
    table, compiled = {}, []

    def pretend(setup):
        compiled.append((setup.shape.remat, setup.accumulation))
        return CompiledMemory("cpu", table[compiled[-1]], 0, 0, 0)

    monkeypatch.setattr(search_module, "compiled_memory", pretend)
    return table, compiled


def test_the_pick_is_the_cheaper_of_two_that_fit_and_needs_no_more_than_the_target():
    setup = make_setup(rows=4, length=64, remat="full")
    cheapest = compile_here(setup.with_choices(remat="none", accumulation=1, fsdp=1, model=1)).peak
    result = search(setup, cheapest - 1, H100, **SMALL)
    assert result.found is not None
    assert result.setup is not None
    assert (result.found.remat, result.found.accumulation) == ("none", 2)
    assert compile_here(result.setup).peak == result.compiled.peak < cheapest


def test_candidates_are_compiled_in_the_order_of_their_cost_until_one_fits(needs):
    table, compiled = needs
    table |= {("none", 1): 9 * 10**6, ("none", 2): 8 * 10**6, ("full", 1): 6 * 10**6}
    result = search(make_setup(rows=2), 7 * 10**6, H100, **SMALL)
    assert compiled == [("none", 1), ("none", 2), ("full", 1)]
    assert result.setup.shape.remat == "full"
    assert [candidate.compiled for candidate in result.tried] == [9 * 10**6, 8 * 10**6, 6 * 10**6]
    assert "that fits into" in text_of(render_search(result, 7 * 10**6))


def test_what_computes_less_again_is_tried_first(needs):
    table, compiled = needs
    table |= {("none", 1): 9 * 10**8, ("norms", 1): 8 * 10**8, ("dots", 1): 7 * 10**8, ("full", 1): 6 * 10**8}
    search(make_setup(rows=1), 5 * 10**8, H100, model_sizes=(1,))
    assert compiled == [("none", 1), ("norms", 1), ("dots", 1), ("full", 1)]


def test_what_keeps_too_many_activations_is_not_compiled(needs):
    table, compiled = needs
    table |= {("full", 1): 10**6}
    setup = make_setup(rows=1, length=256)
    result = search(setup, 15 * 10**5, H100, **SMALL)
    assert compiled == [("full", 1)]
    assert result.tried[0].compiled is None
    assert result.tried[0].least > 15 * 10**5


def test_a_state_that_is_too_large_is_discarded_at_once(needs):
    _, compiled = needs
    result = search(make_setup(dp=2, rows=4), 1000, H100, **SMALL)
    assert compiled == []
    assert result.setup is None
    assert result.num_too_large == result.num_candidates > 0
    assert result.smallest_miss is not None
    assert "None of" in text_of(render_search(result, 1000))
    assert "by at least" in text_of(render_search(result, 1000))


def test_splitting_parameters_makes_room_for_them(needs):
    table, _ = needs
    table |= {("full", 1): 1}
    setup = make_setup(dp=2, rows=2, length=2)
    whole = state_memory(AbstractTrainer.from_setup(setup)).total
    result = search(setup, whole - 1, H100, remats=("full",), model_sizes=(1,))
    assert (result.num_candidates, result.num_too_large) == (2, 1)
    assert result.found is not None
    assert result.found.axis_sizes["fsdp"] == 2


def test_the_number_of_compilations_is_bounded(needs):
    table, compiled = needs
    table |= {(remat, n): 10**8 for remat in ("none", "full") for n in (1, 2)}
    lines = []
    result = search(make_setup(rows=2), 10**7, H100, max_compilations=2, report=lines.append, **SMALL)
    assert len(compiled) == 2
    assert not result.is_complete
    assert result.smallest_miss == 9 * 10**7
    assert "allow more" in text_of(render_search(result, 10**7))
    assert any("compiling (2 of at most 2)" in line for line in lines)


def test_a_mesh_that_the_heads_cannot_be_split_over_is_reported(needs):
    table, _ = needs
    table |= {("full", 1): 1}
    lines = []
    result = search(make_setup(dp=8), 10**9, H100, remats=("full",), model_sizes=(1, 8), report=lines.append)
    assert "4 heads on 8 devices leave no room for tp 8." in lines
    assert result.setup is not None
