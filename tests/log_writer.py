"""A run's log on a real Kafka, written by hand record by record."""

from collections.abc import Iterable
from typing import Self

from dora.bus import ClusterSettings, LogWriter, RunTopics
from dora.core import ring
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    Policy,
    Record,
    SlotOffset,
    Status,
    Trajectory,
)
from tests.factories import RING

DEADLINE = 30.0
DISPATCH_PARTITIONS = 9


class RunLogWriter:
    """Sends each record to where the run's processes would. `places` says where each trajectory
    lies: partition and offset."""

    def __init__(self, settings: ClusterSettings, run: str, lanes: int = 1) -> None:
        self.settings, self.run, self.topics = settings, run, RunTopics(run)
        self.places: dict[str, tuple[int, int]] = {}
        self._lanes = lanes
        self._ends: dict[tuple[str, int], int] = {}
        self._writer = LogWriter(settings, client_id=f"{run}.test")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    def send(self, *records: Record) -> None:
        """Send them in this order."""
        for record in records:
            place = topic, partition = self._place(record)
            offset = self._ends.get(place, 0)
            self._ends[place] = offset + 1
            if isinstance(record, Trajectory):
                self.places[record.trajectory_id] = (partition, offset)
            key = (
                getattr(record, "trajectory_id", None)
                or getattr(record, "process", None)
                or str(getattr(record, "version", ""))
                or None
            )
            self._writer.send(topic, record, key=key, partition=partition)

    def slots(self, places: Iterable[tuple[str, int]]) -> tuple[SlotOffset, ...]:
        """Where the next record of each of these partitions will lie."""
        return tuple(SlotOffset(*place, self._ends.get(place, 0)) for place in places)

    def flush(self) -> None:
        """Wait until all is in the log."""
        self._writer.flush(DEADLINE)

    def close(self) -> None:
        self._writer.close()

    def _place(self, record: Record) -> tuple[str, int]:
        topics = self.topics
        match record:
            case Chunk() | Trajectory():
                topic = topics.chunks if isinstance(record, Chunk) else topics.trajectories
                version, group = record.policy_version, record.group_id
                return topic, ring.partition(version, group, RING, self._lanes)
            case Command():
                return topics.dispatch, ring.worker_partition(record.worker, DISPATCH_PARTITIONS)
            case Admission():
                return topics.dispatch, 0
            case Policy():
                return topics.policies, 0
            case Status():
                return topics.workers, 0
            case DeadLetter():
                return topics.dead_letters, 0
            case _:
                return topics.steps, 0
