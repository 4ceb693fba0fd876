"""The newest incidents of a run, for who watches it.

Invariant: which incidents are shown depends on the records taken, not on the order in which the
topics were read.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from dora.schemas.records import Command, DeadLetter, Record, Status, Step

RecentKind = Literal["takeover", "move", "taken back", "failed", "dead letter", "set aside"]

SHOWN = 30
_KEPT = 2_000
_ROUTINE = frozenset({"no_signal"})
"""Reasons to set a group aside that are part of the algorithm."""


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
        self._newest: list[RecentIncident] = []
        self._moved: dict[tuple[str, int], int] = {}

    def take(self, record: Record) -> None:
        """Note a record if it tells of an incident."""
        match record:
            case Command(kind="move"):
                self._moved[record.trajectory_id, record.attempt] = record.created_ms
                self._trim()
                self._add(record.created_ms, "move", record.worker, record.trajectory_id,
                          record.reason)  # fmt: skip
            case Command(kind="yield"):
                self._add(record.created_ms, "taken back", record.worker, record.trajectory_id,
                          record.reason)  # fmt: skip
            case Command(kind="start") if record.attempt > 0:
                tokens = len(record.prefix_token_ids) // 4
                how = f"goes on from {tokens} tokens" if tokens else "begins anew"
                self._add(record.created_ms, "takeover", record.worker, record.trajectory_id,
                          f"attempt {record.attempt} {how}")  # fmt: skip
            case Status(state="failed"):
                self._add(record.created_ms, "failed", record.process, "", record.message)
            case DeadLetter():
                said = f"{record.code}: {record.reason}"
                self._add(record.created_ms, "dead letter", record.process, record.trajectory_id,
                          said)  # fmt: skip
            case Step():
                for group in record.set_aside:
                    if group.reason not in _ROUTINE:
                        self._add(record.created_ms, "set aside", "", group.group_id,
                                  group.reason or "")  # fmt: skip
            case _:
                pass

    def newest(self) -> tuple[RecentIncident, ...]:
        """The newest incidents, oldest first. What was moved is not called taken over as well."""
        shown = [each for each in sorted(self._newest) if not self._is_move(each)]
        return tuple(shown[-SHOWN:])

    def _is_move(self, incident: RecentIncident) -> bool:
        if incident.kind != "takeover":
            return False
        attempt = int(incident.text.split(" ", 2)[1])
        return (incident.subject, attempt - 1) in self._moved

    def _add(self, time_ms: int, kind: RecentKind, process: str, subject: str, text: str) -> None:
        heapq.heappush(
            self._newest, RecentIncident(time_ms, kind, process, subject, " ".join(text.split()))
        )
        if len(self._newest) > _KEPT:
            heapq.heappop(self._newest)

    def _trim(self) -> None:
        if len(self._moved) > 2 * _KEPT:
            newest = heapq.nlargest(_KEPT, self._moved.items(), key=lambda item: (item[1], item[0]))
            self._moved = dict(newest)
