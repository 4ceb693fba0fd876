"""Numbers as people read them.

Invariant: None reads as a dash; units are part of the text.
"""

from datetime import UTC, datetime

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
