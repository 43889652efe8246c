"""HTML in which text can do no harm: whatever is not `Markup` is escaped."""

import html
import json
from typing import Any

_VOID = {"meta", "link", "input"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | int | bool | None) -> Markup:
    """Build an element.

    Args:
        name: The name of the element.
        children: Elements, and text, which is escaped; `None` is left out.
        attributes: Its attributes. Underscores are hyphens, but one at the end is dropped, as in `class_`. `True` is
            an attribute without a value; `False` and `None` are left out.

    Returns:
        The element.
    """
    opened = name + "".join(_attribute(key, value) for key, value in attributes.items())
    content = "".join(escaped(child) for child in children if child is not None)
    return Markup(f"<{opened}>" if name in _VOID else f"<{opened}>{content}</{name}>")


def joined(*children: str | None) -> Markup:
    """Put elements and text one after the other."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(text: str) -> Markup:
    """Return text as HTML, and HTML as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))


def script_json(data: Any) -> Markup:
    """Write data for a `<script type="application/json">`, which nothing in it can end."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _attribute(key: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = key.removesuffix("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'
