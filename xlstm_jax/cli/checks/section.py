"""What a check finds, as values that can be shown and stored."""

import dataclasses
from typing import Any

PASSED, FAILED, WARNING = "✓", "✗", "!"
"""How a cell begins that is a verdict; only `FAILED` is a problem."""


@dataclasses.dataclass
class Section:
    """A table of what was found, what is wrong with it, and what is worth knowing."""

    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row; missing cells are empty."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON has it."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "problems": self.problems, "notes": self.notes}


def first_line(error: Exception) -> str:
    """Say in a line what went wrong."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
