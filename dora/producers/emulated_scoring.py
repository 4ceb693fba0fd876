"""Rewards for the emulated engine, whose responses are noise that no verifier could judge.

Invariant: the reward of a trajectory depends on its id alone, so that a second attempt gets the
same one; over many trajectories the share of successes is the configured one.
"""

import hashlib
from typing import Any

from dora.producers.scoring import Scored


class EmulatedScorer:
    """Stands where a `Scorer` stands when the engine is emulated."""

    def __init__(self, success_rate: float) -> None:
        self._success_rate = success_rate
        self._scored: list[Scored] = []
        self.verifier_seconds = 0.0
        """As a `Scorer` says it: nothing is verified here."""

    @property
    def pending(self) -> int:
        """Responses submitted and not yet polled."""
        return len(self._scored)

    def submit(self, key: str, response: str, item: dict[str, Any]) -> None:
        """Draws the reward, 1 or 0, from the key."""
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        drawn = int.from_bytes(digest, "little") / 2**32
        self._scored.append(Scored(key, float(drawn < self._success_rate)))

    def poll(self) -> list[Scored]:
        """Everything submitted since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def close(self) -> None:
        """Nothing to end."""
