"""A simulated log: partitions, transactions, fencing; and what must hold of it at every moment.

Faithful in what the protocol rests on: a partition is ordered and readers see it whole or a prefix
of it; partitions are seen independently of one another; a transaction's records become visible
together in each partition; markers and aborted records take offsets; of two producers with the same
transactional id the older one can commit nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from dora.core.audit.audit import Audit
from dora.core.audit.report import AuditReport
from dora.core.audit.starts import StartCheck
from dora.schemas.records import Policy, Record, RunStarted, Step

RUN = "r"
JOURNAL = (f"{RUN}.dispatch", 0)
LEDGER = (f"{RUN}.steps", 0)
POLICIES = (f"{RUN}.policies", 0)
STATUSES = (f"{RUN}.workers", 0)
HANDOVERS = (f"{RUN}.handovers", 0)
CHUNKS, TRAJECTORIES, DISPATCH = f"{RUN}.chunks", f"{RUN}.trajectories", f"{RUN}.dispatch"

Place = tuple[str, int]
Crash = Literal["before", "inside", "after", "aborted"]
"""Where in its commit a process dies: before, inside or after the transaction; or the transaction
was aborted and the process lives on."""


class Fenced(Exception):
    """Another producer with the same transactional id was started later."""


@dataclass
class Reader:
    """Positions in some partitions of the log."""

    log: "SimulatedLog"
    positions: dict[Place, int] = field(default_factory=dict)

    def read(self, place: Place, count: int | None = None) -> Iterator[tuple[Record, int]]:
        """The next `count` records of a partition (by default all there are), with offsets."""
        records = self.log.partitions.get(place, [])
        while self.positions[place] < len(records) and (count is None or count > 0):
            offset = self.positions[place]
            self.positions[place] += 1
            record = records[offset]
            if record is not None:
                count = None if count is None else count - 1
                yield record, offset

    @property
    def behind(self) -> list[Place]:
        """Partitions that hold something unread."""
        return [place for place, at in self.positions.items() if at < self.log.end(place)]


@dataclass
class SimulatedLog:
    """The log; `starts` checks what is committed."""

    starts: StartCheck
    partitions: dict[Place, list[Record | None]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def end(self, place: Place) -> int:
        """Offset of the next record."""
        return len(self.partitions.get(place, ()))

    def append(self, place: Place, record: Record) -> int:
        """Write without a transaction."""
        self.partitions.setdefault(place, []).append(record)
        return self.end(place) - 1

    def fence(self, transactional_id: str) -> int:
        """The epoch of a new producer; those before it are fenced."""
        self.epochs[transactional_id] = self.epochs.get(transactional_id, 0) + 1
        return self.epochs[transactional_id]

    def check(self, transactional_id: str, epoch: int) -> None:
        """Fenced if there is a newer producer."""
        if self.epochs[transactional_id] != epoch:
            raise Fenced(transactional_id)

    def commit(
        self, transactional_id: str, epoch: int, records: Iterable[tuple[Place, Record]]
    ) -> None:
        """One transaction."""
        self.check(transactional_id, epoch)
        records = list(records)
        for _, record in records:
            fault = self.starts.fault(record)
            assert fault is None, fault
        touched: dict[Place, None] = {}
        for place, record in records:
            self.append(place, record)
            touched[place] = None
        for place in touched:
            self.partitions[place].append(None)  # the marker

    def abort(self, records: Iterable[tuple[Place, Record]]) -> None:
        """A transaction that was not committed leaves offsets that hold nothing."""
        for place, _ in records:
            self.partitions.setdefault(place, []).append(None)

    @property
    def newest(self) -> int:
        """The newest version that the ledger has reached; -1 before the start."""
        versions = [0 if isinstance(r, RunStarted) else r.version_out for r in self.ledger]
        return max(versions, default=-1)

    @property
    def ledger(self) -> list[RunStarted | Step]:
        """All entries."""
        entries = self.partitions.get(LEDGER, [])
        return [entry for entry in entries if isinstance(entry, RunStarted | Step)]

    @property
    def policies(self) -> list[Policy]:
        """All versions announced."""
        return [p for p in self.partitions.get(POLICIES, []) if isinstance(p, Policy)]

    def audit(self) -> AuditReport:
        """The verdict of the real audit on everything written so far."""
        audit = Audit()
        order = (POLICIES[0], LEDGER[0], DISPATCH, TRAJECTORIES, CHUNKS)
        for topic in order:
            for place in sorted(place for place in self.partitions if place[0] == topic):
                if topic == DISPATCH and place != JOURNAL:
                    continue
                for offset, record in enumerate(self.partitions[place]):
                    if record is not None:
                        audit.feed(record, *place, offset)
        return audit.report()
