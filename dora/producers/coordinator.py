"""The coordinator: decides what starts where, and when workers switch version.

Invariant: it holds no state of its own. Everything it knows is folded from the log, and a decision
takes effect only when the transaction that carries it commits: admissions (journal) and the
commands that follow from them become visible together or not at all. A second coordinator fences
the first through the transactional id, so that the journal has one writer and its versions never
decrease.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.placement import Unplaced, due_evaluations, plan
from dora.core.ring import (
    eval_group_id,
    parse_trajectory_id,
    partition,
    worker_partition,
)
from dora.core.roster import GONE
from dora.errors import DeadlineError
from dora.producers.record_maker import RecordMaker
from dora.producers.run_fold import JOURNAL, RunFold
from dora.schemas.records import (
    Admission,
    Command,
    ProcessState,
    Record,
    Status,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
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
        self._fold = RunFold(config, settings, clock, incarnation=self._incarnation)
        self._state, self._roster = self._fold.state, self._fold.roster
        self._writer = LogWriter(settings, client_id="coordinator")

    def run(self, stop: threading.Event) -> None:
        """Coordinates until the run is complete or `stop` is set.

        Raises FencedError when another coordinator took over, RunError when the recorded run is
        not this configuration's, BusError when Kafka refuses.
        """
        try:
            self._beat("starting", force=True)
            self._fold.rebuild()
            while not stop.is_set() and not self._done():
                self._fold.follow(POLL_SECONDS)
                self._settle_with_rival()
                self._decide()
                self._beat("ready")
            self._beat("stopped", force=True)
        finally:
            self._transactions.close()
            self._fold.close()
            self._writer.close()

    def _settle_with_rival(self) -> None:
        """Finds out who is active when another coordinator speaks: a transaction of the fenced one
        fails (FencedError), even if it has nothing to decide."""
        rival, self._fold.rival = self._fold.rival, None
        if rival is None:
            return
        log.warning("another coordinator speaks: process %d on %s", rival.pid, rival.host)
        try:
            with self._transactions.transaction() as transaction:
                transaction.send(self._topics.workers, self._status("ready"), key="coordinator")
        except TransactionAbortedError as error:
            log.warning("not settled yet: %s", error)  # the rival's next word asks again

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
            self._fold.release(identity)
        while self._fold.given_up:
            self._give_up(self._fold.given_up.pop())
        if self._state.newest < 0 or self._stop_sent_at is not None:
            return
        complete = self._state.newest >= self._config.trainer.steps
        records: list[Record] = [
            self._records.command(z, "stop", reason=f"another {z.process} took its place")
            for z in self._fold.zombies.values()
        ]
        evaluations = self._evaluations_due()
        records += evaluations
        yields = self._yields() if complete and not self._yielded else []
        records += yields
        stops = self._stops() if complete and not records else []
        records += stops
        if not stops:
            steps_left = self._config.trainer.steps - self._state.newest
            outstanding = self._state.outstanding_total
            admissible = self._fold.window.admissible(outstanding, steps_left)
            records += self._planned(0 if complete or evaluations else admissible)
        if not records:
            self._yielded = self._yielded or complete
            return
        try:
            self._commit(records)
        except TransactionAbortedError as error:
            log.warning("nothing of this tick took effect: %s", error)
            return
        self._fold.zombies.clear()
        self._yielded = self._yielded or complete
        if stops:
            self._stop_sent_at = self._clock()

    def _evaluations_due(self) -> list[Record]:
        evaluation = self._config.evaluation
        due = due_evaluations(
            opened=self._fold.opened,
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
        for identity in [i for i, work in self._fold.unplaced.items() if work.purpose == "train"]:
            del self._fold.unplaced[identity]
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
            list(self._fold.unplaced.values()),
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
                self._fold.admitted(record)
            elif isinstance(record, Command):
                self._roster.sent(record, now)
                if record.kind == "start":
                    self._fold.unplaced.pop(record.trajectory_id, None)

    def _beat(self, state: ProcessState, *, force: bool = False) -> None:
        now = self._clock()
        if not force and now - self._beat_at < self._config.rollout.heartbeat_seconds:
            return
        self._beat_at = now
        self._writer.send(self._topics.workers, self._status(state), key="coordinator")
        if state == "stopped":
            try:
                self._writer.flush(self._config.kafka.request_timeout_seconds)
            except DeadlineError:
                log.warning("the last status could not be delivered")

    def _status(self, state: ProcessState) -> Status:
        run_state = self._state
        message = (
            f"version {run_state.newest}, {run_state.outstanding_total} groups outstanding"
            if run_state.newest >= 0
            else "waiting for version 0 from the trainer"
        )
        return Status(
            run=self._run,
            process="coordinator",
            role="coordinator",
            incarnation=self._incarnation,
            state=state,
            created_ms=self._now_ms(),
            message=message,
            version=run_state.newest,
            metrics={
                "unplaced": float(len(self._fold.unplaced)),
                "outstanding": float(run_state.outstanding_total),
                "live_versions": float(len(run_state.live_versions())),
                "next_ordinal": float(run_state.next_ordinal),
            },
            host=socket.gethostname(),
            pid=os.getpid(),
        )
