"""The coordinator: carries out what `dora.core.scheduling.coordination` decides.

It holds no state of its own: everything it knows is read from the log, and a decision takes effect
only when its transaction commits. Admissions (journal) and the commands that follow from them
become visible together or not at all. A second coordinator fences the first through the
transactional id, so the journal has one writer and its versions never decrease.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from dora import faults
from dora.bus.reader import BEGINNING
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config, window_of
from dora.core.processes import GONE
from dora.core.ring import JOURNAL, partition, trajectory_id, worker_partition
from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.records import DecisionRecords
from dora.core.scheduling.scheduler import Decision, Rules
from dora.core.scheduling.schedules import Schedule
from dora.errors import DeadlineError
from dora.log.status_reporter import StatusReporter
from dora.producers.coordinator.log_follower import LogFollower
from dora.producers.coordinator.takeover import ChunkScanner, Lost
from dora.producers.tasks.prompts import prompt_identity
from dora.schemas.records import (
    Admission,
    Command,
    ProcessState,
    Record,
    Sampling,
    Status,
    Trajectory,
)
from dora.telemetry.meter import meter
from dora.telemetry.tracer import Span, TraceContext, Value, admission_span, trace_of, tracer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
STOP_SECONDS = 30.0


def rules_of(config: Config) -> Rules:
    """What of `config` the coordination decides by."""
    rollout = config.rollout
    return Rules(
        window=window_of(config),
        group_size=config.window.group_size,
        steps=config.trainer.steps,
        success_threshold=config.task.success_threshold,
        heartbeat_timeout=rollout.heartbeat_timeout_seconds,
        load_timeout=rollout.load_timeout_seconds,
        max_attempts=rollout.max_attempts,
        evaluation_every=config.evaluation.every,
        evaluation_prompts=config.evaluation.prompts,
        schedule=Schedule(**config.schedule.model_dump(), adapters=config.policy.lora is not None),
    )


class GroupTraces:
    """Begins the traces of groups: every record about a group names its admission as the parent.

    `run_id` is empty before it is known. `sampled`: whether the run's processes make spans.
    """

    def __init__(self, *, sampled: bool) -> None:
        self.run_id = ""
        self._sampled = sampled
        self._admission = admission_span()

    def header(self, group_id: str) -> str | None:
        """`traceparent` of what concerns the group; None for what concerns none."""
        if not group_id or not self.run_id:
            return None
        return str(self._context(group_id))

    def report(self, records: Iterable[Record], began_ms: int, now_ms: int) -> None:
        """Report admissions among records that were decided from `began_ms` on and are
        committed now (Unix time)."""
        if not tracer().active:
            return
        for record in records:
            if isinstance(record, Admission):
                facts: dict[str, Value] = {
                    "group": record.group_id,
                    "ordinal": record.ordinal,
                    "version": record.policy_version,
                    "purpose": record.purpose,
                }
                context = self._context(record.group_id)
                tracer().emit(Span("admission", context, "", began_ms, now_ms, facts))

    def _context(self, group_id: str) -> TraceContext:
        return TraceContext(trace_of(self.run_id, group_id), self._admission, self._sampled)


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
        rollout = config.rollout
        self._records = DecisionRecords(
            self._run,
            config.window.group_size,
            Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, ()),
            now_ms,
        )
        self._traces = GroupTraces(sampled=config.traces.endpoint is not None)
        self._writer = LogWriter(settings, client_id="coordinator")
        self._statuses = StatusReporter(
            config, self._writer, "coordinator", "coordinator", clock=clock, now_ms=now_ms
        )
        # needs the task's data: before an older coordinator is fenced
        prompt = prompt_identity(config) if config.schedule.longest_first else None
        # fences an older coordinator before anything is read, so that what is read is complete
        self._transactions = TransactionalWriter(
            settings,
            f"{self._run}.coordinator",
            client_id="coordinator",
            transaction_timeout=config.kafka.transaction_timeout_seconds,
            partitions=self._written(),
        )
        self._coordination = Coordination(
            rules_of(config),
            self._statuses.incarnation,
            prompt,
        )
        self._follower = LogFollower(config, settings, self._coordination, clock)
        self._ticked_at: float | None = None
        self._scanner = ChunkScanner(settings, mixed=config.schedule.kind == "partial")

    def run(self, stop: threading.Event) -> None:
        """Coordinates until the run is complete or `stop` is set.

        Raises FencedError when another coordinator took over, RunError when the recorded run is
        not this configuration's, BusError when Kafka refuses.
        """
        try:
            self._beat("starting", force=True)
            self._follower.rebuild()
            while not stop.is_set() and not self._done():
                self._follower.follow(POLL_SECONDS)
                self._settle_with_rival()
                self._decide()
                self._take_over()
                self._beat("ready")
            self._beat("stopped", force=True)
        finally:
            self._transactions.close()
            self._follower.close()
            self._writer.close()

    def _written(self) -> list[tuple[str, int]]:
        """The partitions that a coordinator's transactions may write to."""
        kafka, window, topics = self._config.kafka, self._config.window, self._topics
        return [
            (topics.workers, 0),
            *((topics.dispatch, index) for index in range(kafka.dispatch_partitions)),
            *((topics.trajectories, index) for index in range(window.ring * kafka.lanes)),
        ]

    def _settle_with_rival(self) -> None:
        rival, self._coordination.rival = self._coordination.rival, None
        if rival is not None:
            self._statuses.settle_with_rival(rival, self._transactions, self._status("ready"))

    def _decide(self) -> None:
        """One tick: everything that is due, in one transaction."""
        began, began_ms = self._clock(), self._now_ms()
        decision = self._coordination.decide(began)
        records = self._records.of_decision(decision)
        try:
            self._commit(records)
        except TransactionAbortedError as error:
            log.warning("nothing of this tick took effect: %s", error)
            meter().count("dora_coordinator_commit_failures_total")
            return
        self._report(decision)
        now = self._clock()
        self._coordination.committed(decision, records, now)
        self._measure(records, began, now)
        self._traces.report(records, began_ms, self._now_ms())

    def _measure(self, records: list[Record], began: float, now: float) -> None:
        meter().on_decisions(records)
        meter().observe("dora_coordinator_decision_seconds", now - began)
        if self._ticked_at is not None:
            meter().observe("dora_coordinator_tick_lag_seconds", now - self._ticked_at)
        self._ticked_at = now

    def _commit(self, records: list[Record]) -> None:
        if not records:
            return
        topics = self._topics
        self._traces.run_id = self._follower.run_id
        with self._transactions.transaction() as transaction:
            for record in records:
                if isinstance(record, Admission):
                    topic, key, index = topics.dispatch, record.group_id, JOURNAL
                elif isinstance(record, Command):
                    topic, key = topics.dispatch, record.worker
                    index = worker_partition(key, self._config.kafka.dispatch_partitions)
                elif isinstance(record, Trajectory):
                    topic, key = topics.trajectories, record.trajectory_id
                    index = self._partition(record.policy_version, record.group_id)
                else:
                    continue
                trace = self._traces.header(record.group_id)
                transaction.send(topic, record, key=key, partition=index, trace=trace)
            faults.point("coordinator.inside_transaction", transaction.flush)
        faults.point("coordinator.after_transaction")

    def _report(self, decision: Decision) -> None:
        for work in decision.given_up:
            identity = trajectory_id(work.group_id, work.sample)
            log.warning("gave up %s after %d attempts", identity, work.attempt)
        for zombie in decision.zombies:
            log.warning(
                "process %d of %s was replaced and still speaks", zombie.pid, zombie.process
            )
        for each in (*decision.yields, *decision.moves):
            log.info(
                "%s is to hand back %s: %s", each.worker.process, each.trajectory_id, each.reason
            )

    def _partition(self, version: int, group_id: str) -> int:
        return partition(version, group_id, self._config.window.ring, self._config.kafka.lanes)

    def _take_over(self) -> None:
        """Has the chunks of lost trajectories read, and takes what was found."""
        topic = self._topics.chunks
        wanted: dict[str, Lost] = {}
        for identity, work in self._coordination.scans.items():
            index = self._partition(work.version, work.group_id)
            starts = self._follower.start_of(topic, work.version)
            start = starts.get((topic, index), BEGINNING)
            wanted[identity] = Lost(work.version, (topic, index), start)
        self._scanner.ask(wanted)
        for identity, prefix in self._scanner.poll().items():
            self._coordination.scanned(identity, prefix)

    def _done(self) -> bool:
        """Whether all workers confirmed the stop, or had their time for it."""
        stopped_at = self._coordination.stopped_at
        if stopped_at is None:
            return False
        members = self._coordination.workers.workers()
        alive = [m.status.process for m in members if m.status.state not in GONE]
        late = self._clock() - stopped_at > STOP_SECONDS
        if alive and late:
            log.warning("ending although %s did not confirm the stop", ", ".join(alive))
        return not alive or late

    def _beat(self, state: ProcessState, *, force: bool = False) -> None:
        if not force and not self._statuses.due:
            return
        meter().on_workers(self._coordination.workers, self._clock())
        self._statuses.send(self._status(state))
        if state == "stopped":
            try:
                self._writer.flush(self._config.kafka.request_timeout_seconds)
            except DeadlineError:
                log.warning("the last status could not be delivered")

    def _status(self, state: ProcessState) -> Status:
        run_state = self._coordination.state
        message = (
            f"version {run_state.newest}, {run_state.outstanding_total} groups outstanding"
            if run_state.newest >= 0
            else "waiting for version 0 from the trainer"
        )
        return self._statuses.status(
            state,
            message,
            version=run_state.newest,
            metrics={
                "unplaced": float(len(self._coordination.pending)),
                "scanning": float(len(self._coordination.scans)),
                "takeovers_total": float(self._coordination.takeovers),
                "migrations_total": float(self._coordination.migrations),
                "resumed_tokens_total": float(self._coordination.resumed_tokens),
                "outstanding": float(run_state.outstanding_total),
                "live_versions": float(len(run_state.live_versions())),
                "next_ordinal": float(run_state.next_ordinal),
            },
        )
