"""Rules that rename and reshape parameters, both ways.

A rule maps an entry of a foreign state dict, named like `blocks.{i}.q.weight`, to one or several of our parameters,
named like `block_{i}.mlstm.q.kernel`. Both directions are differentiable, and inverse to each other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from xlstm_jax.configs import ConfigError

Arrays = list[Any]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A conversion of one foreign array to one or several of ours, and its inverse."""

    to_ours: Callable[[Any], Arrays]
    to_theirs: Callable[[Arrays], Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A foreign name, the names of our parameters that it contains, and the conversion between them."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform
    repeats: str | None = None
    """The foreign name of which this one is a copy, as with tied weights: it may be missing, and is not written."""

    def at(self, block: int | None) -> "Rule":
        """Insert the index of a block into the names."""
        ours = tuple(name.format(i=block) for name in self.ours)
        return dataclasses.replace(self, theirs=self.theirs.format(i=block), ours=ours)


COPY = Transform(lambda x: [x], lambda xs: xs[0])
LINEAR = Transform(lambda x: [x.T], lambda xs: xs[0].T)
"""A weight `[out, in]`, ours `[in, out]`."""
PLUS_ONE = Transform(lambda x: [x + 1], lambda xs: xs[0] - 1)
"""A scale that the foreign model stores as its difference from one."""
BLOCK_DIAGONAL = Transform(lambda x: [x.swapaxes(1, 2)], lambda xs: xs[0].swapaxes(1, 2))
"""Blocks `[block, out, in]`, ours `[block, in, out]`."""
DEPTHWISE = Transform(lambda x: [x[:, 0].T], lambda xs: xs[0].T[:, None])
"""A convolution `[channel, 1, tap]`, ours `[tap, channel]`."""
TWO_LINEAR = Transform(
    lambda x: [x[: len(x) // 2].T, x[len(x) // 2 :].T], lambda xs: jnp.concatenate([x.T for x in xs], axis=0)
)
"""Two weights `[out, in]`, concatenated along the outputs."""


def rename(name: str, ours: str, transform: Transform = COPY) -> Rule:
    """Create a rule for one parameter."""
    return Rule(name, (ours,), transform)


def lm_head(embedding: str, is_tied: bool) -> Rule:
    """Create the rule for the projection to the vocabulary, which is a copy of the embedding if weights are tied."""
    name = "lm_head.weight"
    return Rule(name, (), COPY, embedding) if is_tied else rename(name, "lm_head.out_dense.kernel", LINEAR)


def to_ours(state_dict: Mapping[str, Any], rules: Sequence[Rule]) -> dict[str, Any]:
    """Convert a foreign state dict to parameters in the canonical layout.

    Args:
        state_dict: The foreign parameters by name.
        rules: The rules; each foreign name must have one, and copies of another array must be equal to it.

    Returns:
        Our parameters as nested dictionaries.
    """
    missing = [rule.theirs for rule in rules if rule.theirs not in state_dict and rule.repeats is None]
    unknown = sorted(set(state_dict) - {rule.theirs for rule in rules})
    if missing or unknown:
        raise ConfigError(
            f"The state dict is not that of this config: {len(missing)} entries are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} have no rule ({', '.join(unknown[:3])})."
        )
    params: dict[str, Any] = {}
    for rule in rules:
        if rule.repeats is not None:
            _check_repetition(state_dict, rule.theirs, rule.repeats)
            continue
        for name, value in zip(rule.ours, rule.transform.to_ours(state_dict[rule.theirs]), strict=True):
            *parents, leaf = name.split(".")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return params


def to_theirs(params: Mapping[str, Any], rules: Sequence[Rule]) -> dict[str, Any]:
    """Convert parameters in the canonical layout to a foreign state dict; the inverse of `to_ours`.

    Args:
        params: Our parameters as nested dictionaries.
        rules: The rules; each parameter must be in one of them.

    Returns:
        The foreign parameters by name.
    """
    flat = flatten_dict(params, sep=".")
    own = [rule for rule in rules if rule.repeats is None]
    needed = {name for rule in own for name in rule.ours}
    missing, unknown = sorted(needed - flat.keys()), sorted(flat.keys() - needed)
    if missing or unknown:
        raise ConfigError(
            f"The parameters are not those of this config, or have no place in the foreign model: {len(missing)} are "
            f"missing ({', '.join(missing[:3])}), {len(unknown)} have no rule ({', '.join(unknown[:3])})."
        )
    return {rule.theirs: rule.transform.to_theirs([flat[name] for name in rule.ours]) for rule in own}


def _check_repetition(state_dict: Mapping[str, Any], name: str, original: str) -> None:
    if name in state_dict and not np.array_equal(state_dict[name], state_dict[original]):
        raise ConfigError(f"{name} differs from {original}, but weights are tied: convert with tie_weights=False.")
