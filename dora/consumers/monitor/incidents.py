"""The newest incidents of a run, for who watches it.

Invariant: which incidents are shown depends on the records taken, not on the order in which the
topics were read.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from dora.core.groups import NO_SIGNAL
from dora.core.scheduling.scheduler import RUN_COMPLETE
from dora.schemas.records import Command, DeadLetter, Record, Status, Step

RecentKind = Literal["takeover", "move", "taken back", "failed", "dead letter", "set aside"]

SHOWN = 30
_KEPT = 2_000


@dataclass(frozen=True, slots=True, order=True)
class RecentIncident:
    """Something that happened to `subject` (a trajectory, a group or nothing) at or by `process`,
    at `time_ms` of the writer's clock."""

    time_ms: int
    kind: RecentKind
    process: str
    subject: str
    text: str


class RecentIncidents:
    """Keeps the newest; takes any record."""

    def __init__(self) -> None:
        self._newest: list[tuple[RecentIncident, int]] = []
        """With the attempt that a takeover began, else 0."""
        self._moved: dict[tuple[str, int], int] = {}

    def take(self, record: Record) -> None:
        """Note a record if it tells of an incident."""
        match record:
            case Command(kind="move"):
                self._moved[record.trajectory_id, record.attempt] = record.created_ms
                self._trim()
                self._command("move", record, record.reason)
            case Command(kind="yield") if record.reason != RUN_COMPLETE:
                self._command("taken back", record, record.reason)
            case Command(kind="start") if record.attempt > 0:
                tokens = len(record.prefix_token_ids) // 4
                how = f"goes on from {tokens} tokens" if tokens else "begins anew"
                self._command("takeover", record, f"attempt {record.attempt} {how}", record.attempt)
            case Status(state="failed"):
                self._add(record.created_ms, "failed", record.process, "", record.message)
            case DeadLetter():
                said = f"{record.code}: {record.reason}"
                self._add(
                    record.created_ms, "dead letter", record.process, record.trajectory_id, said
                )
            case Step():
                for group in record.set_aside:
                    if group.reason != NO_SIGNAL:  # that is part of the algorithm
                        self._add(
                            record.created_ms, "set aside", "", group.group_id, group.reason or ""
                        )
            case _:
                pass

    def newest(self) -> tuple[RecentIncident, ...]:
        """The newest incidents, oldest first. What was moved is not called taken over as well."""
        shown = [
            incident
            for incident, attempt in sorted(self._newest)
            if (incident.subject, attempt - 1) not in self._moved
        ]
        return tuple(shown[-SHOWN:])

    def _command(self, kind: RecentKind, record: Command, text: str, attempt: int = 0) -> None:
        self._add(record.created_ms, kind, record.worker, record.trajectory_id, text, attempt)

    def _add(
        self, time_ms: int, kind: RecentKind, process: str, subject: str, text: str,
        attempt: int = 0,
    ) -> None:  # fmt: skip
        incident = RecentIncident(time_ms, kind, process, subject, " ".join(text.split()))
        heapq.heappush(self._newest, (incident, attempt))
        if len(self._newest) > _KEPT:
            heapq.heappop(self._newest)

    def _trim(self) -> None:
        if len(self._moved) > 2 * _KEPT:
            newest = heapq.nlargest(_KEPT, self._moved.items(), key=lambda item: (item[1], item[0]))
            self._moved = dict(newest)
