"""A process of a run as its last status shows it.

Invariant: a process is alive only if it spoke within the time that its state allows.
"""

from dataclasses import dataclass, field

from dora.core.processes import PATIENT
from dora.schemas.records import Status


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process by its last own account; `age_seconds` is how long ago that was."""

    process: str
    role: str
    state: str
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
        # An engine that starts or loads weights has no time to report.
        busy = status.state in PATIENT
        return cls(
            process=status.process,
            role=status.role,
            state=status.state,
            message=status.message,
            version=status.version,
            running=len(status.running),
            capacity=status.capacity,
            age_seconds=age,
            silent=age > (load_timeout if busy else heartbeat_timeout),
            host=status.host,
            pid=status.pid,
            incarnation=status.incarnation,
            command_offset=status.command_offset,
            metrics=dict(status.metrics),
        )

    @property
    def ended(self) -> bool:
        """Whether the process said that it is over."""
        return self.state in ("failed", "stopped")

    @property
    def alive(self) -> bool:
        """Whether the process still reports."""
        return not self.ended and not self.silent

    @property
    def place(self) -> str:
        """Host and process id, for people."""
        return f"host {self.host}, pid {self.pid}" if self.host else f"pid {self.pid}"
