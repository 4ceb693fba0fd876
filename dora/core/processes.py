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


LATE_LIMIT = 0.05
"""Largest share of the responses' time by which they may be reported too late."""


def emulation_warning(share: float | None) -> str | None:
    """A warning about this lateness (`emulation_late_share`); None if the emulation keeps up, or
    nothing is emulated."""
    if share is None or share <= LATE_LIMIT:
        return None
    return (
        f"emulated responses are reported {share:.0%} of their time too late (at most "
        f"{LATE_LIMIT:.0%} is sound): this machine, not the schedule, sets the pace; raise "
        "rollout.emulated.time_scale or rollout.chunk_tokens"
    )
