"""Bar charts as SVG, without a plotting library."""

import dataclasses
from collections.abc import Sequence
from html import escape

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 720, 150, 170
BAR_HEIGHT, GROUP_GAP, TITLE_HEIGHT, LEGEND_HEIGHT = 18, 14, 34, 30
COLORS = ("#1f6feb", "#8b949e", "#bf8700", "#1a7f37")
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif' font-size='13'"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a group."""

    series: str
    value: float
    label: str
    """The text at its end."""


def bar_chart(title: str, groups: dict[str, Sequence[Bar]]) -> str:
    """Draw horizontal bars on one scale; the longest bar has the full width.

    Args:
        title: What is shown.
        groups: The bars of each group, from top to bottom.

    Returns:
        The SVG file, readable on light and dark backgrounds.
    """
    series = list(dict.fromkeys(bar.series for bars in groups.values() for bar in bars))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(series)}
    longest = max((bar.value for bars in groups.values() for bar in bars), default=0)
    parts, top = [], TITLE_HEIGHT
    for group, bars in groups.items():
        middle = top + len(bars) * BAR_HEIGHT / 2
        parts.append(_text(LABEL_WIDTH - 10, middle, group, anchor="end"))
        for bar in bars:
            length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) * bar.value / longest if longest else 0
            parts.append(
                f"<rect x='{LABEL_WIDTH}' y='{top + 1}' width='{length:.1f}' height='{BAR_HEIGHT - 2}' rx='2' "
                f"fill='{colors[bar.series]}'/>"
            )
            parts.append(_text(LABEL_WIDTH + length + 6, top + BAR_HEIGHT / 2, bar.label))
            top += BAR_HEIGHT
        top += GROUP_GAP
    left = LABEL_WIDTH
    for name in series:
        parts.append(f"<rect x='{left}' y='{top + 4}' width='12' height='12' rx='2' fill='{colors[name]}'/>")
        parts.append(_text(left + 18, top + 10, name))
        left += 40 + 7 * len(name)
    height = top + LEGEND_HEIGHT
    heading = _text(LABEL_WIDTH, 16, title, weight="600")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"role='img' {FONT}>\n<title>{escape(title)}</title>\n"
        "<style>text { fill: #1f2328 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }</style>\n"
        + "\n".join([heading, *parts])
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' dy='0.35em' text-anchor='{anchor}' font-weight='{weight}'>{escape(text)}</text>"
    )
