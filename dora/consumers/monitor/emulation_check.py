"""How far behind their clocks the emulated workers of a run are.

Invariant: each worker's own last word counts, and all count alike.
"""

import statistics
from collections.abc import Iterable

from dora.log.presence import ProcessView

# Whether an emulated run measures its schedule, or the machine that emulates.
#
# Invariant: a share is sound only up to the one limit here, whoever asks.


def late_share(processes: Iterable[ProcessView]) -> float | None:
    """Mean lateness of the emulated workers (`emulation_late_share`); None if there are none."""
    shares = [
        process.metrics["emulation_late_share"]
        for process in processes
        if "emulation_late_share" in process.metrics
    ]
    return statistics.fmean(shares) if shares else None
