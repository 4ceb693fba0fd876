"""A trainer that learns nothing: the real state, batch builder and window, and its commits."""

from dataclasses import dataclass, field
from typing import Literal

from dora.config.trainer import LossSection
from dora.consumers.trainer.batch_builder import BatchBuilder, Decision
from dora.core.ring import slot_partitions
from dora.core.state import RunState
from dora.core.window import Window
from dora.schemas.records import Admission, Policy, RunStarted, SlotOffset, Step, Trajectory
from tests.protocol.log import (
    CHUNKS,
    DISPATCH,
    JOURNAL,
    LEDGER,
    POLICIES,
    RUN,
    TRAJECTORIES,
    Crash,
    Place,
    Reader,
    SimulatedLog,
)
from tests.protocol.worker import DISPATCH_PARTITIONS

ID = f"{RUN}.trainer"
VOCABULARY = 256


@dataclass
class ModelTrainer:
    log: SimulatedLog
    window: Window
    group_size: int
    lanes: int
    steps: int
    name: str
    pending: tuple[Step, Policy | None] | None = None
    policies: dict[int, Policy] = field(default_factory=dict)
    started: bool = False

    def __post_init__(self) -> None:
        self.epoch = self.log.fence(ID)
        self.state = RunState(self.window, self.group_size)
        settings = LossSection(drop_no_signal=self.group_size > 1)
        self.builder = BatchBuilder(self.state, settings, VOCABULARY)
        self.reader = Reader(self.log, {LEDGER: 0, POLICIES: 0})

    def recover(self) -> None:
        """Reads the ledger to its end, begins the run if it has not begun, and follows it."""
        for policy, _ in self.reader.read(POLICIES):
            assert isinstance(policy, Policy)
            self.policies[policy.version] = policy
        for entry, _ in self.reader.read(LEDGER):
            if isinstance(entry, RunStarted):
                self.state.start()
            elif isinstance(entry, Step):
                self.state.commit(entry)
        if self.state.newest < 0:
            self._begin()
        every = [(TRAJECTORIES, index) for index in range(self._ring * self.lanes)]
        self.reader.positions |= {place: self.log.end(place) for place in every}
        for version in range(self.window.oldest_live(self.state.newest), self.state.newest + 1):
            for slot in self.policies[version].slots:
                if slot.topic == TRAJECTORIES:
                    self.reader.positions[slot.topic, slot.partition] = slot.offset
        self.reader.positions[JOURNAL] = 0
        self.started = True

    def _begin(self) -> None:
        window = self.window
        started = RunStarted(
            RUN, "id", "0", "{}", window.max_staleness, window.groups_per_step, self.group_size,
            self._ring, self.lanes, "c", {}, 0,
        )  # fmt: skip
        policy = self._policy(0)
        self.log.commit(ID, self.epoch, [(LEDGER, started), (POLICIES, policy)])
        self.state.start()
        self.policies[0] = policy

    @property
    def _ring(self) -> int:
        return self.window.max_staleness + 2

    def _policy(self, version: int) -> Policy:
        places = [
            (topic, index)
            for topic in (CHUNKS, TRAJECTORIES)
            for index in slot_partitions(version, self._ring, self.lanes)
        ]
        places += [(DISPATCH, index) for index in range(DISPATCH_PARTITIONS)]
        places.append(LEDGER)
        slots = tuple(SlotOffset(*place, self.log.end(place)) for place in places)
        return Policy(RUN, version, "full", "w", (), f"sum{version}", b"", b"", slots, 0)

    def take(self, place: Place, count: int | None = None) -> None:
        """Reads on."""
        for record, offset in self.reader.read(place, count):
            match record:
                case Trajectory(purpose="train"):
                    self.builder.add_trajectory(record, place[1], offset)
                case Admission(purpose="train"):
                    assert record.policy_version <= self.state.newest
                    self.state.admit(record)
                case _:
                    pass

    def prepare(self) -> None:
        """Trains a batch if one is admissible, and stores the weights; or sets groups aside."""
        if self.state.newest >= self.steps:
            return
        decision = self.builder.next_batch()
        version = self.state.newest
        if decision.blocked is None:
            self.pending = self._step(decision, "step", version + 1), self._policy(version + 1)
        elif decision.set_aside:
            self.pending = self._step(decision, "set_aside", version), None

    def _step(self, decision: Decision, kind: Literal["step", "set_aside"], to: int) -> Step:
        last = self.state.last_step
        trained = tuple(prepared.ref for prepared in decision.batch)
        return Step(
            RUN, kind, 0 if last is None else last.sequence + 1, self.state.newest, to, trained,
            decision.set_aside, {}, f"sum{to}", None, self.name, 0,
        )  # fmt: skip

    def commit(self, crash: Crash | None = None) -> bool:
        """The step's transaction; False if the trainer died on the way. Raises Fenced."""
        if self.pending is None:
            return True
        step, policy = self.pending
        self.pending = None
        records = [(LEDGER, step), *([] if policy is None else [(POLICIES, policy)])]
        if crash == "before":
            return False
        if crash == "inside":
            self.log.abort(records)
            return False
        self.log.commit(ID, self.epoch, records)
        if crash == "after":
            return False
        self.state.commit(step)
        self.builder.drop_committed(step)
        if policy is not None:
            self.policies[policy.version] = policy
        return True
