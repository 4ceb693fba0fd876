"""Matplotlib figures as SVG that lives in a page.

A chart has its own ids, takes its colours and fonts from the page, describes in words what it
shows, and refers to nothing outside itself. Text from records stays text in it, never markup or
mathematics.
"""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

# Numbers as people read them, with their units; None is a dash.

NOTHING = "–"


def compact(value: float | None, digits: int = 3) -> str:
    """`1.24M`, `15.3k`, `0.0123`, `1.2e-05`."""
    if value is None:
        return NOTHING
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.{digits}g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def integer(value: float | None) -> str:
    """`12,345`."""
    return NOTHING if value is None else f"{value:,.0f}"


def percent(share: float | None, digits: int = 1) -> str:
    """`12.3 %` of 0.123."""
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 12 min`, `2 d 4 h`."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float | None) -> str:
    """`1.2 GiB` of a number of bytes."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def moment(time_ms: int) -> str:
    """`2025-01-31 12:00:05 UTC` of Unix milliseconds."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which a span reads well, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    if seconds < 3 * 3600:
        return 60.0, "minutes"
    if seconds < 3 * 86400:
        return 3600.0, "hours"
    return 86400.0, "days"


def short(name: str, most: int = 24) -> str:
    """A name that fits a chart: its middle is left out where it is long."""
    return name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}"


SERIES = ("series-1", "series-2", "series-3", "series-4")
VERSIONS = tuple(f"version-{number}" for number in range(6))
_NAMES = ("ink", "muted", "grid", "surface", *SERIES, *VERSIONS)
PAINT = {name: f"#01f{number:03x}" for number, name in enumerate(_NAMES)}
"""Colours to draw with: each stands for the CSS variable of its name."""
_VARIABLE = {code: f"var(--{name})" for name, code in PAINT.items()}
_CODE = re.compile(r"#01f[0-9a-f]{3}")
_FONT_FAMILY = re.compile(r"\s*font-family:[^;]*;?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_FONT_SIZE = 12

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": _FONT_SIZE,
    "axes.titlesize": _FONT_SIZE,
    "axes.labelsize": _FONT_SIZE,
    "legend.fontsize": _FONT_SIZE,
    "xtick.labelsize": _FONT_SIZE,
    "ytick.labelsize": _FONT_SIZE,
    "text.color": PAINT["ink"],
    "axes.labelcolor": PAINT["muted"],
    "xtick.color": PAINT["muted"],
    "ytick.color": PAINT["muted"],
    "axes.edgecolor": PAINT["grid"],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": PAINT["grid"],
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 1.0,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "xtick.major.width": 1.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart: `svg` is markup, the rest text. `wide` ones scroll in their box on phones."""

    identity: str
    title: str
    description: str
    svg: str
    note: str = ""
    wide: bool = False


@contextmanager
def figure(width: float = 400, height: float = 250) -> Iterator[Any]:
    """A figure of `width` x `height` CSS pixels in the page's style."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def chart_of(
    drawn: Any,
    identity: str,
    title: str,
    description: str,
    *,
    note: str = "",
    wide: bool = False,
) -> Chart:
    """The figure as a chart, an `<svg>` element whose ids all begin with `identity`; call it within
    the `figure` block."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ET.fromstring(buffer.getvalue())
    for parent in root.iter():
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        for name in list(element.attrib):
            value = element.attrib.pop(name)
            element.attrib[_local(name)] = _attribute(_local(name), value, identity)
        if element.text and not element.text.strip():
            element.text = None
        if element.tail and not element.tail.strip():
            element.tail = None
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {
        "role": "img",
        "aria-labelledby": f"{identity}-title {identity}-desc",
        "focusable": "false",
    }
    for number, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(tag, {"id": f"{identity}-{tag}"})
        element.text = text
        root.insert(number, element)
    svg = ET.tostring(root, encoding="unicode")
    return Chart(identity, title, description, svg, note, wide)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _attribute(name: str, value: str, identity: str) -> str:
    if name == "id":
        return f"{identity}-{value}"
    if name == "href":
        return f"#{identity}-{value.removeprefix('#')}"
    if name == "d":
        return _DECIMALS.sub(r"\1", " ".join(value.split()))
    value = _REFERENCE.sub(rf"url(#{identity}-\1)", value)
    if name == "style":
        value = _FONT_FAMILY.sub("", value)
        value = _CODE.sub(lambda found: _VARIABLE.get(found[0], found[0]), value)
    return value
