"""Matplotlib figures as SVG that lives in a page.

Invariant: a chart has its own ids, takes its colours from the page's CSS variables and its fonts
from the page, says in words what it shows, and refers to nothing outside itself. Text from records
is text in it, never markup or mathematics.
"""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


def markup(drawn: Any, identity: str, title: str, description: str) -> str:
    """The figure as an `<svg>` element whose ids all begin with `identity`; call it within the
    `figure` block."""
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
    return ET.tostring(root, encoding="unicode")


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
