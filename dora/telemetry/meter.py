"""Where the parts of a run say what they measure.

Invariant: a process has one meter. Until `use` is called it is one that takes everything and keeps
nothing, so that a process whose metrics are off pays for a call and no more.
"""

from collections.abc import Callable, Iterable, Mapping

from dora.core.scheduling.workers import WorkerRegistry
from dora.core.state import RunState
from dora.schemas.records import Record, Status, Step

Positions = Mapping[tuple[str, int], int]


class Meter:
    """The meter of a process whose metrics are off; names are those of the catalogue."""

    @property
    def said(self) -> dict[str, float]:
        """What the status of the process says of it, such as the port of its endpoint."""
        return {}

    def count(self, name: str, by: float = 1.0, value: str = "") -> None:
        """Add to a counter, under this value of its label."""

    def observe(self, name: str, amount: float) -> None:
        """Add to a histogram."""

    def heard(self, status: Status) -> None:
        """The process reports this of itself."""

    def stepped(self, step: Step) -> None:
        """The trainer committed an entry of the ledger."""

    def window(self, state: RunState, read: Callable[[], Positions]) -> None:
        """Where the trainer is; `read` are its positions. Looked at once a second at most."""

    def decided(self, records: Iterable[Record]) -> None:
        """The coordinator committed these."""

    def workers(self, workers: WorkerRegistry, now: float) -> None:
        """The coordinator's workers at `now` of its clock."""

    def close(self) -> None:
        """End."""


_current: list[Meter] = [Meter()]


def meter() -> Meter:
    """The meter of this process."""
    return _current[0]


def use(one: Meter) -> None:
    """Make it the meter of this process."""
    _current[0] = one
