"""What a process's state says of it.

Invariant: every state of `Status` that a decision depends on is named here once.
"""

from dora.schemas.records import ProcessState

USABLE: frozenset[ProcessState] = frozenset({"ready"})
"""Takes work."""
GONE: frozenset[ProcessState] = frozenset({"failed", "stopped"})
"""Said that it is over."""
PATIENT: frozenset[ProcessState] = frozenset({"starting", "loading"})
"""Has no time to speak, and may be silent for `rollout.load_timeout_seconds`."""
WORKING: frozenset[ProcessState] = frozenset({"ready", "training", "waiting"})
"""Does its part of the run, or waits for others to do theirs."""
