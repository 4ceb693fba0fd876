"""Charts and bars of characters.

A chart has the lines and at most the columns that it is given, whatever its values are;
every character of it has a stand-in for terminals that know ASCII only.
"""

import math
from collections.abc import Sequence

from rich.text import Text

HUGE = 1e300
LEVELS = " ▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(
    {
        **dict(zip(LEVELS, " __.-=+*#", strict=True)),
        "░": ".",
        "▒": "+",
        "→": ">",
        "·": "|",
        "…": "~",
        "⏎": "/",
    }
)


def to_ascii(text: Text) -> Text:
    """The same text and styles, each character that ASCII lacks replaced."""
    plain = text.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return Text(plain, style=text.style, spans=list(text.spans), no_wrap=True)


def condensed(values: Sequence[float], columns: int) -> list[float]:
    """Means of consecutive values, at most `columns`; what is no finite number is left out."""
    finite = _finite(values)
    count = min(columns, len(finite))
    parts = [
        finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)
    ]
    return [math.fsum(part) / len(part) for part in parts]


def chart(
    label: str,
    values: Sequence[float],
    width: int,
    height: int,
    style: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> list[Text]:
    """The values over time in `height` lines, with the first and the last one beside them.

    The scale goes from `low` to `high`, or over the values. With one line: a sparkline.
    """
    finite = _finite(values)
    head = f"{label:8}"
    if not finite:
        return [Text(f"{head} -")] + [Text("")] * (height - 1)
    ends = f" {_number(finite[0])} → {_number(finite[-1])}"
    if height == 1:
        columns = max(1, width - len(head) - 22)
        points = condensed(finite, columns)
        (cells,) = _cells(points, 1, *_scale(points, low, high))
        return [Text.assemble(head, (cells, style), ends)]
    columns = max(1, width - 10)
    points = condensed(finite, columns)
    # few steps are drawn wide
    points = [point for point in points for _ in range(columns // len(points))]
    bottom, top = _scale(points, low, high)
    rows = _cells(points, height - 1, bottom, top)
    lines = [Text.assemble((label, "bold"), ends)]
    for index, row in enumerate(rows):
        mark = _number(top) if index == 0 else _number(bottom) if index == len(rows) - 1 else ""
        lines.append(Text.assemble((f"{mark:>8} ", "dim"), (row, style)))
    return lines


def bar(shares: Sequence[tuple[float, str]], width: int) -> Text:
    """Shares of the whole, one after the other: full blocks for the first, shaded for others."""
    text = Text()
    used = 0
    total = 0.0
    for index, (share, style) in enumerate(shares):
        total = min(1.0, total + max(0.0, share))
        cells = max(0, round(total * width) - used)
        if share > 0 and not cells and used < width:
            cells = 1  # little is more than nothing
        text.append(("█" if index == 0 else "▒") * cells, style=style)
        used += cells
    return text.append("░" * (width - used), style="dim")


def _finite(values: Sequence[float]) -> list[float]:
    """Those that can be drawn: sums and differences of what is left do not overflow."""
    return [max(-HUGE, min(HUGE, value)) for value in values if math.isfinite(value)]


def _scale(points: Sequence[float], low: float | None, high: float | None) -> tuple[float, float]:
    bottom = min(points) if low is None else min(low, *points)
    top = max(points) if high is None else max(high, *points)
    return bottom, top


def _cells(points: Sequence[float], rows: int, bottom: float, top: float) -> list[str]:
    """Rows of block characters, the uppermost first; the lowest value has the lowest mark."""
    steps = 8 * rows
    span = top - bottom
    heights = [
        1 + round((value - bottom) / span * (steps - 1)) if span > 0 else max(1, steps // 2)
        for value in points
    ]
    return [
        "".join(LEVELS[max(0, min(8, height - 8 * row))] for height in heights)
        for row in range(rows - 1, -1, -1)
    ]


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"
