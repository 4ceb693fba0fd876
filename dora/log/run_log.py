"""A run's log as commands and reports read it: ledger, admissions, trajectories and chunks.

Nothing is written. Records that are foreign or damaged do not stop the reading: they are listed in
`unreadable`, and what retention deleted in `missing`. A trajectory counts if it is the first
finished record of its id in its partition, of the version and size with which the journal admitted
its group.
"""

import difflib
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.core.groups import misfit
from dora.core.ring import JOURNAL, parse_trajectory_id, partition, slot_starts, version_starts
from dora.errors import RunError
from dora.log.recorded_config import RecordedSettings
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    Policy,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Placed(Generic[R]):
    """A record and where it lies."""

    partition: int
    offset: int
    record: R


class RunLog:
    """The log of `run`, of which ledger, policies and journal are read at once.

    Each pass over a topic may take `deadline` seconds (DeadlineError), so that a log may be held
    for as long as it is of use. TopicError if there is no such run, RunError if it has not begun,
    BusError if the cluster fails.
    """

    def __init__(self, settings: ClusterSettings, run: str, *, deadline: float = 300.0) -> None:
        self.run = run
        self.topics = RunTopics(run)
        self.unreadable: list[str] = []
        """Where records lie that cannot be read or are of another kind than their topic's."""
        self.missing: list[str] = []
        """What retention deleted, a sentence each."""
        self._noted: set[str] = set()
        self._settings = settings
        self._deadline = deadline
        with TopicAdmin(settings) as admin:
            self._partitions = admin.partitions_of(run)
        self.started: RunStarted
        """The ledger's first record."""
        self.ledger: list[Step] = []
        """Every entry in order, those that only set groups aside included."""
        self.policies: dict[int, Policy] = {}
        """Every version that is still announced."""
        self.admissions: dict[str, Admission] = {}
        """Every admitted group by id, in the order of admission."""
        self._read_ledger()
        self._read_journal()

    @property
    def settings(self) -> RecordedSettings:
        """The values that each entry was made with, of keys that may change between two starts."""
        return RecordedSettings(self.started, self.ledger)

    @property
    def steps(self) -> list[Step]:
        """The committed training steps in order: the one at index n turned version n into n + 1."""
        return [entry for entry in self.ledger if entry.kind == "step"]

    def step(self, number: int) -> Step:
        """The step that made version `number`, from 1 on; RunError says which there are."""
        steps = self.steps
        if not steps:
            raise RunError(f"run {self.run} has not committed a step")
        for step in steps:
            if step.version_out == number:
                return step
        first, last = steps[0].version_out, steps[-1].version_out
        raise RunError(f"run {self.run} has no step {number}: it has steps {first} to {last}")

    def span(self, first: int | None, last: int | None) -> tuple[int, int]:
        """First and last step of a span whose open ends (None) are the run's; RunError, saying
        which steps there are, if it has not both."""
        begin = self.step(1 if first is None else first)
        end = self.step(self.steps[-1].version_out if last is None else last)
        return begin.version_out, end.version_out

    def check_version(self, version: int) -> None:
        """RunError, saying which there are, if the run has no such version."""
        newest = self.steps[-1].version_out if self.steps else 0
        if not 0 <= version <= newest:
            raise RunError(
                f"run {self.run} has no version {version}: it has versions 0 to {newest}"
            )

    def trained_at(self) -> dict[str, int]:
        """By group id, the version that its step made (groups set aside are not in it)."""
        return {ref.group_id: step.version_out for step in self.steps for ref in step.trained}

    def set_aside(self) -> dict[str, str]:
        """By group id, the reason for which it was set aside."""
        return {ref.group_id: ref.reason or "" for entry in self.ledger for ref in entry.set_aside}

    def trajectories(self, versions: Collection[int] | None = None) -> Iterator[Placed[Trajectory]]:
        """The counted trajectories (of evaluations, too), those of `versions` only if given.

        Within a partition in log order, a version's after those of the version before it in its
        slot. May be called again; each call reads the log anew.
        """
        seen: set[str] = set()
        for message in self._versioned(self.topics.trajectories, versions):
            value = message.value
            if not isinstance(value, Trajectory):
                self._note(message)
            elif versions is not None and value.policy_version not in versions:
                continue
            elif self._counts(message, value) and value.trajectory_id not in seen:
                seen.add(value.trajectory_id)
                yield Placed(message.partition, message.offset, value)

    def group(self, group_id: str) -> dict[int, Placed[Trajectory]]:
        """The counted trajectories of a group by sample index; those that are not finished, or were
        deleted, are not in it.

        RunError, naming the nearest ones, if the run has no such group.
        """
        version = self.admission_of(group_id).policy_version
        lane = {partition(version, group_id, self.started.ring, self.started.lanes)}
        found: dict[int, Placed[Trajectory]] = {}
        for message in self._versioned(self.topics.trajectories, {version}, only=lane):
            value = message.value
            if not isinstance(value, Trajectory):
                self._note(message)
            elif value.group_id == group_id and self._counts(message, value):
                found.setdefault(value.sample, Placed(message.partition, message.offset, value))
        return dict(sorted(found.items()))

    def chunks(self, identities: Collection[str]) -> Iterator[Placed[Chunk]]:
        """The chunks of these trajectories, of all their attempts, in log order.

        RunError, naming the nearest ones, for an id that the run does not have.
        """
        versions = {self.version_of(identity) for identity in identities}
        wanted = frozenset(identities)
        for message in self._versioned(
            self.topics.chunks, versions, wanted, self._lanes_of(identities)
        ):
            if not isinstance(message.value, Chunk):
                self._note(message)
            elif message.value.trajectory_id in wanted:
                yield Placed(message.partition, message.offset, message.value)

    def commands(self, identities: Collection[str]) -> Iterator[Placed[Command]]:
        """The commands about these trajectories, in the order of each worker's partition.

        RunError, naming the nearest ones, for an id that the run does not have.
        """
        if not identities:
            return
        oldest = min(self.version_of(identity) for identity in identities)
        topic = self.topics.dispatch
        starts = version_starts(self.policies.get(oldest), topic)
        numbers = range(JOURNAL + 1, self._partitions.get(topic, 0))
        places = {(topic, number): starts.get((topic, number), 0) for number in numbers}
        for message in self._messages(places):
            value = message.value
            if isinstance(value, Command) and value.trajectory_id in identities:
                yield Placed(message.partition, message.offset, value)

    def control(self) -> Iterator[Command | Status | DeadLetter]:
        """Every command to a worker, status and dead letter, in log order within a partition."""
        topics = self.topics
        kinds: dict[str, type[Command | Status | DeadLetter]] = {
            topics.dispatch: Command,
            topics.workers: Status,
            topics.dead_letters: DeadLetter,
        }
        places: dict[Partition, int] = {}
        for topic in kinds:
            self._check_exists(topic)
            places |= {(topic, n): 0 for n in range(self._partitions.get(topic, 0))}
        places.pop((topics.dispatch, JOURNAL), None)
        for message in self._messages(places):
            if isinstance(message.value, kinds[message.topic]):
                yield message.value
            else:
                self._note(message)

    def version_of(self, identity: str) -> int:
        """The policy version of a trajectory's group.

        RunError, naming the nearest ids, if the run has no such trajectory.
        """
        try:
            group, sample = parse_trajectory_id(identity)
        except ValueError as error:
            raise RunError(str(error), hint=self._hint(self._nearest(identity, 0))) from error
        admission = self.admissions.get(group)
        if admission is None or sample >= admission.group_size:
            raise RunError(
                f"run {self.run} has no trajectory {identity}",
                hint=self._hint(self._nearest(group, sample)),
            )
        return admission.policy_version

    def admission_of(self, group_id: str) -> Admission:
        """The entry that started a group; RunError, naming the nearest ones, if there is none."""
        admission = self.admissions.get(group_id)
        if admission is None:
            raise RunError(
                f"run {self.run} has no group {group_id}",
                hint=self._hint(self._nearest_groups(group_id)),
            )
        return admission

    @staticmethod
    def _hint(nearest: list[str]) -> str:
        if not nearest:
            return "No group was started yet, or all of them were deleted by retention."
        return f"The nearest ones: {', '.join(nearest)}."

    def _nearest(self, group: str, sample: int) -> list[str]:
        admission = self.admissions.get(group)
        if admission is not None:
            return [f"{group}/{index}" for index in range(admission.group_size)][-5:]
        near = [(g, self.admissions[g].group_size) for g in self._nearest_groups(group)]
        return [f"{other}/{min(sample, size - 1)}" for other, size in near]

    def _nearest_groups(self, group: str) -> list[str]:
        alike = [g for g in self.admissions if g[:1] == group[:1] and g[1:].isdecimal()]
        if alike and group[1:].isdecimal():
            wanted = int(group[1:])
            return sorted(sorted(alike, key=lambda g: abs(int(g[1:]) - wanted))[:5], key=_number)
        return difflib.get_close_matches(group, self.admissions, n=5, cutoff=0.0)

    def _counts(self, message: Message, trajectory: Trajectory) -> bool:
        """Whether its group was started, and with such a sample there."""
        group = self.admissions.get(trajectory.group_id)
        if group is None:
            return False
        version = group.policy_version
        home = partition(version, group.group_id, self.started.ring, self.started.lanes)
        place = message.partition
        reason = misfit(trajectory, version, group.group_size, place=place, home=home)
        if reason is not None:
            self._note(message, reason)
        return reason is None

    def _read_ledger(self) -> None:
        started: RunStarted | None = None
        for message in self._messages({(self.topics.steps, 0): 0}):
            match message.value:
                case RunStarted() if started is None:
                    started = message.value
                case Step():
                    self.ledger.append(message.value)
                case _:
                    self._note(message)
        if started is None and self.missing:
            raise RunError(
                f"the ledger of run {self.run} has no beginning: {self.missing[0]}",
                hint="Without it the run cannot be read.",
            )
        if started is None:
            raise RunError(
                f"run {self.run} has not begun: its ledger is empty",
                hint="The trainer writes the first record of it; is `dora train` running?",
            )
        self.started = started
        for message in self._messages({(self.topics.policies, 0): BEGINNING}):
            if isinstance(message.value, Policy):
                self.policies[message.value.version] = message.value
            else:
                self._note(message)

    def _read_journal(self) -> None:
        place = (self.topics.dispatch, JOURNAL)
        for message in self._messages({place: 0}):
            if isinstance(message.value, Admission):
                self.admissions.setdefault(message.value.group_id, message.value)
            else:
                self._note(message)

    def _lanes_of(self, identities: Collection[str]) -> set[int]:
        ring, lanes = self.started.ring, self.started.lanes
        return {
            partition(self.version_of(i), parse_trajectory_id(i)[0], ring, lanes)
            for i in identities
        }

    def _versioned(
        self,
        topic: str,
        versions: Collection[int] | None,
        keys: frozenset[str] | None = None,
        only: Collection[int] | None = None,
    ) -> Iterator[Message]:
        """Messages of a version-partitioned topic from where the oldest of `versions` begins."""
        if not self._check_exists(topic):
            return
        starts = self._starts(topic, versions)
        if only is not None:
            starts = {place: at for place, at in starts.items() if place[1] in only}
        yield from self._messages(starts, keys)

    def _check_exists(self, topic: str) -> bool:
        """Whether there is the topic; if not, it is missing."""
        text = f"the topic {topic} does not exist any more"
        if topic not in self._partitions and text not in self.missing:
            self.missing.append(text)
        return topic in self._partitions

    def _starts(self, topic: str, versions: Collection[int] | None) -> dict[Partition, int]:
        every = range(self._partitions[topic])
        if versions is None:
            return {(topic, number): 0 for number in every}
        ring, lanes = self.started.ring, self.started.lanes
        return slot_starts(self.policies, versions, topic, ring, lanes, unknown=0)

    def _messages(
        self, places: dict[Partition, int], keys: frozenset[str] | None = None
    ) -> Iterator[Message]:
        wanted = None if keys is None else keys.__contains__
        with closing(
            LogReader(self._settings, client_id=f"{self.run}.log", wanted=wanted)
        ) as reader:
            begin = reader.start_offsets(places)
            for (topic, number), at in places.items():
                first = begin[topic, number]
                if at != BEGINNING and at < first:
                    gone = f"{topic} partition {number} begins at offset {first}: "
                    text = gone + f"{at} to {first - 1} were deleted by retention"
                    if text not in self.missing:
                        self.missing.append(text)
            reader.assign({place: max(at, begin[place]) for place, at in places.items()})
            yield from reader.read_to_end(self._deadline)

    def _note(self, message: Message, what: str | None = None) -> None:
        value = message.value
        if what is None and isinstance(value, Unreadable):
            what = f"cannot be read ({value.code}): {value.reason}"
        elif what is None:
            what = f"holds a {type(value).__name__}, which does not belong there"
        text = f"{message.place} {what}"
        if text not in self._noted:
            self._noted.add(text)
            self.unreadable.append(text)


def _number(group: str) -> int:
    """Ordinal of a training group's id."""
    return int(group[1:])
