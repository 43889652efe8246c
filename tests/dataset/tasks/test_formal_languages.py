"""Formal languages have the right strings and answers, and their rows are a function of seed and number."""

import collections
import functools
import inspect
import itertools
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.tasks import formal_languages
from xlstm_jax.dataset.tasks.examples import draw_recall
from xlstm_jax.dataset.tasks.formal_languages import TASKS, Language, Recall, draw_example, generate

LANGUAGES = {name: task for name, task in TASKS.items() if isinstance(task, Language)}
EACH_LANGUAGE = pytest.mark.parametrize("name", LANGUAGES)
EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())

KNOWN_ANSWERS = {
    "parity": {"0": "0", "1": "1", "11": "0", "10110": "1", "1111011": "0"},
    "even_pairs": {"0": "1", "10": "0", "101": "1", "0010": "1", "0011": "0", "1101001": "1"},
    "cycle_navigation": {"|": "0", ">": "1", "<": "4", ">>>>>": "0", ">>|>": "3", "<<>|<": "3"},
    "modular_arithmetic": {"3": "3", "1+2-4": "4", "2*3": "1", "1+2*3": "2", "4*4*4-1": "3", "0-1*2+3*4": "0"},
    "modular_arithmetic_brackets": {
        "4": "4",
        "-4": "1",
        "(3)": "3",
        "(-1)": "4",
        "(1+2)": "3",
        "(1-(2-3))": "2",
        "((1+2)*3)": "4",
        "(2*-3)": "4",
        "(1--1)": "2",
        "-(1-2)*(4-3*(-2))": "0",
    },
    "solve_equation": {"z=3": "3", "-z=3": "2", "(z)=0": "0", "(1+z)=0": "4", "(1-z)=4": "2", "(2-(3-z))=1": "2"},
    "majority": {"e": "e", "abb": "b", "ba": "a", "edcba": "a", "ddecce": "c", "eedeaa": "e"},
    "majority_count": {"e": "1", "abb": "2", "edcba": "1", "eedeaa": "3", "bbbbbabbbbb": "10"},
    "bucket_sort": {"d": "d", "ba": "ab", "edcba": "abcde", "aebae": "aabee"},
    "missing_duplicate": {"_a": "a", "b_": "b", "ab_b": "a", "_bab": "a", "abba_b": "b", "ab_abb": "b"},
    "reverse_string": {"a": "a", "ab": "ba", "aabab": "babaa"},
    "duplicate_string": {"a": "aa", "ab": "abab", "abb": "abbabb"},
    "odds_first": {"a": "a", "ab": "ab", "aab": "aba", "abab": "aabb", "aaabaa": "aaaaba"},
    "set": {"q": "q", "aa": "a", "cbacb": "cba", "zzyzxy": "zyx"},
}

KNOWN_DRAWS = {
    "parity": "0110001001011",
    "even_pairs": "0110001001011",
    "cycle_navigation": "<>||<<><<|<>>",
    "modular_arithmetic": "0+4+2-2+1*0*3",
    "modular_arithmetic_brackets": "(4*((2)+(1)))",
    "solve_equation": "(z-(-2+-1))=2",
    "majority": "aeccbadabcadd",
    "majority_count": "aeccbadabcadd",
    "bucket_sort": "aeccbadabcadd",
    "missing_duplicate": "abbaaaab_aaa",
    "reverse_string": "abbaaabaababb",
    "duplicate_string": "abbaaabaababb",
    "odds_first": "abbaaabaababb",
    "set": "axplgdscinbss",
}

PATTERNS = {
    "parity": "[01]+",
    "even_pairs": "[01]+",
    "cycle_navigation": "[<|>]+",
    "modular_arithmetic": r"[0-4]([-+*][0-4])*",
    "modular_arithmetic_brackets": r"[-+*()0-4]+",
    "solve_equation": r"[-+()0-4]*z[-+()0-4]*=[0-4]",
    "majority": "[a-e]+",
    "majority_count": "[a-e]+",
    "bucket_sort": "[a-e]+",
    "missing_duplicate": "[ab]*_[ab]*",
    "reverse_string": "[ab]+",
    "duplicate_string": "[ab]+",
    "odds_first": "[ab]+",
    "set": "[a-z]+",
}


def walk_the_cycle(text):
    cycle = collections.deque("01234")
    for move in text:
        cycle.rotate({"<": 1, "|": 0, ">": -1}[move])
    return cycle[0]


def try_all_solutions(text):
    left, right = text.split("=")
    (solution,) = [z for z in range(5) if (eval(left, {"z": z}) - int(right)) % 5 == 0]
    return str(solution)


def fill_the_hole(text):
    half = len(text) // 2
    (symbol,) = [x for x in "ab" if (filled := text.replace("_", x))[:half] == filled[half:]]
    return symbol


def rank_by_frequency(text):
    return min((-count, symbol) for symbol, count in collections.Counter(text).items())


def sort_by_insertion(text):
    result = ""
    for symbol in text:
        place = sum(other <= symbol for other in result)
        result = result[:place] + symbol + result[place:]
    return result


def drop_seen(text):
    return "".join(symbol for place, symbol in enumerate(text) if symbol not in text[:place])


ORACLES = {
    "parity": lambda text: str(functools.reduce(int.__xor__, map(int, text))),
    "even_pairs": lambda text: str(1 - sum(a != b for a, b in itertools.pairwise(text)) % 2),
    "cycle_navigation": walk_the_cycle,
    "modular_arithmetic": lambda text: str(eval(text) % 5),
    "modular_arithmetic_brackets": lambda text: str(eval(text) % 5),
    "solve_equation": try_all_solutions,
    "majority": lambda text: rank_by_frequency(text)[1],
    "majority_count": lambda text: str(-rank_by_frequency(text)[0]),
    "bucket_sort": sort_by_insertion,
    "missing_duplicate": fill_the_hole,
    "reverse_string": lambda text: "".join(text[-1 - place] for place in range(len(text))),
    "duplicate_string": lambda text: "".join(text[place % len(text)] for place in range(2 * len(text))),
    "odds_first": lambda text: "".join(
        text[place] for parity in (0, 1) for place in range(len(text)) if place % 2 == parity
    ),
    "set": drop_seen,
}
"""Slow answers, found in another way."""


def read(task, tokens):
    return "".join(task.vocabulary[token] for token in tokens)


def draw_many(name, length, number=200):
    return [LANGUAGES[name].draw(np.random.default_rng([seed, length]), length) for seed in range(number)]


@EACH_LANGUAGE
def test_answers_to_known_strings(name):
    known = KNOWN_ANSWERS[name]
    assert {text: LANGUAGES[name].solve(text) for text in known} == known


def test_examples_in_the_documentation_are_true():
    source = inspect.getsource(formal_languages)
    bullets = re.findall(r"^- `(\w+)`:(.*?)(?=^- |^\"\"\")", source, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in bullets] == list(TASKS)
    examples = [(name, *pair) for name, text in bullets for pair in re.findall(r"`?([^\s`]+)`? → (\w+)\.", text)]
    assert [name for name, _, _ in examples] == list(LANGUAGES)
    for name, text, answer in examples:
        assert (name, LANGUAGES[name].solve(text)) == (name, answer)


@EACH_LANGUAGE
def test_known_draws(name):
    assert LANGUAGES[name].draw(np.random.default_rng([3, 4]), 13) == KNOWN_DRAWS[name]


@EACH_LANGUAGE
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), extra=st.integers(0, 60))
def test_drawn_strings_have_the_answers_of_an_oracle(name, seed, extra):
    language = LANGUAGES[name]
    text = language.draw(np.random.default_rng(seed), language.shortest + extra)
    assert re.fullmatch(PATTERNS[name], text)
    assert language.solve(text) == ORACLES[name](text)


def combine(inner):
    sums_and_products = st.tuples(inner, st.sampled_from("+-*"), inner).map("".join)
    return sums_and_products | inner.map("({})".format) | inner.map("-{}".format)


EXPRESSIONS = st.recursive(st.sampled_from("01234"), combine, max_leaves=20)


@given(EXPRESSIONS)
@settings(deadline=None)
def test_arithmetic_follows_the_precedence_of_python(text):
    assert LANGUAGES["modular_arithmetic_brackets"].solve(text) == str(eval(text) % 5)


@EACH_LANGUAGE
def test_strings_are_as_long_as_asked_or_one_shorter_where_there_is_none(name):
    language = LANGUAGES[name]
    for length in range(language.shortest, 40):
        shorter = {"modular_arithmetic": length % 2 == 0, "missing_duplicate": length % 2 == 1}.get(name, False)
        assert {len(text) for text in draw_many(name, length, 5)} == {length - shorter}


@EACH_LANGUAGE
def test_strings_and_answers_use_all_symbols_and_no_others(name):
    language = LANGUAGES[name]
    texts = [text for length in (language.shortest, 30, 120) for text in draw_many(name, length)]
    assert set("".join([*texts, *map(language.solve, texts)])) == set(language.symbols)


@pytest.mark.parametrize("name", [name for name, task in LANGUAGES.items() if task.longest_answer is None])
def test_answers_of_one_symbol_are_spread_over_all_that_there_are(name):
    counts = collections.Counter(map(LANGUAGES[name].solve, draw_many(name, 30, 1000)))
    assert len(counts) in (2, 5)
    assert max(counts.values()) < 2.5 * 1000 / len(counts)


def test_holes_are_at_every_place_and_unknowns_at_every_digit():
    assert {text.index("_") for text in draw_many("missing_duplicate", 8)} == set(range(8))
    assert {text.index("z") for text in draw_many("solve_equation", 7)} == {1, 3}


@pytest.mark.parametrize(
    ("name", "text", "inputs", "targets"),
    [
        ("reverse_string", "abb", "abb?bba", "   bba."),
        ("parity", "101", "101?", "   0"),
        ("majority_count", "eeeeeeeeeeee", "eeeeeeeeeeee?12", "            12."),
        ("set", "aab", "aab?ab", "   ab."),
    ],
)
def test_a_row_is_string_question_and_answer(name, text, inputs, targets):
    example = LANGUAGES[name].ask(text)
    assert read(LANGUAGES[name], example.inputs) == inputs
    assert read(LANGUAGES[name], example.targets) == targets
    np.testing.assert_array_equal(example.mask, np.array(list(targets)) != " ")


@EACH_LANGUAGE
def test_tokens_are_blank_question_stop_and_then_the_symbols(name):
    language = LANGUAGES[name]
    assert language.vocabulary == " ?." + language.symbols
    assert len(set(language.vocabulary)) == len(language.vocabulary)


@EACH_LANGUAGE
def test_no_row_is_longer_than_the_task_says(name):
    language = LANGUAGES[name]
    for length in (language.shortest, 9, 10, 31):
        rows = [language.ask(text).inputs for text in draw_many(name, length)]
        assert max(map(len, rows)) <= language.row_length(length)


@pytest.mark.parametrize(
    ("name", "row_length"),
    [
        ("parity", 31),
        ("bucket_sort", 61),
        ("reverse_string", 61),
        ("odds_first", 61),
        ("duplicate_string", 91),
        ("majority_count", 33),
        ("set", 57),
        ("recall", 30),
    ],
)
def test_row_lengths_for_strings_of_thirty_symbols(name, row_length):
    assert TASKS[name].row_length(30) == row_length


@EACH_TASK
def test_examples_are_a_function_of_seed_and_number(task):
    draw = functools.partial(draw_example, min_length=30, max_length=40)
    first, again, copied = (draw(each, 5, 7) for each in (task, task, pickle.loads(pickle.dumps(task))))
    for same in (again, copied):
        np.testing.assert_array_equal(first.inputs, same.inputs)
        np.testing.assert_array_equal(first.targets, same.targets)
    for seed, index in ((5, 8), (6, 7), (7, 5)):
        assert draw(task, seed, index).inputs.tolist() != first.inputs.tolist()


@EACH_TASK
def test_a_batch_has_the_examples_of_its_number_however_they_are_divided(task):
    draw = functools.partial(generate, task, 1, min_length=24, max_length=27)
    whole, parts = draw(0, batch_size=6), [draw(index, batch_size=2) for index in range(3)]
    np.testing.assert_array_equal(whole.inputs, np.concatenate([part.inputs for part in parts]))
    np.testing.assert_array_equal(whole.targets, np.concatenate([part.targets for part in parts]))
    example = draw_example(task, 1, 5, min_length=24, max_length=27)
    np.testing.assert_array_equal(parts[2].inputs[1, : len(example.inputs)], example.inputs)


@EACH_TASK
def test_batches_are_padded_and_their_segmentation_says_where(task):
    batch = generate(task, 0, 0, batch_size=40, min_length=24, max_length=29)
    examples = [draw_example(task, 0, index, min_length=24, max_length=29) for index in range(40)]
    assert batch.inputs.shape == (40, task.row_length(29))
    for row, (inputs, targets, mask) in enumerate(examples):
        padding = np.zeros(task.row_length(29) - len(inputs), np.int32)
        expected = {
            "inputs": inputs,
            "targets": targets,
            "inputs_segmentation": np.ones_like(inputs),
            "targets_segmentation": mask,
            "inputs_position": np.arange(len(inputs)),
            "targets_position": np.arange(len(inputs)),
        }
        for name, values in expected.items():
            leaf = getattr(batch, name)
            assert leaf.dtype == np.int32
            np.testing.assert_array_equal(leaf[row], np.concatenate([values, padding]), err_msg=name)


def test_all_lengths_between_the_shortest_and_the_longest_come():
    batch = generate(TASKS["parity"], 0, 0, batch_size=200, min_length=3, max_length=8)
    assert set(batch.inputs_segmentation.sum(axis=1)) == set(range(4, 10))


@EACH_TASK
def test_the_shortest_strings_can_be_drawn_and_no_shorter_ones(task):
    shortest = task.shortest
    assert draw_example(task, 0, 0, min_length=shortest, max_length=shortest).mask.any()
    with pytest.raises(ValueError, match=f"min_length is {shortest - 1}, but must be from {shortest}"):
        draw_example(task, 0, 0, min_length=shortest - 1, max_length=40)


def test_lengths_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"min_length is 9, but .* to max_length 8"):
        generate(TASKS["parity"], 0, 0, batch_size=2, min_length=9, max_length=8)


def test_recall_is_that_of_the_tasks():
    task = Recall(num_pairs=3, num_keys=5, num_values=4)
    example = task(np.random.default_rng(2), 12)
    expected = draw_recall(np.random.default_rng(2), 12, num_pairs=3, num_keys=5, num_values=4)
    for part, expected_part in zip(example, expected, strict=True):
        np.testing.assert_array_equal(part, expected_part)


def test_recall_names_its_tokens_and_answers_a_key_with_its_value():
    task = Recall(num_pairs=2, num_keys=3, num_values=4)
    assert list(task.vocabulary) == [" ", "key 0", "key 1", "key 2", "value 0", "value 1", "value 2", "value 3"]
    inputs, targets, mask = draw_example(task, 0, 0, min_length=10, max_length=10)
    names = [task.vocabulary[token] for token in inputs]
    answers = {names[0]: names[1], names[2]: names[3]}
    asked = np.flatnonzero(mask)
    assert {names[place] for place in asked} == set(answers)
    assert [task.vocabulary[targets[place]] for place in asked] == [answers[names[place]] for place in asked]
