"""Documents that cannot be used: what is wrong with them, and whether that is an error."""

import logging
from collections import Counter
from typing import Literal, NamedTuple

LOGGER = logging.getLogger(__name__)

OnBadData = Literal["error", "skip"]


class BadDocument(NamedTuple):
    """A document that cannot be used."""

    reason: str
    """A few words, by which such documents are counted."""
    detail: str
    """What is wrong, as a clause."""
    place: str = ""
    """Where in its file the document is."""


class BadDataPolicy:
    """Raises an error at the first unusable document, or skips and counts all of them.

    Args:
        on_bad_data: Which of the two.
    """

    def __init__(self, on_bad_data: OnBadData):
        if on_bad_data not in ("error", "skip"):
            raise ValueError(f'on_bad_data is {on_bad_data!r}, but must be "error" or "skip".')
        self.on_bad_data = on_bad_data
        self.skipped: Counter[str] = Counter()
        """The number of skipped documents, by reason."""

    def handle(self, bad: BadDocument, source: object) -> None:
        """Raise an error with the cause and the place, or count the document."""
        place = ", ".join(filter(None, [str(source), bad.place]))
        if self.on_bad_data == "error":
            raise ValueError(
                f'{place}: {bad.detail}. Fix it, or set on_bad_data="skip" to skip and count such documents.'
            )
        LOGGER.debug("Skipped %s: %s.", place, bad.detail)
        self.skipped[bad.reason] += 1


def check_text(value: object) -> str | BadDocument:
    """Return the text of a document, given as a string or as bytes of UTF-8, or what is wrong with it."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            return not_utf8(error)
    if not isinstance(value, str):
        return BadDocument("no text", f"a {type(value).__name__} is no text")
    if not value:
        return BadDocument("empty document", "the document is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        return BadDocument("no Unicode", "the text has half of a surrogate pair, which is no character")
    return value


def not_utf8(error: UnicodeDecodeError) -> BadDocument:
    """Return the bad document of a decoding error."""
    return BadDocument("no UTF-8", f"this is no text in UTF-8 ({error.reason})")
