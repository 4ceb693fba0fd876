"""Serves the recording of one run to another run's trainer, in place of live workers.

The process holds no state of its own. What it wrote before is read from the new run's log at start,
and everything it adds goes there in transactions under the coordinator's id. So it may be ended and
started again at any moment without losing or doubling a record, and two of them cannot write at
once. Groups start in the recorded order under their recorded version, never before the new run's
trainer has announced it and never beyond the window.
"""

import heapq
import itertools
import json
import logging
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from dora.bus.reader import BEGINNING, END, LogReader, Message
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.identity import differences
from dora.core.processes import GONE
from dora.core.recorded_order import startable, stuck
from dora.core.ring import JOURNAL, partition, trajectory_id
from dora.core.scheduling.workers import lease_name
from dora.core.state import finished_facts
from dora.errors import DeadlineError, RunError
from dora.log.continuation import recorded_start
from dora.log.ledger import new_state
from dora.log.status_reporter import StatusReporter
from dora.producers.replay.recording import ChunkKey, Recorded, chunk_key
from dora.schemas.records import (
    Admission,
    Chunk,
    ProcessState,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

log = logging.getLogger(__name__)

WORKER = "replay"
POLL_SECONDS = 0.05
READ_SECONDS = 600.0
RECORDS_AT_ONCE = 1000
_RUNNING_SHOWN = 1000
_Messages = Generator[Message, None, None]
_FREE = ("run.", "trainer.", "evaluation.")


@dataclass(frozen=True, slots=True)
class ServingReport:
    """What came of it. Counts are of the whole new run, what earlier servings wrote included."""

    run: str
    source: str
    outcome: str
    version: int
    recorded_steps: int
    groups: int
    recorded_groups: int
    trajectories: int
    without_chunks: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class ReplayServer:
    """Serves `recording` as the run of `config`, whose topics exist.

    `speed` 1 is as recorded, infinite at once. After `wait` seconds without a word from a trainer
    it gives up.
    """

    def __init__(
        self,
        recording: Recorded,
        config: Config,
        settings: ClusterSettings,
        *,
        speed: float,
        wait: float,
    ) -> None:
        self._recording = recording
        self._config = config
        self._settings = settings
        self._speed = speed
        self._wait = wait
        self._run = config.run.name
        self._topics = RunTopics(self._run)
        self._state = new_state(config)
        self._next = 0  # index of the next admission
        self._admitted: set[str] = set()
        self._due: list[tuple[float, int, Chunk | Trajectory]] = []
        self._order = itertools.count()
        self._written: set[str] = set()  # trajectories
        self._chunks: set[ChunkKey] = set()  # written before this process began
        self._target: int | None = None
        self._trainer_seen_at = self._begun_at = time.monotonic()
        # Before this process takes over from a running coordinator: what is refused ends nothing.
        started = recorded_start(self._run, settings)
        if started is not None:
            self._check_same_kind(started)
        self._transactions = TransactionalWriter(
            settings,
            f"{self._run}.coordinator",
            client_id="replay",
            transaction_timeout=config.kafka.transaction_timeout_seconds,
            partitions=self._places(),
        )
        self._reader = LogReader(settings, client_id=f"{self._run}.replay")
        self._writer = LogWriter(settings, client_id="replay")
        self._coordinator = StatusReporter(config, self._writer, "coordinator", "coordinator")
        self._worker = StatusReporter(
            config, self._writer, WORKER, "rollout", incarnation=self._coordinator.incarnation
        )

    def _places(self) -> list[tuple[str, int]]:
        topics = self._topics
        numbers = range(self._config.window.ring * self._config.kafka.lanes)
        versioned = [(name, n) for name in (topics.chunks, topics.trajectories) for n in numbers]
        return [(topics.dispatch, JOURNAL), *versioned]

    def serve(self, stop: threading.Event) -> ServingReport:
        """Serve until the recording is used up, the trainer has done its steps, or `stop` is set.

        Raises RunError if the new run was not served from this recording so far, is another kind of
        run, or took other decisions than the recorded one so that it cannot go on; DeadlineError if
        no trainer is heard; FencedError if another process serves this run.
        """
        outcome: str | None = None
        state: ProcessState = "failed"
        try:
            self._rebuild()
            while outcome is None:
                self._on_messages(self._reader.poll(timeout=self._pause()))
                self._start_groups()
                self._write_due()
                if self._next < len(self._recording.admissions):  # while the trainer trains
                    self._recording.records(self._recording.admissions[self._next])
                if self._coordinator.due:
                    self._report("ready", self._progress())
                    self._writer.poll()
                outcome = "stopped; started again it goes on" if stop.is_set() else self._ended()
            state = "stopped"
        finally:
            self._report(state, outcome or "ended by an error")
            self._transactions.close()
            self._reader.close()
            self._writer.close()
        return ServingReport(
            run=self._run,
            source=self._recording.source,
            outcome=outcome,
            version=max(self._state.newest, 0),
            recorded_steps=self._recording.steps,
            groups=self._next,
            recorded_groups=len(self._recording.admissions),
            trajectories=len(self._written),
            without_chunks=len(self._recording.without_chunks),
            seconds=time.monotonic() - self._begun_at,
        )

    def _rebuild(self) -> None:
        """Take what the new run's log holds already, and schedule what it lacks."""
        topics = self._topics
        versioned = range(self._config.window.ring * self._config.kafka.lanes)
        with LogReader(self._settings, client_id=f"{self._run}.replay") as reader:
            reader.assign({(topics.chunks, number): BEGINNING for number in versioned})
            for message in reader.read_to_end(READ_SECONDS):
                if isinstance(message.value, Chunk):
                    self._chunks.add(chunk_key(message.value))
        self._reader.assign(
            {
                (topics.steps, 0): BEGINNING,
                (topics.dispatch, JOURNAL): BEGINNING,
                (topics.workers, 0): END,  # what a trainer that has gone wanted is over
                **{(topics.trajectories, number): BEGINNING for number in versioned},
            }
        )
        # closed before the reader is, also where a record ends the serving
        with closing(cast(_Messages, self._reader.read_to_end(READ_SECONDS))) as messages:
            self._on_messages(messages)
        for admission in self._recording.admissions[: self._next]:
            samples = range(admission.group_size)
            ids = [trajectory_id(admission.group_id, sample) for sample in samples]
            if not self._written.issuperset(ids):
                self._schedule(admission)
        if self._next:
            log.info("%s goes on: %d groups were served before", self._run, self._next)
        self._trainer_seen_at = time.monotonic()

    def _on_messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            try:
                self._on_message(message)
            except ValueError as error:
                raise RunError(f"{message.place} contradicts the log before it: {error}") from error

    def _on_message(self, message: Message) -> None:
        match message.value:
            case RunStarted() as started:
                self._check_same_kind(started)
                self._state.start()
            case Step() as step:
                self._trainer_seen_at = time.monotonic()
                self._state.commit(step)
                if step.kind == "step":
                    log.info("version %d: %s", step.version_out, self._progress())
            case Admission() as admission:
                self._on_admission(admission, message)
            case Trajectory() as trajectory:
                self._written.add(trajectory.trajectory_id)
                self._state.finish(finished_facts(trajectory, message.partition, message.offset))
            case Status(role="trainer") as status if status.state not in GONE:
                self._trainer_seen_at = time.monotonic()
                self._target = int(status.metrics.get("steps_target", 0)) or self._target
            case _:
                pass

    def _check_same_kind(self, started: RunStarted) -> None:
        recorded = json.loads(self._recording.identity)
        found = differences(recorded, json.loads(started.identity))
        changed = [f"{key}: {values}" for key, values in found.items() if not key.startswith(_FREE)]
        if changed:
            raise RunError(
                f"run {self._run} cannot be fed with what run {self._recording.source} recorded: "
                + "; ".join(changed),
                hint="Only trainer.* may differ, where the groups of a step stay what they are.",
            )

    def _on_admission(self, admission: Admission, message: Message) -> None:
        """An admission in the new run's journal: this process's own, or an earlier serving's."""
        if admission.group_id in self._admitted:
            return
        index, known = self._next, self._recording.admissions
        expected = known[index] if index < len(known) else None
        if expected is None or replace(admission, created_ms=expected.created_ms) != expected:
            raise RunError(
                f"run {self._run} was not served from run {self._recording.source}: "
                f"{message.topic} offset {message.offset} admits group {admission.group_id} under "
                f"version {admission.policy_version}, the recording has "
                + ("no more groups" if expected is None else f"{expected.group_id} there"),
                hint="Give the run that is fed another name, or delete the one of this name: "
                f"dora topics delete {self._run} --yes",
            )
        self._record_admission(admission)

    def _record_admission(self, admission: Admission) -> None:
        self._state.admit(admission)
        self._admitted.add(admission.group_id)
        self._next += 1

    def _start_groups(self) -> None:
        """Start the next groups that may start now."""
        now = time.time_ns() // 1_000_000
        waiting = self._recording.admissions[self._next :]
        starting = [replace(each, created_ms=now) for each in startable(self._state, waiting)]
        if not starting:
            return
        try:
            with self._transactions.transaction() as transaction:
                for admission in starting:
                    transaction.send(
                        self._topics.dispatch, admission, key=admission.group_id, partition=JOURNAL
                    )
        except TransactionAbortedError as error:
            log.warning("no group started, trying again: %s", error)
            return
        for admission in starting:
            self._record_admission(admission)
            self._schedule(admission)

    def _schedule(self, admission: Admission) -> None:
        now = time.monotonic()
        for timed in self._recording.records(admission):
            record = timed.record
            if isinstance(record, Chunk):
                written = chunk_key(record) in self._chunks
            else:
                written = record.trajectory_id in self._written
            if not written:
                heapq.heappush(
                    self._due, (now + timed.seconds / self._speed, next(self._order), record)
                )

    def _write_due(self) -> None:
        """Write what is due, the earliest first."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            taken: list[tuple[float, int, Chunk | Trajectory]] = []
            while self._due and self._due[0][0] <= now and len(taken) < RECORDS_AT_ONCE:
                taken.append(heapq.heappop(self._due))
            try:
                with self._transactions.transaction() as transaction:
                    for *_, record in taken:
                        chunk = isinstance(record, Chunk)
                        transaction.send(
                            self._topics.chunks if chunk else self._topics.trajectories,
                            record,
                            key=record.trajectory_id,
                            partition=self._partition(record),
                        )
            except TransactionAbortedError as error:
                log.warning("nothing was written, trying again: %s", error)
                for each in taken:
                    heapq.heappush(self._due, each)
                return
            self._written.update(r.trajectory_id for *_, r in taken if isinstance(r, Trajectory))

    def _partition(self, record: Chunk | Trajectory) -> int:
        window, lanes = self._config.window, self._config.kafka.lanes
        return partition(record.policy_version, record.group_id, window.ring, lanes)

    def _pause(self) -> float:
        if not self._due:
            return POLL_SECONDS
        return min(POLL_SECONDS, max(0.0, self._due[0][0] - time.monotonic()))

    def _report(self, state: ProcessState, message: str) -> None:
        """Statuses as of a coordinator, and of one worker that holds what is still to come."""
        version = self._state.newest
        running: tuple[str, ...] = ()
        if state == "ready":
            attempts = {
                record.trajectory_id: record.attempt
                for *_, record in self._due
                if isinstance(record, Trajectory)
            }
            running = tuple(
                lease_name(*each) for each in itertools.islice(attempts.items(), _RUNNING_SHOWN)
            )
        self._coordinator.send(self._coordinator.status(state, message, version=version))
        self._worker.send(
            self._worker.status(
                state,
                message,
                version=version,
                versions=(version,) if version >= 0 else (),
                capacity=self._config.rollout.capacity,
                running=running,
            )
        )

    def _progress(self) -> str:
        done = f"{self._next} of {len(self._recording.admissions)} groups"
        return f"serves what run {self._recording.source} recorded: {done}"

    def _ended(self) -> str | None:
        """Why the serving is over; None if it is not."""
        state, queue = self._state, self._recording.admissions
        newest, fewest = state.newest, state.window.fewest
        used_up = self._next == len(queue) and not self._due
        if self._target is not None and newest >= self._target and not self._due:
            return f"the trainer has done its {self._target} steps"
        if used_up and newest >= 0 and state.complete_total < fewest:
            return "the recording is used up"
        if newest >= 0 and self._next < len(queue):
            self._check_can_go_on(queue[self._next])
        silent = time.monotonic() - self._trainer_seen_at
        if silent <= self._wait:
            return None
        if used_up:
            return (
                f"the recording is used up, and no trainer was heard for {silent:.0f} s; version "
                f"{newest} waits for groups that run {self._recording.source} did not finish either"
            )
        raise DeadlineError(
            f"no trainer of run {self._run} was heard for {silent:.0f} s",
            hint="Start it beside this command, which goes on where it ended when it is started "
            "again. --wait gives it more time.",
        )

    def _check_can_go_on(self, head: Admission) -> None:
        """RunError if the trainer can never reach what comes next, or has left it behind."""
        source, why = self._recording.source, stuck(self._state, head)
        if why is not None:
            raise RunError(
                f"run {self._run} cannot go on with what run {source} recorded: {why}",
                hint=f"Its trainer sets other groups aside than that of run {source} did: leave "
                "trainer.loss.drop_no_signal as recorded.",
            )
