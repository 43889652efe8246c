"""Safe HTML generation: all text that is not `Markup` is escaped."""

import html
import json
from typing import Any

_VOID = {"meta", "link", "input"}


class Markup(str):
    """A string of trusted HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | int | bool | None) -> Markup:
    """Build an element.

    Args:
        name: The name of the element.
        children: Elements, or text, which is escaped; `None` is skipped.
        attributes: The attributes. Underscores become hyphens; a trailing one is dropped, as in `class_`. `True` gives
            an attribute without a value; `False` and `None` are skipped.

    Returns:
        The element.
    """
    opened = name + "".join(_attribute(key, value) for key, value in attributes.items())
    content = "".join(escaped(child) for child in children if child is not None)
    return Markup(f"<{opened}>" if name in _VOID else f"<{opened}>{content}</{name}>")


def joined(*children: str | None) -> Markup:
    """Concatenate elements and text; text is escaped."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(text: str) -> Markup:
    """Escape text; return `Markup` unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))


def script_json(data: Any) -> Markup:
    """Serialise data for a `<script type="application/json">`, so that no string in it can close the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _attribute(key: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = key.removesuffix("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'
