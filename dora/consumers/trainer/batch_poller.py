"""Waiting for the next step: for a whole batch, or for one group after another of a streamed step.

Invariant: while the trainer waits it reads the log, says that it lives, and sets groups aside that
would fill the window; it waits for a bounded time and then says what is missing. What a streamed
step has computed is lost with it if it is left before its batch is complete, and nothing else is:
nothing of it is committed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dora.config import Config
from dora.consumers.learner.base import Learning
from dora.consumers.trainer.batch_builder import Decision, Planner, Prepared
from dora.consumers.trainer.heartbeat import Heartbeat
from dora.core.state import RunState
from dora.errors import DeadlineError
from dora.schemas.records import GroupRef

SET_ASIDE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch to be trained."""

    decision: Decision
    computed_seconds: float = 0.0
    """Spent on the groups of a streamed step already."""
    streamed_seconds: float = 0.0
    """The part of it that was spent before the last group was taken."""


class BatchWait:
    """Waits over `planner`, whose fold of the log is `state`.

    `poll` reads on for at most so many seconds, `check` raises where the trainer cannot go on, and
    `set_aside` commits that groups are set aside.
    """

    def __init__(
        self,
        config: Config,
        planner: Planner,
        state: RunState,
        heartbeat: Heartbeat,
        *,
        poll: Callable[[float], None],
        check: Callable[[], None],
        set_aside: Callable[[tuple[GroupRef, ...]], None],
    ) -> None:
        self._timeout = config.trainer.batch_timeout_seconds
        self._planner = planner
        self._state = state
        self._heartbeat = heartbeat
        self._poll = poll
        self._check = check
        self._set_aside = set_aside

    def batch(self, stop: threading.Event) -> Ready | None:
        """Poll until a batch is admissible; None if `stop` was set first.

        Raises DeadlineError after `trainer.batch_timeout_seconds`.
        """
        decision = self._until(stop, self._planner.decide)
        return None if decision is None else Ready(decision)

    def streamed(self, stop: threading.Event, learner: Learning) -> Ready | None:
        """Compute on groups as they finish, until they are a batch; None if `stop` was set first.

        Raises DeadlineError if none can be taken for `trainer.batch_timeout_seconds`, and what
        `learner` raises.
        """
        taken: list[Prepared] = []
        computed = last = 0.0
        learner.begin(self._state.newest)
        while True:
            decision = self._until(stop, lambda: self._planner.stream(taken))
            if decision is None:
                return None
            if decision.following is None:
                return Ready(decision, computed, computed - last)
            began = time.monotonic()
            learner.add(decision.following.samples)
            taken.append(decision.following)
            last = time.monotonic() - began
            computed += last

    def _until(self, stop: threading.Event, decide: Callable[[], Decision]) -> Decision | None:
        since = aside_at = time.monotonic()
        decided_on: tuple[int, int, int, int] | None = None
        decision = None
        self._poll(0.0)
        while not stop.is_set():
            self._check()
            state = self._state
            known = (state.newest, state.complete_total, state.outstanding_total, state.known_to)
            # Records of trajectories come by the thousand, and few of them complete a group.
            if decision is None or known != decided_on:
                decision, decided_on = decide(), known
            if decision.blocked is None:
                return decision
            now = time.monotonic()
            if decision.set_aside and now - aside_at >= SET_ASIDE_SECONDS:
                # Committed by itself, or an environment where all fails would fill the window.
                self._set_aside(decision.set_aside)
                aside_at = now
                continue
            if now - since > self._timeout:
                raise DeadlineError(
                    f"no batch became admissible in {self._timeout:g} s at version "
                    f"{self._state.newest}: {decision.blocked.reason} "
                    f"({self._planner.waiting_for()})",
                    hint="See which processes live with `dora status`; a longer wait is "
                    "trainer.batch_timeout_seconds.",
                )
            self._heartbeat.metrics = {
                "outstanding": float(self._state.outstanding_total),
                "complete_groups": float(self._state.complete_total),
            }
            self._heartbeat.say("waiting", decision.blocked.reason)
            self._poll(SET_ASIDE_SECONDS)
        return None
