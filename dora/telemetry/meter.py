"""The meter of a process: what its parts report for metrics.

Until `set_meter` is called it keeps nothing, so a process whose metrics are off pays for a call and
no more.
"""

from collections.abc import Callable, Iterable, Mapping

from dora.core.scheduling.workers import WorkerRegistry
from dora.core.state import RunState
from dora.schemas.records import Record, Status, Step

Positions = Mapping[tuple[str, int], int]


class Meter:
    """The meter of a process whose metrics are off; names are those of the catalogue."""

    @property
    def status_metrics(self) -> dict[str, float]:
        """Metrics for the process's own status, such as the port of its endpoint."""
        return {}

    def count(self, name: str, by: float = 1.0, value: str = "") -> None:
        """Add to a counter, under this value of its label."""

    def observe(self, name: str, amount: float) -> None:
        """Add to a histogram."""

    def on_status(self, status: Status) -> None:
        """The process sent this status of itself."""

    def on_step(self, step: Step) -> None:
        """The trainer committed an entry of the ledger."""

    def on_window(self, state: RunState, read: Callable[[], Positions]) -> None:
        """The trainer's window; `read` gives its positions. Measured once a second at most."""

    def on_decisions(self, records: Iterable[Record]) -> None:
        """The coordinator committed these."""

    def on_workers(self, workers: WorkerRegistry, now: float) -> None:
        """The coordinator's workers at `now` of its clock."""

    def close(self) -> None:
        """End."""


_current: list[Meter] = [Meter()]


def meter() -> Meter:
    """The meter of this process."""
    return _current[0]


def set_meter(one: Meter) -> None:
    """Make it the meter of this process."""
    _current[0] = one
