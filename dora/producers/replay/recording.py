"""A run's groups as they were recorded, to be served to another run's trainer.

Groups come in the order of the journal, each with the finished trajectories that count and the
chunks of all their attempts, in log order. Only the run's name is changed; times stay the recorded
ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dora.bus.settings import ClusterSettings
from dora.core.recorded_order import unservable
from dora.core.ring import trajectory_id
from dora.errors import RunError
from dora.log.retention import deleted
from dora.log.run_log import RunLog
from dora.schemas.records import Admission, Chunk, Trajectory

ChunkKey = tuple[str, int, int]
"""Trajectory, attempt, sequence."""


def chunk_key(chunk: Chunk) -> ChunkKey:
    """What tells chunks of a run apart."""
    return chunk.trajectory_id, chunk.attempt, chunk.sequence


@dataclass(frozen=True, slots=True)
class Timed:
    """A record and how long after its group's admission it was written, in seconds."""

    seconds: float
    record: Chunk | Trajectory


class Recorded(ABC):
    """Groups that can be served, in order, as records of the run `name`. `identity` is the recorded
    run's, `steps` are its committed ones, `without_chunks` the trajectories that were given out
    without all their chunks."""

    source: str
    name: str
    identity: str
    steps: int
    admissions: list[Admission]

    def __init__(self) -> None:
        self.without_chunks: set[str] = set()
        self._groups: dict[int, dict[str, list[Timed]]] = {}

    def records(self, group: Admission) -> list[Timed]:
        """Chunks and trajectories of a group; read with all of its version."""
        version = group.policy_version
        if version not in self._groups:
            self._groups = {v: kept for v, kept in self._groups.items() if v >= version - 1}
            self._groups[version] = self._read(version)
        return self._groups[version].get(group.group_id, [])

    @abstractmethod
    def _read(self, version: int) -> dict[str, list[Timed]]:
        """The same of all groups of a version."""


class Recording(Recorded):
    """What `run` recorded, as records of the run `name`.

    RunError if it cannot be served: its schedule mixes versions, its steps follow a budget of
    tokens (which groups one takes then depends on the moment), or retention deleted trajectories
    that a step trained.
    """

    def __init__(self, run: RunLog, name: str) -> None:
        super().__init__()
        why = unservable(run.started.identity)
        if why is not None:
            raise RunError(f"run {run.run} cannot be served: {why}")
        ordinals = [each.ordinal for each in run.admissions.values() if each.purpose == "train"]
        if ordinals and ordinals[0]:
            raise RunError(
                f"run {run.run} cannot be served: its journal begins at prompt {ordinals[0]}; what "
                "came before was deleted"
            )
        self.run = run
        self.source = run.run
        self.identity = run.started.identity
        self.steps = len(run.steps)
        self.name = name
        self.admissions = [replace(each, run=name) for each in run.admissions.values()]

    def check_kept(self, settings: ClusterSettings) -> None:
        """RunError if retention deleted a trained trajectory."""
        named, damaged = deleted(self.run, settings, self.run.steps)
        if damaged:
            raise RunError(f"run {self.source} cannot be served: retention deleted {named}")

    def _read(self, version: int) -> dict[str, list[Timed]]:
        groups = [each for each in self.admissions if each.policy_version == version]
        begun = {each.group_id: each.created_ms for each in groups}
        wanted = {
            trajectory_id(group.group_id, sample)
            for group in groups
            for sample in range(group.group_size)
        }
        found = self._trajectories(version, wanted)
        read: dict[str, list[Timed]] = {group_id: [] for group_id in begun}
        latest: dict[str, float] = {}

        def add(record: Chunk | Trajectory) -> None:
            # one of a clock that is behind must not overtake what was written before it
            after = (record.created_ms - begun[record.group_id]) / 1000
            seconds = max(after, latest.get(record.trajectory_id, 0.0))
            latest[record.trajectory_id] = seconds
            read[record.group_id].append(Timed(seconds, replace(record, run=self.name)))

        for chunk in self._chunks(wanted, found):
            add(chunk)
        for trajectory in found.values():
            add(trajectory)
        return read

    def _trajectories(self, version: int, wanted: Iterable[str]) -> dict[str, Trajectory]:
        found: dict[str, Trajectory] = {}
        missing = set(wanted)
        for each in self.run.trajectories({version}):
            if each.record.trajectory_id in missing:
                missing.discard(each.record.trajectory_id)
                found[each.record.trajectory_id] = each.record
            if not missing:  # what follows in these partitions is of later versions
                break
        return found

    def _chunks(self, wanted: set[str], found: dict[str, Trajectory]) -> Iterable[Chunk]:
        due = {
            (identity, trajectory.attempt, sequence)
            for identity, trajectory in found.items()
            for sequence in range(trajectory.chunks)
        }
        seen: set[ChunkKey] = set()
        unfinished = wanted - found.keys()
        if not due and not unfinished:
            return
        for each in self.run.chunks(wanted):
            key = chunk_key(each.record)
            if key in seen:
                continue
            seen.add(key)
            due.discard(key)
            yield each.record
            if not due and not unfinished:
                break
        self.without_chunks.update(identity for identity, _, _ in due)
