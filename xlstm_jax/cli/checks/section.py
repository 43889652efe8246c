"""The result of a check, as plain values to print and to save."""

import dataclasses
from typing import Any

PASSED, FAILED, WARNING = "✓", "✗", "!"
"""The first character of a cell that holds a verdict; only `FAILED` counts as a problem."""


@dataclasses.dataclass
class Section:
    """The table of a check, with its problems and notes."""

    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row, padded with empty cells."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def as_dict(self) -> dict[str, Any]:
        """Return the section as a dictionary for JSON."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "problems": self.problems, "notes": self.notes}


def first_line(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
