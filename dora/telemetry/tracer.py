"""Where the parts of a run say what happened to a group, as spans of its trace.

Invariant: a process has one tracer. Until `use` is called it is one that keeps nothing; whoever has
to compute something for a span asks `active` first. What is told must be over: spans have an end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dora.telemetry.trace_ids import TraceContext

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

    def tell(self, span: Span) -> None:
        """Something happened; returns at once."""

    def close(self) -> None:
        """Send what was told, for a bounded time, and end."""


_current: list[Tracer] = [Tracer()]


def tracer() -> Tracer:
    """The tracer of this process."""
    return _current[0]


def use(one: Tracer) -> None:
    """Make it the tracer of this process."""
    _current[0] = one
