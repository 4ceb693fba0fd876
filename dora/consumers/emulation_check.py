"""Whether an emulated run measures its schedule, or the machine that emulates.

Invariant: a run whose devices are held up by their driver is never called sound: the share of time
by which ended responses came too late is measured by each worker and looked at here.
"""

import statistics
from collections.abc import Iterable

from dora.consumers.process_view import ProcessView

LATE_LIMIT = 0.05
"""Largest share of the responses' time by which they may be reported too late."""


def late_share(processes: Iterable[ProcessView]) -> float | None:
    """Mean lateness of the emulated workers (`emulation_late_share`); None if there are none."""
    shares = [
        process.metrics["emulation_late_share"]
        for process in processes
        if "emulation_late_share" in process.metrics
    ]
    return statistics.fmean(shares) if shares else None


def emulation_warning(share: float | None) -> str | None:
    """What is to be said about this lateness; None if the emulation keeps up."""
    if share is None or share <= LATE_LIMIT:
        return None
    return (
        f"emulated responses are reported {share:.0%} of their time too late (at most "
        f"{LATE_LIMIT:.0%} is sound): this machine, not the schedule, sets the pace; raise "
        "rollout.emulated.time_scale or rollout.chunk_tokens"
    )
