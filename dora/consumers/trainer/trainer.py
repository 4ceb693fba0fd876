"""The trainer: reads the log, trains a batch, publishes the new version and commits the step.

A step happened if and only if its ledger record is committed. That record, the policy record of the
new version and the consumer-group offsets are one transaction, after weights and checkpoint are on
disk. A fenced trainer can commit nothing. What the trainer needs after a crash is in the log and in
the newest checkpoint.
"""

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from dora.bus.acls import check_rights
from dora.bus.reader import END, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.bus.transactions import TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.consumers.learner.learner import Learner, create_learner, starting_model
from dora.consumers.learner.ranks import Leader
from dora.consumers.trainer.batch_builder import BatchBuilder, BatchPoller, part_means
from dora.consumers.trainer.checkpoints import Checkpoints
from dora.consumers.trainer.heartbeat import PROCESS, Heartbeat
from dora.consumers.trainer.origin import OriginStep
from dora.consumers.trainer.publication import Publisher, WeightUsers
from dora.consumers.trainer.recovery import Deviation, Recovery, RedoStoppedError
from dora.consumers.trainer.step_reports import StepReports
from dora.core.groups import NO_SIGNAL, EvaluationTally, SetAsideStreak
from dora.core.processes import GONE
from dora.core.state import RunState
from dora.errors import BusError, DoraError, FencedError, RunError, TaskError
from dora.log.continuation import check_continues
from dora.log.dead_letters import DeadLetterWriter
from dora.log.inputs import fingerprints
from dora.log.ledger import (
    History,
    LedgerWriter,
    first_entry,
    live_positions,
    new_state,
    read_ledger,
    resume,
)
from dora.log.retention import check_ledger, check_retention
from dora.log.trained_records import places_of
from dora.schemas.records import Admission, GroupRef, Policy, Status, Step, Trajectory
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)

READ_SECONDS = 300.0
STREAK_STEPS = 8
"""So many steps' groups are set aside in a row before the run stops, unless configured."""
PROBES = 8
_EVALUATIONS_KEPT = 8
_LOOKS = 3
"""So often the ledger is read before the takeover, if it seems to be torn."""

# A launcher that lost a rank asks the others to stop, and the loss may show a moment later.
_LAST_CHECK_SECONDS = 0.5


class Trainer:
    """The one trainer of a run. Creating it fences an older one; `run` does the work.

    With `ranks` this process is rank 0 of several. A run that has not begun begins with `origin`.
    """

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        ranks: Leader | None = None,
        origin: OriginStep | None = None,
    ) -> None:
        self._origin = origin
        self._config = config
        self._ranks = ranks
        self._settings = settings
        self._run = config.run.name
        topics = self._topics = RunTopics(self._run)
        self._state = new_state(config)
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints")
        self._policies: dict[int, Policy] = {}
        self._started_at = time.monotonic()
        self._streak = SetAsideStreak()
        self._accepted: Deviation | None = None  # by the recovery, until the next step records it
        self._following = False  # whether the reader is at the live versions
        self._redoing = False
        self._stop = threading.Event()
        check_rights("trainer", self._run, settings)
        self._admin = TopicAdmin(settings)
        self._admin.ping()
        self._admin.verify(topic_plan(config))
        self._reader = LogReader(settings, client_id=PROCESS)
        self._weight_users = WeightUsers(config, settings)
        self._writer = LogWriter(settings, client_id=PROCESS)
        self._heartbeat = Heartbeat(config, self._writer)
        self._reports = StepReports(config)
        self._model = Path()
        self._inputs: dict[str, str] = {}
        # Before an older trainer is fenced: one that cannot go on must not end it.
        if self._newest_before_takeover() < config.trainer.steps:
            self._model = starting_model(config)
            self._inputs = fingerprints(config)
        # Fences an older trainer before the ledger counts, so that what is read then is complete.
        self._transactions = TransactionalWriter(
            settings,
            f"{self._run}.trainer",
            client_id=PROCESS,
            transaction_timeout=config.kafka.transaction_timeout_seconds,
            partitions=[(t, 0) for t in (topics.steps, topics.policies, topics.workers)],
        )
        self._ledger = LedgerWriter(
            config, self._heartbeat.incarnation, self._transactions, self._state
        )
        self._learner: Learner
        self._builder: BatchBuilder
        self._records: RecordHandler
        self._poller: BatchPoller
        self._publisher: Publisher

    def run(self, stop: threading.Event) -> None:
        """Train until `trainer.steps` are committed or `stop` is set (looked at between steps, and
        with one rank also between the micro-batches of a redo).

        Raises FencedError when another trainer took over, RunError when the recorded run is not
        this configuration's or cannot be redone, DeadlineError when no batch becomes admissible in
        `trainer.batch_timeout_seconds`, and whatever Kafka, the model or the disk refuse.
        """
        self._stop = stop
        try:
            self._heartbeat.report("starting", "reading the ledger")
            if self._prepare():
                self._reader.assign(
                    live_positions(self._reader, self._config, self._policies, self._state)
                    | {(self._topics.workers, 0): END}
                )
                self._following = True
                while not self.complete and not stop.is_set():
                    self._train_step(stop)
                if self._ranks is not None and not self.complete:
                    self._ranks.check(_LAST_CHECK_SECONDS)
            done = "all steps are committed" if self.complete else "stopped between two steps"
            log.info("%s: version %d", done, self._state.newest)
            self._heartbeat.report("stopped", done)
        except RedoStoppedError:
            done = "stopped while redoing committed steps: the next start redoes them"
            log.info("%s", done)
            self._heartbeat.report("stopped", done)
        except FencedError:
            raise  # the status is the other trainer's now
        except DoraError as error:
            self._report_failure(error)
            raise
        finally:
            self._transactions.close()
            self._reader.close()
            self._weight_users.close()
            self._writer.close()
            self._reports.close()

    def _report_failure(self, error: DoraError) -> None:
        try:
            self._heartbeat.report("failed", error.message)
        except BusError as undelivered:
            log.warning("the failure could not be reported: %s", undelivered.message)

    @property
    def complete(self) -> bool:
        """Whether `trainer.steps` are committed, as far as was read."""
        return self._state.newest >= self._config.trainer.steps

    def _newest_before_takeover(self) -> int:
        """The newest version while another trainer may be at work, -1 if it cannot be told.

        RunError if this trainer cannot go on from there. While a commit has ended in one topic and
        not in the other, or where Kafka left a transaction without its end, a whole log looks torn:
        then only what is read after the takeover counts.
        """
        places = [(self._topics.steps, 0), (self._topics.policies, 0)]
        for attempt in range(1, _LOOKS + 1):
            try:
                return self._read_history()[1]
            except RunError:
                if attempt == _LOOKS:
                    raise
            with LogReader(
                self._settings, client_id=PROCESS, isolation="read_uncommitted"
            ) as reader:
                if reader.end_offsets(places) != self._reader.end_offsets(places):
                    break
        return -1

    def _read_history(self) -> tuple[History, int]:
        """The run's past, and its newest version; RunError if this trainer cannot go on from it."""
        check_ledger(self._reader, self._topics)
        whole = new_state(self._config)
        history = read_ledger(
            self._reader, self._topics, whole, self._checkpoints.names(), READ_SECONDS
        )
        if history.started is not None:
            check_continues(
                history.started,
                self._config,
                self._admin.cluster_id(),
                self._admin.topic_ids(self._run),
                whole.newest,
            )
        check_retention(self._reader, self._topics, history, whole.newest, whole.window)
        return history, whole.newest

    def _prepare(self) -> bool:
        """Read the ledger and bring the learner to its end; False if nothing is left to do."""
        history, _ = self._read_history()
        resume(self._state, history)
        self._policies = history.policies
        self._ledger.inputs = history.inputs
        if history.settings is not None:
            self._ledger.settings = history.settings.newest
        self._heartbeat.version = self._state.newest
        if history.started is not None:
            self._reports.begin(history.started, history.recent, self._state.newest)
        if self.complete:
            return False
        self._heartbeat.report("loading", "loading the model")
        self._learner = create_learner(
            self._config, self._model, progress=self._progress, ranks=self._ranks
        )
        self._builder = BatchBuilder(
            self._state,
            self._config.trainer.loss,
            self._learner.vocabulary,
            mixed=self._config.schedule.kind == "partial",
        )
        self._records = RecordHandler(
            self._config,
            self._state,
            self._builder,
            self._ledger,
            self._transactions,
            self._writer,
            self._heartbeat,
        )
        self._poller = BatchPoller(
            self._config,
            self._builder,
            self._state,
            self._heartbeat,
            poll=self._poll,
            check=self._check,
            set_aside=self._set_aside,
            common_reason=lambda: self._streak.reasons.commonest,
        )
        self._publisher = Publisher(
            self._config,
            self._learner,
            self._model,
            self._inputs,
            self._reader,
            history,
            self._weight_users,
            self._heartbeat.beat,
        )
        if history.started is None:
            self._begin()
        else:
            self._recover(history)
        self._publisher.prune(self._state.newest)
        return True

    def _recover(self, history: History) -> None:
        recovery = Recovery(
            self._config,
            self._settings,
            self._learner,
            lambda message: self._heartbeat.report("training", message),
            self._stop,
        )
        self._redoing = True
        self._accepted = recovery.run(history)
        self._redoing = False
        self._publisher.discard(recovery.damaged)
        self._publisher.restore(self._policies[self._state.newest])
        if self._accepted is not None:
            self._heartbeat.report("training", f"accepted: {self._accepted}")
            self._heartbeat.beat(force=True)

    def _begin(self) -> None:
        """Publish version 0 and commit the ledger's first record with it."""
        if self._origin is not None:
            self._origin.load(self._learner, lambda text: self._heartbeat.report("loading", text))
        with self._heartbeat.beat_through("storing version 0"):
            policy = self._publisher.publish(0)
        started = first_entry(
            self._config,
            self._admin.cluster_id(),
            self._admin.topic_ids(self._run),
            self._inputs,
            "" if self._origin is None else str(self._origin.origin),
        )
        self._ledger.begin(started, policy)
        self._publisher.record_begun(started, policy)
        self._policies[0] = policy
        self._heartbeat.version = 0
        self._reports.begin(started, (), 0)
        log.info("run %s begins with version 0, %d parameters", self._run, self._learner.parameters)

    def _train_step(self, stop: threading.Event) -> None:
        """Wait for an admissible batch, train it and commit; returns early if `stop` is set."""
        waited_from = time.monotonic()
        streamed = self._config.trainer.streamed
        polled = (
            self._poller.stream_batch(stop, self._learner)
            if streamed
            else self._poller.wait_for_batch(stop)
        )
        if polled is None:
            return
        decision = polled.decision
        trained = [group.ref for group in decision.batch]
        train_from = time.monotonic()
        version = self._state.newest
        self._heartbeat.report("training", f"step {version} -> {version + 1}")
        if streamed:
            metrics = self._learner.finish() | {"streamed_seconds": polled.streamed_seconds}
        else:
            groups = [group.samples for group in decision.batch]
            probes = self._builder.probes(decision.batch, PROBES)
            metrics = self._learner.update(groups, version, probes, places_of(trained))
        publish_from = time.monotonic()
        with self._heartbeat.beat_through(f"storing version {version + 1}"):
            policy = self._publisher.publish(version + 1)
            # after an accepted difference no later redo should have to go through it again
            checkpoint = self._publisher.write_checkpoint(policy, forced=self._accepted is not None)
        now = time.monotonic()
        surplus = self._state.counters.duplicates + self._state.counters.late
        metrics |= {
            "live_versions": float(self._records.live_versions()),
            "unscored_fraction": self._records.unscored_share(),
            **self._records.held_out(),
            **part_means(decision.batch),
            "duplicates_ignored": float(surplus),
            "idle_seconds": train_from - waited_from - polled.computed_seconds,
            "train_seconds": publish_from - train_from + polled.computed_seconds,
            "publish_seconds": now - publish_from,
            "step_seconds": now - waited_from,
            "wall_seconds": now - self._started_at,
        }
        if self._accepted is not None and self._accepted.largest is not None:
            metrics["redo_difference_max"] = self._accepted.largest
        step = self._ledger.commit_step(
            policy, trained, decision.set_aside, metrics, checkpoint, self._positions()
        )
        self._on_committed(step)
        self._policies = {policy.version: policy}
        self._publisher.record_committed(policy, checkpoint)
        self._publisher.prune(policy.version)
        self._accepted = None
        log.info(
            "version %d: reward %.3f, %d groups set aside, waited %.1f s, trained %.2f s",
            policy.version,
            metrics["reward_mean"],
            len(decision.set_aside),
            metrics["idle_seconds"],
            metrics["train_seconds"],
        )

    def _on_committed(self, step: Step) -> None:
        self._builder.drop_committed(step)
        self._reports.committed(step)
        self._heartbeat.version = self._state.newest
        self._heartbeat.beat()
        self._streak.on_step(step)
        self._check_streak()

    def _check_streak(self) -> None:
        """TaskError if groups are only set aside: started again, the run would go on like that."""
        limit = self._config.trainer.max_set_aside_in_row
        if limit is None:
            limit = STREAK_STEPS * self._config.window.groups_per_step
        common = self._streak.reasons.commonest
        if not limit or common is None or common.total < limit:
            return
        hint = (
            "All rewards of a group are equal. Look at responses with `dora inspect "
            f"{self._run}`; make the task easier, or set trainer.loss.drop_no_signal = false."
            if common.reason == NO_SIGNAL
            else f"`dora tail {self._run} -t dead-letters` shows what could not be used. Correct "
            "the cause and start the run again: it goes on with new groups."
        )
        raise TaskError(
            f"{common.total} groups in a row were set aside and none was trained, {common.text}",
            hint=f"{hint} trainer.max_set_aside_in_row sets how many it takes.",
        )

    def _positions(self) -> dict[tuple[str, int], int]:
        """Positions in the topics whose lag is of interest: journal and trajectories."""
        return {
            place: offset
            for place, offset in self._reader.positions().items()
            if place[0] in (self._topics.trajectories, self._topics.dispatch)
        }

    def _check(self) -> None:
        """Raise if the trainer cannot go on: a rank is lost, or Kafka lost what it was given."""
        if self._ranks is not None:
            self._ranks.check()
        self._ledger.check_seen()

    def _set_aside(self, refs: tuple[GroupRef, ...]) -> None:
        newest = self._policies[self._state.newest]
        metrics = {"wall_seconds": time.monotonic() - self._started_at}
        step = self._ledger.commit_set_aside(
            newest.weights_checksum, refs, metrics, self._positions()
        )
        self._on_committed(step)
        log.info("%d groups set aside, the first because of: %s", len(refs), refs[0].reason)

    def _progress(self) -> None:
        """Between two parts of a step: send a heartbeat, and read what has arrived, so that the
        next batch need not wait for it. Other ranks follow a redo step by step, and so end between
        two steps."""
        self._heartbeat.beat()
        if self._redoing and self._ranks is None and self._stop.is_set():
            raise RedoStoppedError
        if self._following:
            self._poll(0.0)

    def _poll(self, seconds: float) -> None:
        self._records.handle(self._reader.poll(timeout=seconds))
        meter().on_window(self._state, self._positions)


class RecordHandler:
    """Brings every record that was read into the window, `state`, once and in the order of the log.

    A trajectory that cannot be read becomes a dead letter. Any other unreadable record ends the
    trainer, because without it the order of admissions is unknown.
    """

    def __init__(
        self,
        config: Config,
        state: RunState,
        builder: BatchBuilder,
        ledger: LedgerWriter,
        transactions: TransactionalWriter,
        writer: LogWriter,
        heartbeat: Heartbeat,
    ) -> None:
        self._topics = RunTopics(config.run.name)
        self._state = state
        self._builder = builder
        self._ledger = ledger
        self._transactions = transactions
        self._dead_letters = DeadLetterWriter(
            writer, self._topics, PROCESS, config.kafka.max_message_bytes
        )
        self._heartbeat = heartbeat
        self._live_versions = 0
        self._read = self._unscored = 0
        self._held_out: dict[int, dict[str, float | None]] = {}  # rewards by version, trajectory
        self._prompts_held_out = config.evaluation.prompts
        self._success_threshold = config.task.success_threshold

    def live_versions(self) -> int:
        """Most versions with unfinished groups at the same time since the last call."""
        most, self._live_versions = self._live_versions, 0
        return most

    def unscored_share(self) -> float:
        """Share of the training responses read since the last call that got no score."""
        share = self._unscored / self._read if self._read else 0.0
        self._read = self._unscored = 0
        return share

    def held_out(self) -> dict[str, float]:
        """Metrics of the newest version whose evaluation is complete; empty without one."""
        prompts = self._prompts_held_out
        done = [version for version, seen in self._held_out.items() if len(seen) == prompts]
        if not done:
            return {}
        tally = EvaluationTally(max(done), admitted=prompts)
        for reward in self._held_out[tally.version].values():
            tally.count(reward, self._success_threshold)
        return {
            "held_out_version": float(tally.version),
            "held_out_success_rate": tally.success_rate,
            "held_out_reward_mean": tally.reward_mean,
        }

    def handle(self, messages: Iterable[Message]) -> None:
        """Handle what was read.

        RunError if the journal contradicts itself or cannot be read, FencedError if another trainer
        took over.
        """
        for message in messages:
            value = message.value
            match value:
                case Unreadable():
                    self._unreadable(message, value)
                case Trajectory() if value.purpose == "eval":
                    self._evaluated(value)
                case Trajectory():
                    self._read += 1
                    self._unscored += value.reward is None
                    self._builder.add_trajectory(value, message.partition, message.offset)
                case Admission() if value.purpose == "train":
                    self._admit(value, message)
                case Step():
                    self._ledger.on_entry_read(value)
                case Status(role="trainer") if value.state not in GONE:
                    self._heartbeat.settle_with_rival(value, self._transactions)
                case _:
                    pass
        self._live_versions = max(self._live_versions, len(self._state.live_versions()))

    def _evaluated(self, record: Trajectory) -> None:
        seen = self._held_out.setdefault(record.policy_version, {})
        seen.setdefault(record.trajectory_id, record.reward)
        for version in sorted(self._held_out)[:-_EVALUATIONS_KEPT]:
            del self._held_out[version]

    def _admit(self, admission: Admission, message: Message) -> None:
        place = f"{message.topic} offset {message.offset}"
        if admission.policy_version > self._state.newest:
            raise RunError(
                f"{place} admits group {admission.group_id} under version "
                f"{admission.policy_version}, but the newest is {self._state.newest}",
                hint="Something else than this run's coordinator wrote to the topic.",
            )
        try:
            self._state.admit(admission)
        except ValueError as error:
            raise RunError(f"{place} contradicts the journal before it: {error}") from error

    def _unreadable(self, message: Message, value: Unreadable) -> None:
        place = message.place
        if message.topic == self._topics.workers:
            return  # only another trainer's status matters here, and it sends the next one soon
        if message.topic != self._topics.trajectories:
            raise RunError(
                f"{place} cannot be read ({value.code}): {value.reason}",
                hint="Without it the order of admissions is unknown. The topic is damaged, or was "
                "written by a newer dora.",
            )
        log.warning("%s cannot be read (%s): %s", place, value.code, value.reason)
        self._dead_letters.write_record(message, value.reason)
