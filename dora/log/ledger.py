"""The ledger: how the trainer reads it at start and adds to it.

What is not in a committed ledger entry did not happen. An entry, the policy record that goes with
it and the offsets for lag tools are one transaction.
"""

import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora import __version__, faults
from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.config import Config, window_of
from dora.config.changes import recorded_values
from dora.core.ring import JOURNAL, slot_partitions, version_starts
from dora.core.state import RunState
from dora.errors import DeadlineError, FencedError, RunError
from dora.log.recorded_config import RecordedSettings
from dora.schemas.records import GroupRef, Policy, RunStarted, Step
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 3


@dataclass(slots=True)
class History:
    """A run's past, as far as the trainer needs it."""

    started: RunStarted | None = None
    """None before the run's first transaction."""
    policies: dict[int, Policy] = field(default_factory=dict)
    """Every version that was announced."""
    bases: list[Step] = field(default_factory=list)
    """Steps whose checkpoints are on disk, oldest first."""
    redo: list[Step] = field(default_factory=list)
    """Steps committed after the first of `bases`, or all if there is none, in order."""
    recent: deque[Step] = field(default_factory=deque)
    """The entries since the step that made the oldest live version."""
    checkpoints: list[str] = field(default_factory=list)
    """All checkpoints that the ledger names, oldest first."""
    inputs: dict[str, str] = field(default_factory=dict)
    """What the run's inputs held at last, as recorded."""
    settings: RecordedSettings | None = None
    """The values that each step was trained with; None before the run's first transaction."""

    @property
    def base(self) -> Step | None:
        """The newest step whose checkpoint is on disk."""
        return self.bases[-1] if self.bases else None

    def redo_after(self, base: Step | None) -> list[Step]:
        """The steps to redo from the checkpoint of `base`, one of `bases` (None: version 0)."""
        begin = 0 if base is None else base.version_out
        return [step for step in self.redo if step.version_in >= begin]


def read_ledger(
    reader: LogReader,
    topics: RunTopics,
    state: RunState,
    available: Collection[str],
    deadline: float,
) -> History:
    """Read the committed ledger into `state` and return the history.

    `available` are the names of the checkpoints on disk. `reader` stays assigned to the topics'
    ends. Raises RunError if an entry cannot be read or contradicts the ones before it.
    """
    history = History()
    reader.assign({(topics.steps, 0): BEGINNING, (topics.policies, 0): BEGINNING})
    for message in reader.read_to_end(deadline):
        value = message.value
        place = message.place
        match value:
            case Unreadable():
                raise RunError(
                    f"{place} cannot be read ({value.code}): {value.reason}",
                    hint="The ledger is damaged, or was written by a newer dora.",
                )
            case Policy():
                history.policies[value.version] = value
            case RunStarted() if history.started is None:
                history.started = value
                history.inputs = value.inputs
                history.settings = RecordedSettings(value)
                state.start()
            case Step() if history.started is not None:
                try:
                    state.commit(value)
                except ValueError as error:
                    raise RunError(f"{place} contradicts the ledger before it: {error}") from error
                _remember(history, value, available)
                history.inputs = value.inputs or history.inputs
                if history.settings is not None:
                    history.settings.add(value)
                oldest = state.window.oldest_live(state.newest)
                while history.recent[0].version_out < oldest:
                    history.recent.popleft()
            case _:
                kind = type(value).__name__
                raise RunError(f"{place} holds a {kind}, which does not belong there")
    return history


def _remember(history: History, step: Step, available: Collection[str]) -> None:
    history.recent.append(step)
    if step.kind != "step":
        return
    if step.checkpoint is not None:
        history.checkpoints.append(step.checkpoint)
    if step.checkpoint in available:
        history.bases.append(step)
        if len(history.bases) == 1:
            history.redo.clear()
            return
    history.redo.append(step)


def new_state(config: Config) -> RunState:
    """The state of a run before the first record of its log."""
    return RunState(window_of(config), config.window.group_size, config.task.success_threshold)


def resume(state: RunState, history: History) -> None:
    """Bring a new `state` to the end of the ledger, as far as it concerns live versions."""
    if history.started is None:
        return
    newest = history.recent[-1].version_out if history.recent else 0
    oldest = state.window.oldest_live(newest)
    if oldest:
        state.begin_at(oldest)
    else:
        state.start()
    for step in history.recent:
        state.commit(step)


def live_positions(
    reader: LogReader, config: Config, policies: Mapping[int, Policy], state: RunState
) -> dict[Partition, int]:
    """Offsets from which a trainer at `state` reads journal and trajectories.

    From there on everything is read that concerns a group of a live version; what lies before
    concerns groups that the ledger has closed. Slots of no live version are read from their ends:
    nothing is generated for a new version before it is announced. RunError if `policies` lacks a
    live version.
    """
    topics, ring, lanes = RunTopics(config.run.name), config.window.ring, config.kafka.lanes
    oldest = state.window.oldest_live(state.newest)
    every = [
        (topics.trajectories, index)
        for version in range(ring)
        for index in slot_partitions(version, ring, lanes)
    ]
    journal = (topics.dispatch, JOURNAL)
    positions = {**reader.end_offsets(every), journal: BEGINNING}
    for version in range(oldest, state.newest + 1):
        if version not in policies:
            raise RunError(f"the policies topic of run {config.run.name} has no version {version}")
        positions |= version_starts(policies[version], topics.trajectories)
    if oldest > 0:  # what the journal holds before version 0 does not belong in it
        announced = version_starts(policies[oldest], topics.dispatch)
        positions[journal] = announced.get(journal, BEGINNING)
    return positions


def first_entry(
    config: Config,
    cluster_id: str,
    topic_ids: dict[str, str],
    inputs: Mapping[str, str],
    origin: str = "",
) -> RunStarted:
    """The ledger's first entry: what the run is, what its `inputs` hold (`dora.log.inputs`), where
    it is, and the step of another run (`RUN@STEP`) that it began from."""
    return RunStarted(
        run=config.run.name,
        run_id=uuid.uuid4().hex,
        dora_version=__version__,
        identity=json.dumps(config.identity()),
        max_staleness=config.window.max_staleness,
        groups_per_step=config.window.groups_per_step,
        group_size=config.window.group_size,
        ring=config.window.ring,
        lanes=config.kafka.lanes,
        cluster_id=cluster_id,
        topic_ids=topic_ids,
        created_ms=time.time_ns() // 1_000_000,
        config=json.dumps(config.recorded()),
        inputs=dict(inputs),
        origin=origin,
    )


def whole_ledger(config: Config, settings: ClusterSettings, deadline: float) -> History:
    """The committed ledger with every step in `redo`, for a redo from version 0."""
    with LogReader(settings, client_id=f"{config.run.name}.ledger") as reader:
        return read_ledger(reader, RunTopics(config.run.name), new_state(config), (), deadline)


class LedgerWriter:
    """Adds entries for one trainer, known by its `incarnation` and working with `config`. It must
    read each one back within `kafka.request_timeout_seconds`."""

    def __init__(
        self,
        config: Config,
        incarnation: str,
        transactions: TransactionalWriter,
        state: RunState,
    ) -> None:
        run = config.run.name
        self._read_back_seconds = config.kafka.request_timeout_seconds
        self._unseen: tuple[int, float] | None = None  # newest entry, and when it was committed
        self._run = run
        self._incarnation = incarnation
        self._topics = RunTopics(run)
        self._transactions = transactions
        self._state = state
        self.inputs: Mapping[str, str] = {}
        """What the run's inputs hold by the ledger; a step of another policy records them anew."""
        self.settings: Mapping[str, str] = {}
        """The values of the keys that may change, by the ledger; an entry records other ones."""
        self._settings = recorded_values(config)

    def begin(self, started: RunStarted, policy: Policy) -> None:
        """Commit the first entry with version 0."""
        self._commit(started, policy, {})
        self.inputs, self.settings = started.inputs, self._settings
        self._state.start()

    def commit_step(
        self,
        policy: Policy,
        trained: Sequence[GroupRef],
        set_aside: Sequence[GroupRef],
        metrics: Mapping[str, float],
        checkpoint: str | None,
        read: Mapping[tuple[str, int], int],
    ) -> Step:
        """Commit the step that made `policy`; `read` are the positions in topics that were read.

        Raises FencedError if another trainer took over; then nothing of it is in the log.
        """
        return self._append(
            "step", policy, policy.weights_checksum, trained, set_aside, metrics, checkpoint, read
        )

    def commit_set_aside(
        self,
        checksum: str,
        set_aside: Sequence[GroupRef],
        metrics: Mapping[str, float],
        read: Mapping[tuple[str, int], int],
    ) -> Step:
        """Commit that groups are set aside while the version, with `checksum`, stays."""
        return self._append("set_aside", None, checksum, (), set_aside, metrics, None, read)

    def on_entry_read(self, step: Step) -> None:
        """An entry was read from the ledger. FencedError if another trainer wrote it, which then
        took over."""
        if step.trainer != self._incarnation:
            raise FencedError(
                f"another trainer committed step {step.version_in} -> {step.version_out} of run "
                f"{self._run}",
                hint="Only one trainer of a run is active, the one started last. End this one.",
            )
        if self._unseen is not None and step.sequence >= self._unseen[0]:
            self._unseen = None

    def check_seen(self) -> None:
        """DeadlineError if what was committed last cannot be read: Kafka did not finish it."""
        if (
            self._unseen is not None
            and time.monotonic() - self._unseen[1] > self._read_back_seconds
        ):
            raise DeadlineError(
                f"ledger entry {self._unseen[0]} was committed, but could not be read back in "
                f"{self._read_back_seconds:g} s: Kafka did not finish its transaction",
                hint="Start the trainer again: it ends the transaction and goes on from what the "
                "ledger holds.",
            )

    def _append(
        self,
        kind: Literal["step", "set_aside"],
        policy: Policy | None,
        checksum: str,
        trained: Sequence[GroupRef],
        set_aside: Sequence[GroupRef],
        metrics: Mapping[str, float],
        checkpoint: str | None,
        read: Mapping[tuple[str, int], int],
    ) -> Step:
        last, newest = self._state.last_step, self._state.newest
        inputs = self.inputs if policy is None else policy.inputs
        step = Step(
            run=self._run,
            kind=kind,
            sequence=0 if last is None else last.sequence + 1,
            version_in=newest,
            version_out=newest if policy is None else policy.version,
            trained=tuple(trained),
            set_aside=tuple(set_aside),
            metrics=dict(metrics),
            weights_checksum=checksum,
            checkpoint=checkpoint,
            trainer=self._incarnation,
            created_ms=time.time_ns() // 1_000_000,
            inputs={} if inputs == self.inputs else dict(inputs),
            settings={k: v for k, v in self._settings.items() if self.settings.get(k) != v},
        )
        self._commit(step, policy, read)
        self.inputs, self.settings = inputs, self._settings
        self._state.commit(step)
        self._unseen = step.sequence, time.monotonic()
        return step

    def _commit(
        self,
        entry: RunStarted | Step,
        policy: Policy | None,
        read: Mapping[tuple[str, int], int],
    ) -> None:
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            faults.point("trainer.before_transaction")
            try:
                with self._transactions.transaction() as transaction:
                    transaction.send(self._topics.steps, entry, key=self._run, partition=0)
                    if policy is not None:
                        key = str(policy.version)
                        transaction.send(self._topics.policies, policy, key=key, partition=0)
                    if read:
                        transaction.send_offsets(f"{self._run}.trainer", read)
                    faults.point("trainer.inside_transaction", transaction.flush)
            except TransactionAbortedError as error:
                meter().count("dora_trainer_commit_failures_total")
                if attempt == COMMIT_ATTEMPTS:
                    raise
                log.warning("commit %d of %d failed: %s", attempt, COMMIT_ATTEMPTS, error)
            else:
                faults.point("trainer.after_transaction")
                return
