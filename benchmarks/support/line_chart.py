"""Line charts as SVG, without a plotting library."""

from collections.abc import Sequence
from html import escape

COLORS = ("#1f6feb", "#bf8700", "#1a7f37", "#8b949e")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 16, 52, 44
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif' font-size='13'"
STYLE = (
    "<style>text { fill: #1f2328 } .grid { stroke: #8b949e; stroke-opacity: 0.3 } "
    "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }</style>"
)


def line_chart(
    title: str, x_label: str, y_label: str, lines: dict[str, Sequence[tuple[float, float]]], marks: Sequence[float] = ()
) -> str:
    """Draw lines over two linear axes; the y axis leaves out the highest tenth of all values.

    Args:
        title: What is shown.
        x_label: The quantity of the x axis, which starts at zero.
        y_label: The quantity of the y axis.
        lines: The points of each line, by the name in the legend.
        marks: Values of x with a dotted vertical line.

    Returns:
        The SVG file, readable on light and dark backgrounds.
    """
    values = sorted(y for points in lines.values() for _, y in points)
    low, high = values[0], values[int(0.9 * (len(values) - 1))]
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    end = max(x for points in lines.values() for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / end
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - min(y, high)) / (high - low)

    parts = [_text(LEFT, 18, title, weight="600")]
    for part in range(5):
        y = low + (high - low) * part / 4
        _, height = place(0, y)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{height:.1f}' y2='{height:.1f}'/>")
        parts.append(_text(LEFT - 6, height, f"{y:.2f}", anchor="end"))
        x = end * part / 4
        parts.append(_text(place(x, low)[0], HEIGHT - BOTTOM + 14, f"{x:,.0f}", anchor="middle"))
    for x in marks:
        across, _ = place(x, low)
        parts.append(
            f"<line class='grid' stroke-dasharray='3 3' x1='{across:.1f}' x2='{across:.1f}' y1='{TOP}' "
            f"y2='{HEIGHT - BOTTOM}'/>"
        )
    left = LEFT
    for index, (name, points) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f"<polyline fill='none' stroke='{color}' stroke-width='1.8' points='{path}'/>")
        parts.append(f"<rect x='{left}' y='32' width='14' height='4' fill='{color}'/>")
        parts.append(_text(left + 20, 34, name))
        left += 44 + 7 * len(name)
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, 18, y_label, anchor="end"))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"role='img' {FONT}>\n<title>{escape(title)}</title>\n{STYLE}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' dy='0.35em' text-anchor='{anchor}' font-weight='{weight}'>{escape(text)}</text>"
    )
