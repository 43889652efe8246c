"""The base class of all configs."""

import dataclasses
from typing import Any

from xlstm_jax.configs.plain import to_plain


@dataclasses.dataclass(kw_only=True, frozen=False)
class ConfigDict:
    """Base class of all configs: a dataclass with keyword arguments that converts to a plain dictionary."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute `key`, or `default` if it does not exist."""
        return getattr(self, key, default)

    def ignored_fields(self) -> dict[str, str]:
        """Return the reasons why fields have no effect, given the other fields, by name, for `describe_ignored`.

        Setting such a field is an error in the settings of a run; for configs created in Python, only if they check it.
        """
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Convert the config to dictionaries, tuples, numbers, strings and `None`.

        Nested configs and dataclasses become dictionaries, lists become tuples, paths become posix strings, classes and
        functions become dotted paths. Any other value becomes its `str`.

        Returns:
            A JSON-serialisable dictionary that `from_dict` reads back.
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
        """Build a config from the output of `to_dict`, also after a round trip through JSON.

        `None` and the string "None" are read as `None` if the annotation or the default of a field allows it. For a
        union, the member that the value already fits is used, else the first one that it can be converted to. A dtype
        is read as its name: `"jax.numpy.bfloat16"` as `"bfloat16"`.

        Args:
            config_class: A dataclass, or any annotation that a field may have.
            data: The value: a dictionary for a dataclass, or its repr such as `"SomeConfig(a=1, b=None)"`.
            strict_classname_parsing: Reject a repr that names another class than the annotation.
            ignore_extensive_attributes: Skip unknown keys instead of rejecting them.
            none_to_zero_for_ints: Read `None` as 0 for fields of type `int`.

        Returns:
            The value, of the annotated type.

        Raises:
            ConfigError: The value does not fit the annotation.
        """
        from xlstm_jax.configs.reader import Reading, read  # imports cattrs

        options = Reading(
            is_lenient=True,
            checks_names=strict_classname_parsing,
            refuses_unknown=not ignore_extensive_attributes,
            none_is_zero=none_to_zero_for_ints,
        )
        return read(config_class, data, getattr(config_class, "__name__", ""), options)
