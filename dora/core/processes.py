"""What the status of a process means: its state, how long it may be silent, whether it keeps up."""

from dora.schemas.records import ProcessState, Status

USABLE: frozenset[ProcessState] = frozenset({"ready"})
"""Takes work."""
GONE: frozenset[ProcessState] = frozenset({"failed", "stopped"})
"""Reported that it has ended."""
PATIENT: frozenset[ProcessState] = frozenset({"starting", "loading"})
"""Starts or loads weights, and has no time to report meanwhile."""
WORKING: frozenset[ProcessState] = frozenset({"ready", "training", "waiting"})
"""Does its part of the run, or waits for other processes to do theirs."""


def allowed_silence(
    status: Status, *, heartbeat_timeout: float, load_timeout: float, switching: bool = False
) -> float:
    """Seconds after `status` for which its process may report nothing before it counts as lost.

    The longer of both times for one that starts or loads weights, in the background too, or that
    was told to (`switching`); infinite for one that has ended.
    """
    if status.state in GONE:
        return float("inf")
    if switching or status.loading >= 0 or status.state in PATIENT:
        return max(load_timeout, heartbeat_timeout)
    return heartbeat_timeout
