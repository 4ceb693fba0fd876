"""Whether an emulated run measures its schedule, or the machine that emulates.

Invariant: a share is sound only up to the one limit here, whoever asks.
"""

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
