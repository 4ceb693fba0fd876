"""The trainer of a simulated run: the real state and the real batch rule, and time for the rest.

It knows of a trajectory or an admission only when the record has reached it, and takes a
batch only as `core.window.pick_batch` allows or, group by group, as `core.streaming.next_group`
does.
"""

from collections.abc import Callable

from dora.core.groups import finished_facts
from dora.core.state import RunState
from dora.core.streaming import next_group
from dora.core.window import Blocked, Candidate, pick_batch
from dora.schemas.records import (
    Admission,
    GroupRef,
    ProcessState,
    Record,
    SampleRef,
    Status,
    Step,
    Trajectory,
)
from dora.simulation.bus import Events, Mailbox
from dora.simulation.measures import Tally, TrainedStep
from dora.simulation.records import RUN
from dora.simulation.scenario import Scenario


class SimulatedTrainer:
    """Trains one batch after the other; `write` puts its records into the log."""

    def __init__(
        self, scenario: Scenario, events: Events, tally: Tally, write: Callable[[Record], None]
    ) -> None:
        rules = scenario.rules
        self.state = RunState(rules.window, rules.group_size)
        self.steps: list[TrainedStep] = []
        self.inbox = Mailbox(events, scenario.control_seconds, scenario.tick_seconds, self._read)
        self._scenario = scenario
        self._events = events
        self._tally = tally
        self._write = write
        self._candidates: dict[str, Candidate] = {}
        self._taken: list[Candidate] = []  # of a streamed step
        self._waited = 0.0
        self._blocked_by: int | None = None
        self._waits_since: float | None = None

    def begin(self) -> None:
        """Version 0 is there."""
        self.state.start()
        self._wait()

    def _read(self) -> None:
        due = False
        for record, offset in self.inbox.arrived():
            if isinstance(record, Admission):
                self.state.admit(record)
                # a step that ends early at its budget waits until all older versions are known
                due = due or self.state.window.tokens_per_step is not None
            elif isinstance(record, Trajectory):
                facts = finished_facts(record, 0, offset)
                if self.state.finish(facts) == "counted":
                    due = self._note(record.group_id) or due
        if due and self._waits_since is not None:
            self._try()

    def _note(self, group_id: str) -> bool:
        """Whether a batch may have become possible by a finished sample of the group."""
        group = self.state.groups.get(group_id)
        if group is None or not group.complete or group.purpose != "train":
            return False
        self._candidates[group_id] = group.candidate
        window = self.state.window
        if self._scenario.streamed:
            return True
        if window.tokens_per_step is None and len(self._candidates) < window.groups_per_step:
            return False
        # newer groups do not help a batch that waits for older ones
        return self._blocked_by is None or group.version <= self._blocked_by

    def _wait(self) -> None:
        self._listen()
        self._try()

    def _listen(self) -> None:
        self._waits_since = self._events.now
        self.inbox.listen(True)
        self._say("waiting")

    def _try(self) -> None:
        state = self.state
        if state.newest >= self._scenario.rules.steps:
            return
        if self._scenario.streamed:
            self._stream()
            return
        picked = pick_batch(
            state.window,
            state.newest,
            self._candidates.values(),
            state.outstanding,
            state.known_to,
        )
        if isinstance(picked, Blocked):
            self._blocked_by = picked.version
            return
        self._blocked_by = None
        began = self._events.now
        waited = self._start()
        scenario = self._scenario
        tokens = sum(candidate.tokens for candidate in picked)
        seconds = scenario.training_seconds + scenario.training_seconds_per_token * tokens
        until = began + seconds + scenario.publish_seconds
        self._events.at(until, self._commit, picked, began - waited, began)

    def _start(self) -> float:
        """Training goes on; returns for how long it did not."""
        now = self._events.now
        if self._waits_since is None:
            return 0.0
        waited, self._waits_since = now - self._waits_since, None
        self.inbox.listen(False)
        self._say("training")
        self._tally.trains(True, now)
        return waited

    def _stream(self) -> None:
        """Take one more group of a streamed step, or end it."""
        state, scenario, now = self.state, self._scenario, self._events.now
        following = next_group(
            state.window,
            state.newest,
            self._taken,
            self._candidates.values(),
            state.outstanding,
            state.known_to,
        )
        if isinstance(following, Blocked):
            if self._waits_since is None:
                self._tally.trains(False, now)
                self._listen()
            return
        self._waited += self._start()
        if following is None:
            batch, self._taken = tuple(self._taken), []
            waited, self._waited = self._waited, 0.0
            until = now + scenario.publish_seconds
            self._events.at(until, self._commit, batch, now - waited, now)
            return
        self._taken.append(following)
        seconds = scenario.training_seconds / state.window.groups_per_step
        seconds += scenario.training_seconds_per_token * following.tokens
        self._events.at(now + seconds, self._go_on)

    def _go_on(self) -> None:
        self._read()
        self._stream()

    def _commit(self, batch: tuple[Candidate, ...], waited_at: float, began: float) -> None:
        self._read()
        state, now = self.state, self._events.now
        groups = [state.groups[candidate.group_id] for candidate in batch]
        step = Step(
            RUN, "step", len(self.steps), state.newest, state.newest + 1,
            tuple(
                GroupRef(
                    group.group_id,
                    group.ordinal,
                    group.version,
                    tuple(
                        SampleRef(sample, facts.attempt, facts.partition, facts.offset)
                        for sample, facts in group.samples.items()
                    ),
                )
                for group in groups
            ),
            (), {}, "", None, "trainer", int(now * 1000),
        )  # fmt: skip
        tokens = sum(self._candidates.pop(candidate.group_id).tokens for candidate in batch)
        staleness = tuple(state.newest - candidate.version for candidate in batch)
        self.steps.append(TrainedStep(waited_at, began, now, tokens, staleness))
        state.commit(step)
        self._write(step)
        self._tally.trains(False, now)
        self._wait()

    def _say(self, what: ProcessState) -> None:
        now_ms = int(self._events.now * 1000)
        self._write(
            Status(RUN, "trainer", "trainer", "trainer", what, now_ms, version=self.state.newest)
        )
