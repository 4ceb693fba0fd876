"""The coordinator: decides what starts where, and when workers switch version.

Invariant: it holds no state of its own. Everything it knows is folded from the log, and a decision
takes effect only when the transaction that carries it commits: admissions (journal) and the
commands that follow from them become visible together or not at all. A second coordinator fences
the first through the transactional id, so that the journal has one writer and its versions never
decrease.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from dora.bus.reader import LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.identity import differences
from dora.core.placement import Unplaced, due_evaluations, plan
from dora.core.ring import (
    eval_group_id,
    parse_trajectory_id,
    partition,
    slot_partitions,
    trajectory_id,
    worker_partition,
)
from dora.core.roster import GONE, Roster
from dora.core.state import RunState, finished_facts
from dora.core.window import Window
from dora.errors import DeadlineError, RunError
from dora.producers.record_maker import RecordMaker
from dora.schemas.records import (
    Admission,
    Command,
    Policy,
    ProcessState,
    Record,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

log = logging.getLogger(__name__)

JOURNAL = 0
BEGINNING = -2
REBUILD_SECONDS = 300.0
STOP_SECONDS = 30.0


class Coordinator:
    """One active coordinator of a run; `run` returns when the run is complete or `stop` is set."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._config = config
        self._clock = clock
        self._now_ms = now_ms
        self._run = config.run.name
        self._topics = RunTopics(self._run)
        self._records = RecordMaker(config, now_ms)
        self._incarnation = uuid.uuid4().hex
        self._window = Window(config.window.max_staleness, config.window.groups_per_step)
        self._state = RunState(
            self._window,
            config.window.group_size,
            success_threshold=config.task.success_threshold,
        )
        self._roster = Roster(
            heartbeat_timeout=config.rollout.heartbeat_timeout_seconds,
            load_timeout=config.rollout.load_timeout_seconds,
        )
        self._unplaced: dict[str, Unplaced] = {}
        self._zombies: dict[str, Status] = {}
        self._policies: dict[int, Policy] = {}
        self._opened = -1
        self._yielded = False
        self._stop_sent_at: float | None = None
        self._beat_at = float("-inf")
        # fences an older coordinator before anything is read, so that what is read is complete
        self._transactions = TransactionalWriter(
            settings,
            f"{self._run}.coordinator",
            client_id="coordinator",
            transaction_timeout=config.kafka.transaction_timeout_seconds,
        )
        self._reader = LogReader(settings, client_id="coordinator")
        self._writer = LogWriter(settings, client_id="coordinator")

    def run(self, stop: threading.Event) -> None:
        """Coordinates until the run is complete or `stop` is set.

        Raises FencedError when another coordinator took over, RunError when the recorded run is
        not this configuration's, BusError when Kafka refuses.
        """
        try:
            self._rebuild()
            while not stop.is_set() and not self._done():
                self._take(self._reader.poll(timeout=0.02), live=True)
                self._decide()
                self._beat("ready")
            self._beat("stopped", force=True)
        finally:
            self._reader.close()
            self._writer.close()

    def _rebuild(self) -> None:
        topics = self._topics
        started = self._clock()
        self._beat("starting", force=True)
        positions = {(topics.steps, 0): BEGINNING, (topics.policies, 0): BEGINNING}
        positions[(topics.workers, 0)] = BEGINNING
        for index in range(self._config.kafka.dispatch_partitions):
            positions[(topics.dispatch, index)] = BEGINNING
        self._reader.assign(positions)
        commands: list[tuple[Command, int]] = []
        for message in self._reader.read_to_end(REBUILD_SECONDS):
            if isinstance(message.value, Command):
                commands.append((message.value, message.offset))
            else:
                self._apply(message, live=False)
        now = self._clock()
        for command, offset in commands:
            self._roster.sent(command, now, offset)
        self._follow_trajectories()
        for message in self._reader.read_to_end(REBUILD_SECONDS):
            self._apply(message, live=False)
        self._roster.lost(now)  # whatever has no live holder is found just below
        for group, missing in self._state.unfinished():
            for sample in missing:
                identity = trajectory_id(group.group_id, sample)
                if self._roster.held(identity) is None:
                    self._release(identity)
        log.info(
            "rebuilt from the log in %.2f s: version %d, %d groups outstanding, %d to place",
            self._clock() - started,
            self._state.newest,
            self._state.outstanding_total,
            len(self._unplaced),
        )

    def _follow_trajectories(self) -> None:
        """Reads finished trajectories from where the live versions start."""
        kafka, window = self._config.kafka, self._config.window
        every = [
            (self._topics.trajectories, index)
            for version in range(window.ring)
            for index in slot_partitions(version, window.ring, kafka.lanes)
        ]
        # nothing is generated for a version before this coordinator says so: the slots of versions
        # that are not live are followed from here on
        fresh = self._state.newest < 0
        positions = dict.fromkeys(every, BEGINNING) if fresh else self._reader.end_offsets(every)
        for version in range(self._window.oldest_live(self._state.newest), self._state.newest + 1):
            for slot in self._policies[version].slots:
                if slot.topic == self._topics.trajectories:
                    positions[(slot.topic, slot.partition)] = slot.offset
        self._reader.assign(positions)

    def _take(self, messages: list[Message], *, live: bool) -> None:
        for message in messages:
            self._apply(message, live=live)

    def _apply(self, message: Message, *, live: bool) -> None:
        try:
            self._fold(message, live=live)
        except ValueError as error:
            raise RunError(
                f"{_place(message)} contradicts the log before it: {error}",
                hint="Something else than this run wrote to the topic, or it was damaged.",
            ) from error

    def _fold(self, message: Message, *, live: bool) -> None:
        value = message.value
        match value:
            case Unreadable():
                self._unreadable(message, value)
            case Trajectory():
                facts = finished_facts(value, message.partition, message.offset)
                self._roster.seen_attempt(value.trajectory_id, value.attempt)
                if self._state.finish(facts) == "counted":
                    self._roster.finished(value.trajectory_id)
                    self._unplaced.pop(value.trajectory_id, None)
            case Status(role="rollout"):
                if not self._roster.hear(value, self._clock(), live=live) and live:
                    self._zombies[value.incarnation] = value
            case Admission():
                # after start-up admissions are this coordinator's own and known since their commit
                if not live:
                    self._state.admit(value)
                    self._opened = max(self._opened, value.policy_version)
            case RunStarted():
                self._check_identity(value)
                self._state.start()
            case Step():
                self._state.commit(value)
                for group in (*value.trained, *value.set_aside):
                    self._forget(group.group_id)
            case Policy():
                self._policies[value.version] = value
                oldest = self._window.oldest_live(value.version)
                for version in [v for v in self._policies if v < oldest]:
                    del self._policies[version]
            case _:
                pass

    def _unreadable(self, message: Message, value: Unreadable) -> None:
        """What the rules rest on must be readable; a trajectory is the trainer's to report, and
        commands and status are their readers'."""
        topics = self._topics
        journal = message.topic == topics.dispatch and message.partition == JOURNAL
        if journal or message.topic in (topics.steps, topics.policies):
            raise RunError(
                f"{_place(message)} cannot be read ({value.code}): {value.reason}",
                hint="Without it nobody knows what was started or trained. The topic is damaged, "
                "or was written by a newer dora.",
            )
        log.warning("%s cannot be read (%s): %s", _place(message), value.code, value.reason)

    def _check_identity(self, started: RunStarted) -> None:
        found = differences(json.loads(started.identity), self._config.identity())
        if found:
            raise RunError(
                f"run {self._run} was started with another configuration: " + "; ".join(found),
                hint="give the run another name (run.name), or restore the recorded values",
            )

    def _forget(self, group_id: str) -> None:
        for sample in range(self._config.window.group_size):
            identity = trajectory_id(group_id, sample)
            self._roster.finished(identity)
            self._unplaced.pop(identity, None)

    def _release(self, identity: str) -> None:
        """Puts a trajectory without a holder up for placement, unless it was tried too often.

        An evaluation of a version that left the window is given up: its slot is somebody else's.
        """
        group_id, sample = parse_trajectory_id(identity)
        group = self._state.groups.get(group_id)
        if group is None or sample in group.samples:
            return
        if group.version < self._window.oldest_live(self._state.newest):
            return
        attempt = self._roster.next_attempt(identity)
        work = Unplaced(group_id, sample, group.version, group.ordinal, group.purpose, attempt)
        if attempt >= self._config.rollout.max_attempts:
            self._give_up(work)
        else:
            self._unplaced[identity] = work

    def _give_up(self, work: Unplaced) -> None:
        trajectory = self._records.given_up(work)
        log.warning("giving up %s after %d attempts", trajectory.trajectory_id, work.attempt)
        self._writer.send(
            self._topics.trajectories,
            trajectory,
            key=trajectory.trajectory_id,
            partition=partition(
                work.version,
                work.group_id,
                self._config.window.ring,
                self._config.kafka.lanes,
            ),
        )

    def _decide(self) -> None:
        """One tick: what is lost, what is due, who does it; in one transaction."""
        for identity in self._roster.lost(self._clock()):
            self._release(identity)
        if self._state.newest < 0 or self._stop_sent_at is not None:
            return
        complete = self._state.newest >= self._config.trainer.steps
        records: list[Record] = [
            self._records.command(z, "stop", reason=f"another {z.process} took its place")
            for z in self._zombies.values()
        ]
        evaluations = self._evaluations_due()
        records += evaluations
        yields = self._yields() if complete and not self._yielded else []
        records += yields
        stops = self._stops() if complete and not records else []
        records += stops
        if not stops:
            admissible = 0 if complete or evaluations else self._admissible()
            records += self._planned(admissible)
        if not records:
            self._yielded = self._yielded or complete
            return
        try:
            self._commit(records)
        except TransactionAbortedError as error:
            log.warning("nothing of this tick took effect: %s", error)
            return
        self._zombies.clear()
        self._yielded = self._yielded or complete
        if stops:
            self._stop_sent_at = self._clock()

    def _admissible(self) -> int:
        """Groups that the window, and what is left of the run, let start now."""
        state, window = self._state, self._window
        outstanding = state.outstanding_total
        needed = (self._config.trainer.steps - state.newest) * window.groups_per_step
        count = 0
        while window.admits(outstanding + count) and outstanding + count < needed:
            count += 1
        return count

    def _evaluations_due(self) -> list[Record]:
        evaluation = self._config.evaluation
        due = due_evaluations(
            opened=self._opened,
            newest=self._state.newest,
            every=evaluation.every,
            last=self._config.trainer.steps,
        )
        return [
            self._records.admission(eval_group_id(version, ordinal), ordinal, version, 1, "eval")
            for version in due
            for ordinal in range(evaluation.prompts)
        ]

    def _yields(self) -> list[Record]:
        """After the last step: takes back what nobody will train any more."""
        for identity in [i for i, work in self._unplaced.items() if work.purpose == "train"]:
            del self._unplaced[identity]
        records: list[Record] = []
        for member in self._roster.members():
            for identity in sorted(member.holds):
                group = self._state.groups.get(parse_trajectory_id(identity)[0])
                hold = self._roster.held(identity)
                if group is not None and group.purpose == "train" and hold is not None:
                    records.append(
                        self._records.command(
                            member.status, "yield", trajectory_id=identity, attempt=hold.attempt,
                            reason="the run is complete",
                        )
                    )  # fmt: skip
        return records

    def _stops(self) -> list[Record]:
        """Tells the workers to end, once the last version is evaluated."""
        steps = self._config.trainer.steps
        tally = self._state.evaluations.get(steps)
        if self._config.evaluation.prompts and (tally is None or tally.finished < tally.admitted):
            return []
        return [
            self._records.command(member.status, "stop", reason="the run is complete")
            for member in self._roster.members()
            if member.status.state not in GONE
        ]

    def _done(self) -> bool:
        if self._stop_sent_at is None:
            return False
        alive = [m.status.process for m in self._roster.members() if m.status.state not in GONE]
        late = self._clock() - self._stop_sent_at > STOP_SECONDS
        if alive and late:
            log.warning("ending although %s did not confirm the stop", ", ".join(alive))
        return not alive or late

    def _planned(self, admissible: int) -> list[Record]:
        decided = plan(
            self._roster.views(),
            list(self._unplaced.values()),
            newest=self._state.newest,
            admissible=admissible,
            next_ordinal=self._state.next_ordinal,
            group_size=self._config.window.group_size,
        )
        addressees = {member.status.process: member.status for member in self._roster.members()}
        return self._records.of_plan(decided, addressees)

    def _commit(self, records: list[Record]) -> None:
        topics = self._topics
        with self._transactions.transaction() as transaction:
            for record in records:
                if isinstance(record, Admission):
                    transaction.send(
                        topics.dispatch, record, key=record.group_id, partition=JOURNAL
                    )
                elif isinstance(record, Command):
                    index = worker_partition(record.worker, self._config.kafka.dispatch_partitions)
                    transaction.send(topics.dispatch, record, key=record.worker, partition=index)
        now = self._clock()
        for record in records:
            if isinstance(record, Admission):
                self._state.admit(record)
                self._opened = max(self._opened, record.policy_version)
                if record.purpose == "eval":
                    self._release(trajectory_id(record.group_id, 0))
            elif isinstance(record, Command):
                self._roster.sent(record, now)
                if record.kind == "start":
                    self._unplaced.pop(record.trajectory_id, None)

    def _beat(self, state: ProcessState, *, force: bool = False) -> None:
        now = self._clock()
        if not force and now - self._beat_at < self._config.rollout.heartbeat_seconds:
            return
        self._beat_at = now
        run_state = self._state
        message = (
            f"version {run_state.newest}, {run_state.outstanding_total} groups outstanding"
            if run_state.newest >= 0
            else "waiting for version 0 from the trainer"
        )
        self._writer.send(
            self._topics.workers,
            Status(
                run=self._run, process="coordinator", role="coordinator",
                incarnation=self._incarnation, state=state, created_ms=self._now_ms(),
                message=message, version=run_state.newest,
                metrics={
                    "unplaced": float(len(self._unplaced)),
                    "outstanding": float(run_state.outstanding_total),
                    "live_versions": float(len(run_state.live_versions())),
                    "next_ordinal": float(run_state.next_ordinal),
                },
                host=socket.gethostname(), pid=os.getpid(),
            ),
            key="coordinator",
        )  # fmt: skip
        if state == "stopped":
            try:
                self._writer.flush(self._config.kafka.request_timeout_seconds)
            except DeadlineError:
                log.warning("the last status could not be delivered")


def _place(message: Message) -> str:
    return f"{message.topic} partition {message.partition} offset {message.offset}"
