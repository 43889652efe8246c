"""The formal languages of the xLSTM paper and multi-query associative recall: one table of tasks.

A language asks one question about a string. A row holds the string, a question mark and the answer; the model predicts
each token of the answer from all previous tokens. For "abb" and its reverse:

    inputs      a b b ? b b a
    targets           b b a .
    mask        0 0 0 1 1 1 1

If the answers of a language are one symbol each, they end with that symbol; others end with a full stop. Unless noted
otherwise, languages are those of Delétang et al. (2023), https://arxiv.org/abs/2207.02098.

An example is a function of task, seed, index and range of lengths, so any host or worker can draw any of them. For test
examples that differ from those in training, use another seed.
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence

import numpy as np

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.tasks.examples import Example, draw_recall, stack_examples

BLANK, QUESTION, STOP = " ?."
"""The first tokens of every language; the blank pads rows."""
MODULUS = 5
"""The modulus of all arithmetic tasks."""

_DIGITS = string.digits[:MODULUS]
_LETTERS = "abcde"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """A task whose examples are a string and an answer, each token one character."""

    symbols: str
    """The characters of strings and answers."""
    draw: Callable[[np.random.Generator, int], str]
    """Draws a string of the given length, or of one less where the language has none of that length."""
    solve: Callable[[str], str]
    """Returns the answer to a string."""
    shortest: int = 1
    """The length of the shortest strings."""
    longest_answer: Callable[[int], int] | None = None
    """The largest length of the answer to a string of the given length; `None` if answers are one symbol."""

    @property
    def vocabulary(self) -> str:
        """The character of each token."""
        return BLANK + QUESTION + STOP + self.symbols

    def row_length(self, length: int) -> int:
        """Return the number of tokens in the longest row with a string of this length."""
        return length + (1 if self.longest_answer is None else self.longest_answer(length) + 1)

    def ask(self, text: str) -> Example:
        """Make an example from a string of the language."""
        answer = self.solve(text) + ("" if self.longest_answer is None else STOP)
        tokens = np.array([self._tokens[symbol] for symbol in text + QUESTION + answer])
        mask = np.arange(len(tokens) - 1) >= len(text)
        return Example(tokens[:-1], np.where(mask, tokens[1:], 0), mask)

    def __call__(self, generator: np.random.Generator, length: int) -> Example:
        """Draw an example with a string of a length."""
        return self.ask(self.draw(generator, length))

    @functools.cached_property
    def _tokens(self) -> dict[str, int]:
        return {symbol: token for token, symbol in enumerate(self.vocabulary)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Multi-query associative recall: a key is shown again, and its value is the target; see `examples.draw_recall`."""

    num_pairs: int
    num_keys: int
    num_values: int

    @property
    def vocabulary(self) -> Sequence[str]:
        """The name of each token."""
        keys = [f"key {index}" for index in range(self.num_keys)]
        return [BLANK, *keys, *(f"value {index}" for index in range(self.num_values))]

    @property
    def shortest(self) -> int:
        """The length of the shortest sequences: all pairs, and all keys once again."""
        return 3 * self.num_pairs

    def row_length(self, length: int) -> int:
        """Return the number of tokens in a row: a sequence contains its questions."""
        return length

    def __call__(self, generator: np.random.Generator, length: int) -> Example:
        """Draw a sequence with its questions."""
        return draw_recall(generator, length, **dataclasses.asdict(self))


FormalTask = Language | Recall


def draw_example(task: FormalTask, seed: int, index: int, *, min_length: int, max_length: int) -> Example:
    """Draw one example; all lengths are equally likely.

    Args:
        task: One of `TASKS`, or a custom task.
        seed: The seed of the sequence of examples.
        index: The index of the example in the sequence.
        min_length: The length of the shortest strings, without question and answer.
        max_length: The length of the longest strings.

    Returns:
        The example, not padded.
    """
    if not task.shortest <= min_length <= max_length:
        raise ValueError(
            f"min_length is {min_length}, but must be from {task.shortest}, the shortest of this task, to max_length "
            f"{max_length}."
        )
    generator = np.random.default_rng([seed, index])
    return task(generator, int(generator.integers(min_length, max_length, endpoint=True)))


def generate(task: FormalTask, seed: int, index: int, *, batch_size: int, min_length: int, max_length: int) -> LLMBatch:
    """Generate a batch, each row one example.

    Args:
        task: One of `TASKS`, or a custom task.
        seed: The seed of the sequence of examples.
        index: The index of the batch; its first example has the index `index * batch_size`.
        batch_size: The number of rows.
        min_length: The length of the shortest strings, without question and answer.
        max_length: The length of the longest strings; all lengths in the range are equally likely.

    Returns:
        The batch, with rows of length `task.row_length(max_length)`. The segmentation of the targets is 1 at answers,
        and 0 elsewhere.
    """
    draw = functools.partial(draw_example, task, seed, min_length=min_length, max_length=max_length)
    numbers = range(index * batch_size, (index + 1) * batch_size)
    return stack_examples([draw(number) for number in numbers], task.row_length(max_length))


def _draw_string(generator: np.random.Generator, length: int, symbols: str) -> str:
    return "".join(symbols[index] for index in generator.integers(0, len(symbols), length).tolist())


def _draw_sum_of_products(generator: np.random.Generator, length: int) -> str:
    numbers = _draw_string(generator, (length + 1) // 2, _DIGITS)
    operators = _draw_string(generator, len(numbers) - 1, "+-*")
    return numbers[0] + "".join(map("".join, zip(operators, numbers[1:], strict=True)))


def _draw_brackets(generator: np.random.Generator, length: int, operators: str = "+-*") -> str:
    if length < 5:
        digit = _draw_string(generator, 1, _DIGITS)
        return [digit, f"-{digit}", f"({digit})", f"(-{digit})"][length - 1]
    left_length = int(generator.integers(1, length - 3))
    left = _draw_brackets(generator, left_length, operators)
    right = _draw_brackets(generator, length - 3 - left_length, operators)
    return f"({left}{_draw_string(generator, 1, operators)}{right})"


def _draw_equation(generator: np.random.Generator, length: int) -> str:
    # Without products, the unknown has the coefficient 1 or -1, and the equation one solution.
    left = _draw_brackets(generator, length - 2, operators="+-")
    unknown = generator.choice([place for place, symbol in enumerate(left) if symbol.isdigit()])
    return f"{left[:unknown]}z{left[unknown + 1 :]}={_evaluate(left)}"


def _draw_duplicate_with_hole(generator: np.random.Generator, length: int) -> str:
    text = 2 * _draw_string(generator, length // 2, "ab")
    hole = int(generator.integers(0, len(text)))
    return f"{text[:hole]}_{text[hole + 1 :]}"


def _evaluate(expression: str) -> int:
    """Evaluate an expression with the usual precedence, modulo `MODULUS`."""
    outer: list[tuple[int, int]] = []
    total, product, previous = 0, 1, "("
    for symbol in expression:
        if symbol.isdigit():
            product = product * int(symbol) % MODULUS
        elif symbol == "(":
            outer.append((total, product))
            total, product = 0, 1
        elif symbol == ")":
            value = total + product
            total, product = outer.pop()
            product = product * value % MODULUS
        elif symbol in "+-" and (previous.isdigit() or previous == ")"):
            total, product = total + product, 1 if symbol == "+" else -1
        elif symbol == "-":
            product = -product
        previous = symbol
    return (total + product) % MODULUS


def _solve_parity(text: str) -> str:
    return str(text.count("1") % 2)


def _solve_even_pairs(text: str) -> str:
    # Each 01 and each 10 is a change: after an even number of them, the last symbol is the first.
    return str(int(text[0] == text[-1]))


def _solve_cycle_navigation(text: str) -> str:
    return str((text.count(">") - text.count("<")) % MODULUS)


def _solve_arithmetic(text: str) -> str:
    return str(_evaluate(text))


def _solve_equation(text: str) -> str:
    left, _, right = text.partition("=")
    return next(digit for digit in _DIGITS if str(_evaluate(left.replace("z", digit))) == right)


def _solve_majority(text: str) -> str:
    return max(_LETTERS, key=text.count)


def _solve_majority_count(text: str) -> str:
    return str(max(map(text.count, _LETTERS)))


def _solve_missing_duplicate(text: str) -> str:
    half = len(text) // 2
    return text[text.index("_") - half]  # an index below 0 counts from the end: the same place in the other half


def _sort(text: str) -> str:
    return "".join(sorted(text))


def _reverse(text: str) -> str:
    return text[::-1]


def _duplicate(text: str) -> str:
    return text + text


def _take_odds_first(text: str) -> str:
    return text[::2] + text[1::2]


def _drop_repeated(text: str) -> str:
    return "".join(dict.fromkeys(text))


def _as_long(length: int) -> int:
    return length


def _twice_as_long(length: int) -> int:
    return 2 * length


def _count_digits(length: int) -> int:
    return len(str(length))


def _at_most_each_letter(length: int) -> int:
    return min(length, len(string.ascii_lowercase))


def _draw_from(symbols: str) -> Callable[[np.random.Generator, int], str]:
    return functools.partial(_draw_string, symbols=symbols)


TASKS: dict[str, FormalTask] = {
    "parity": Language(symbols="01", draw=_draw_from("01"), solve=_solve_parity),
    "even_pairs": Language(symbols="01", draw=_draw_from("01"), solve=_solve_even_pairs),
    "cycle_navigation": Language(symbols=f"<|>{_DIGITS}", draw=_draw_from("<|>"), solve=_solve_cycle_navigation),
    "modular_arithmetic": Language(symbols=f"{_DIGITS}+-*", draw=_draw_sum_of_products, solve=_solve_arithmetic),
    "modular_arithmetic_brackets": Language(symbols=f"{_DIGITS}+-*()", draw=_draw_brackets, solve=_solve_arithmetic),
    "solve_equation": Language(symbols=f"{_DIGITS}+-()z=", draw=_draw_equation, solve=_solve_equation, shortest=3),
    "majority": Language(symbols=_LETTERS, draw=_draw_from(_LETTERS), solve=_solve_majority),
    "majority_count": Language(
        symbols=_LETTERS + string.digits,
        draw=_draw_from(_LETTERS),
        solve=_solve_majority_count,
        longest_answer=_count_digits,
    ),
    "bucket_sort": Language(symbols=_LETTERS, draw=_draw_from(_LETTERS), solve=_sort, longest_answer=_as_long),
    "missing_duplicate": Language(
        symbols="ab_", draw=_draw_duplicate_with_hole, solve=_solve_missing_duplicate, shortest=2
    ),
    "reverse_string": Language(symbols="ab", draw=_draw_from("ab"), solve=_reverse, longest_answer=_as_long),
    "duplicate_string": Language(symbols="ab", draw=_draw_from("ab"), solve=_duplicate, longest_answer=_twice_as_long),
    "odds_first": Language(symbols="ab", draw=_draw_from("ab"), solve=_take_odds_first, longest_answer=_as_long),
    "set": Language(
        symbols=string.ascii_lowercase,
        draw=_draw_from(string.ascii_lowercase),
        solve=_drop_repeated,
        longest_answer=_at_most_each_letter,
    ),
    "recall": Recall(num_pairs=8, num_keys=64, num_values=64),
}
"""All tasks, by name.

- `parity`: is the number of ones odd? 1101 → 1. `examples.draw_parity` asks this after every bit.
- `even_pairs`: is the number of 01 and 10 together even? 0110 → 1.
- `cycle_navigation`: where on a cycle of five does one end who starts at 0 and steps back, stays or steps forward?
  `<|<>` → 4.
- `modular_arithmetic`: what is the sum of products, modulo 5? 2-3*4 → 0.
- `modular_arithmetic_brackets`: what is the expression, modulo 5? ((-2)*(3-4)) → 2.
- `solve_equation`: what is z, modulo 5? (z-4)=3 → 2.
- `majority`: which symbol is the most frequent, and the first in the alphabet if there are several? cbacb → b. Named
  in the xLSTM paper; the details are ours.
- `majority_count`: how often does it come? In decimal: the vocabulary does not depend on the length. cbacb → 2. Named
  in the xLSTM paper; the details are ours.
- `bucket_sort`: the symbols in alphabetical order. cbacb → abbcc.
- `missing_duplicate`: a string comes twice; what was in the hole? abba_b → b.
- `reverse_string`: the string backwards. abb → bba.
- `duplicate_string`: the string twice. abb → abbabb.
- `odds_first`: the first, third, fifth ... symbol, then the second, fourth ... aabb → abab.
- `set`: each symbol once, where it comes first. cbacb → cba. Named in the xLSTM paper; the details are ours.
- `recall`: multi-query associative recall of 8 pairs; make a `Recall` for other numbers.
"""
