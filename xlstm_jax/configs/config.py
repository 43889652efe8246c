"""The base of all configs."""

import dataclasses
from typing import Any

from xlstm_jax.configs.plain import to_plain


@dataclasses.dataclass(kw_only=True, frozen=False)
class ConfigDict:
    """Base of all configs: a dataclass with keyword arguments that can be written as a plain dictionary."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute `key`, or `default` if there is none."""
        return getattr(self, key, default)

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect beside the others, by name, for `describe_ignored`.

        The settings of a run may change none of them. Configs that are made in Python may, unless they refuse it.
        """
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Write the config with nothing but dictionaries, tuples, numbers, strings and `None`.

        Nested configs and dataclasses become dictionaries, lists become tuples, paths become posix strings, classes and
        functions become dotted paths. What is none of these becomes its `str`.

        Returns:
            A dictionary that JSON can hold and that `from_dict` reads back.
        """
        return {key: to_plain(value) for key, value in vars(self).items()}

    @staticmethod
    def from_dict(
        config_class: Any,
        data: Any,
        strict_classname_parsing: bool = False,
        ignore_extensive_attributes: bool = True,
        none_to_zero_for_ints: bool = False,
    ) -> Any:
        """Build a config from what `to_dict` wrote, also after a way through JSON.

        `None` and the string "None" are `None` wherever the annotation or the default of a field allows it. A union
        takes the member that the value already fits, else the first one that it can be turned into. A dtype comes back
        as its name, `"jax.numpy.bfloat16"` as `"bfloat16"`.

        Args:
            config_class: A dataclass, or any annotation that a field may have.
            data: The value: a dictionary for a dataclass, or its repr such as `"SomeConfig(a=1, b=None)"`.
            strict_classname_parsing: Refuse a repr that names another class than the annotation.
            ignore_extensive_attributes: Skip keys that the dataclass does not have, instead of refusing them.
            none_to_zero_for_ints: Read `None` as 0 where an `int` is needed.

        Returns:
            The value, of the type that the annotation asks for.

        Raises:
            ConfigError: If the value does not fit.
        """
        from xlstm_jax.configs.reader import Reading, read  # imports cattrs

        options = Reading(
            is_lenient=True,
            checks_names=strict_classname_parsing,
            refuses_unknown=not ignore_extensive_attributes,
            none_is_zero=none_to_zero_for_ints,
        )
        return read(config_class, data, getattr(config_class, "__name__", ""), options)
