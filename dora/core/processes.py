"""What the state of a process means, and whether an emulated worker keeps its timing."""

from dora.schemas.records import ProcessState

USABLE: frozenset[ProcessState] = frozenset({"ready"})
"""Takes work."""
GONE: frozenset[ProcessState] = frozenset({"failed", "stopped"})
"""Said that it is over."""
PATIENT: frozenset[ProcessState] = frozenset({"starting", "loading"})
"""Has no time to speak, and may be silent for `rollout.load_timeout_seconds`."""
WORKING: frozenset[ProcessState] = frozenset({"ready", "training", "waiting"})
"""Does its part of the run, or waits for others to do theirs."""

LATE_LIMIT = 0.05
"""Largest share of the responses' time by which they may be reported too late."""


def emulation_warning(share: float | None) -> str | None:
    """What is to be said about this lateness (`emulation_late_share`); None if the emulation keeps
    up, or there is none."""
    if share is None or share <= LATE_LIMIT:
        return None
    return (
        f"emulated responses are reported {share:.0%} of their time too late (at most "
        f"{LATE_LIMIT:.0%} is sound): this machine, not the schedule, sets the pace; raise "
        "rollout.emulated.time_scale or rollout.chunk_tokens"
    )
