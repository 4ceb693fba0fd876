"""Attempts in the hands of workers, and how a worker names them.

Invariant: `parse_holding(holding(t, a)) == (t, a)` for every trajectory id and attempt.
"""

from dataclasses import dataclass


def holding(trajectory_id: str, attempt: int) -> str:
    """How a worker names an attempt in `Status.running`."""
    return f"{trajectory_id}#{attempt}"


def parse_holding(text: str) -> tuple[str, int]:
    """Trajectory id and attempt of an entry of `Status.running`; ValueError when malformed."""
    trajectory_id, separator, attempt = text.rpartition("#")
    if not separator or not attempt.isdecimal():
        raise ValueError(f"{text!r} names no attempt: it must read <trajectory id>#<attempt>")
    return trajectory_id, int(attempt)


@dataclass(frozen=True, slots=True)
class Hold:
    """An attempt in the hands of a worker; `moving`: it was told to hand it over."""

    worker: str
    incarnation: str
    attempt: int
    sent_at: float
    moving: bool = False
