"""The processes of a run, as their last statuses show them."""

from dataclasses import dataclass, field

from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.topics import RunTopics
from dora.core.processes import GONE, PATIENT, allowed_silence
from dora.schemas.records import ProcessState, Status

_LASTING = ("steps_target", "emulation_late_share")
"""Metrics that still hold when their process has ended, besides totals."""
QUIET_SECONDS = 6.0
STATUSES_READ_BACK = 20_000
"""A process whose last status lies further back in the topic reports again, or has long ended."""


def recent_statuses(reader: LogReader, topics: RunTopics) -> dict[Partition, int]:
    """Where a process that starts begins to read the statuses of the others."""
    place = (topics.workers, 0)
    first, end = reader.start_offsets([place])[place], reader.end_offsets([place])[place]
    return {place: max(first, end - STATUSES_READ_BACK)}


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process by its last status; `age_seconds` is how long ago that was."""

    process: str
    role: str
    state: ProcessState
    message: str
    version: int
    running: int
    capacity: int
    age_seconds: float
    silent: bool
    host: str
    pid: int
    incarnation: str = ""
    command_offset: int = -1
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, status: Status, time_ms: int, *, heartbeat_timeout: float, load_timeout: float
    ) -> "ProcessView":
        """The process at `time_ms`. Times allowed for silence are in seconds."""
        age = max(0.0, (time_ms - status.created_ms) / 1000)
        limit = allowed_silence(
            status, heartbeat_timeout=heartbeat_timeout, load_timeout=load_timeout
        )
        ended = status.state in GONE
        return cls(
            process=status.process,
            role=status.role,
            state=status.state,
            message=status.message,
            version=status.version,
            running=len(status.running),
            capacity=status.capacity,
            age_seconds=age,
            silent=age > limit,
            host=status.host,
            pid=status.pid,
            incarnation=status.incarnation,
            command_offset=status.command_offset,
            metrics={
                name: value
                for name, value in status.metrics.items()
                if not ended or name in _LASTING or name.endswith("_total")
            },
        )

    @property
    def ended(self) -> bool:
        """Whether the process reported that it has ended."""
        return self.state in GONE

    @property
    def alive(self) -> bool:
        """Whether the process still reports."""
        return not self.ended and not self.silent

    @property
    def quiet(self) -> bool:
        """Whether it should have reported several times since, but does not count as lost yet."""
        late = self.state not in PATIENT and self.age_seconds >= QUIET_SECONDS
        return late and not self.silent and not self.ended

    @property
    def place(self) -> str:
        """Host and process id, for people."""
        return f"host {self.host}, pid {self.pid}" if self.host else f"pid {self.pid}"
