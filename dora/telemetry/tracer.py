"""The tracer of a process: what happened to a group, as spans of its trace.

Until `set_tracer` is called it is one that keeps nothing; code that has to compute something for a
span asks `active` first. Names of traces and spans follow from the run and from what they are
about, so they are the same in every process and after every restart, and can be found from the log
alone. W3C Trace Context: https://www.w3.org/TR/trace-context/
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def trace_of(run_id: str, group_id: str) -> str:
    """The trace of a group: 32 hexadecimal digits. `run_id` is that of the ledger's first record,
    so that a run made anew under the same name has other traces."""
    return _digest(f"{run_id}/{group_id}", 16)


def admission_span() -> str:
    """The first span of every trace, on which all others hang."""
    return _digest("admission", 8)


def dispatch_span(trajectory_id: str, attempt: int) -> str:
    """From the command to a worker to its start."""
    return _digest(f"dispatch/{trajectory_id}#{attempt}", 8)


def generation_span(trajectory_id: str, attempt: int) -> str:
    """An attempt while its worker generates."""
    return _digest(f"generation/{trajectory_id}#{attempt}", 8)


def scoring_span(trajectory_id: str, attempt: int) -> str:
    """From an attempt's last token to its record."""
    return _digest(f"scoring/{trajectory_id}#{attempt}", 8)


def training_span(group_id: str) -> str:
    """The group in the step that trained it, or set it aside."""
    return _digest(f"training/{group_id}", 8)


def _digest(text: str, size: int) -> str:
    digest = hashlib.sha256(text.encode()).digest()[:size]
    return digest.hex() if any(digest) else "01".rjust(2 * size, "0")  # all zeros is no id


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace; `sampled` says whether its spans are exported."""

    trace: str
    span: str
    sampled: bool

    def __str__(self) -> str:
        """As the `traceparent` header."""
        return f"00-{self.trace}-{self.span}-{'01' if self.sampled else '00'}"

    def at(self, span: str) -> "TraceContext":
        """Another place in the same trace."""
        return TraceContext(self.trace, span, self.sampled)


def parse_traceparent(header: bytes | None) -> TraceContext | None:
    """What a `traceparent` header says; None for one that says nothing (absent, malformed, or all
    zeros), as the specification wants it."""
    match = None if header is None else _HEADER.fullmatch(header)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not trace.strip(b"0"):
        return None
    if not span.strip(b"0"):
        return None
    return TraceContext(trace.decode(), span.decode(), bool(int(flags, 16) & _SAMPLED))


Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Event:
    """Something at one moment of a span; Unix time in milliseconds."""

    name: str
    at_ms: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start_ms` to `end_ms` (Unix time), below span `parent` of the same
    trace (empty: below none); `links` are other places it follows from."""

    name: str
    context: TraceContext
    parent: str
    start_ms: float
    end_ms: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[Event] = ()
    links: Sequence[TraceContext] = ()
    error: str = ""


class Tracer:
    """The tracer of a process whose traces are off."""

    active = False

    def emit(self, span: Span) -> None:
        """Report a span that is over; returns at once."""

    def close(self) -> None:
        """Send what was emitted, for a bounded time, and end."""


_current: list[Tracer] = [Tracer()]


def tracer() -> Tracer:
    """The tracer of this process."""
    return _current[0]


def set_tracer(one: Tracer) -> None:
    """Make it the tracer of this process."""
    _current[0] = one
