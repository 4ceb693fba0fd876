"""Incidents of a run: what went wrong, and what was done about it.

`incident_kind` says which records tell of one. `RecentIncidents` keeps the newest for the live
view, whatever the order in which topics are read. `IncidentTally` counts all for a report and
keeps the first events and reasons, so that a report on a run full of incidents stays small.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dora.core.groups import NO_SIGNAL, CommonReason, ReasonTally
from dora.core.scheduling.scheduler import RUN_COMPLETE
from dora.log.schedule_log import Ordered
from dora.schemas.records import Command, DeadLetter, Record, Status, Step

RecentKind = Literal["takeover", "move", "taken back", "failed", "dead letter", "set aside"]

SHOWN = 30
_KEPT = 2_000
IncidentKind = Literal[
    "takeover",
    "migration",
    "superseded",
    "trainer",
    "coordinator",
    "worker",
    "fencing",
    "failure",
    "dead letter",
    "set aside",
]
_Role = Literal["trainer", "coordinator", "worker"]
EVENTS_KEPT = 200
"""Events kept of each kind."""
REASONS_KEPT = 20
"""Reasons shown of each kind; the others are added up."""


def letter_reason(letter: DeadLetter) -> str:
    """Why a dead letter was written, for people and for counting."""
    return f"{letter.code}: {letter.reason}"


def incident_kind(record: Record) -> IncidentKind | None:
    """The kind of incident that a record tells of. Orders at the end of a run are none."""
    match record:
        case Command(kind="move"):
            return "migration"
        case Command(kind="yield") if record.reason != RUN_COMPLETE:
            return "superseded"
        case Command(kind="stop") if record.reason != RUN_COMPLETE:
            return "fencing"
        case Command(kind="start") if record.attempt > 0:
            return "takeover"
        case Status(state="failed"):
            return "failure"
        case DeadLetter():
            return "dead letter"
        case Step() if record.set_aside:
            return "set aside"
        case _:
            return None


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
    """The newest incidents of the records handled."""

    def __init__(self) -> None:
        self._newest: list[tuple[RecentIncident, int]] = []
        """With the attempt that a takeover began, else 0."""
        self._moved: dict[tuple[str, int], int] = {}

    def handle(self, record: Record) -> None:
        """Note a record if it tells of an incident."""
        match incident_kind(record), record:
            case "migration", Command():
                self._moved[record.trajectory_id, record.attempt] = record.created_ms
                self._trim()
                self._command("move", record, record.reason)
            case "superseded", Command():
                self._command("taken back", record, record.reason)
            case "takeover", Command():
                tokens = len(record.prefix_token_ids) // 4
                how = f"goes on from {tokens} tokens" if tokens else "begins anew"
                self._command("takeover", record, f"attempt {record.attempt} {how}", record.attempt)
            case "failure", Status():
                self._add(record.created_ms, "failed", record.process, "", record.message)
            case "dead letter", DeadLetter():
                self._add(
                    record.created_ms,
                    "dead letter",
                    record.process,
                    record.trajectory_id,
                    letter_reason(record),
                )
            case "set aside", Step():
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


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened at `at_ms` (Unix milliseconds of the record's writer)."""

    at_ms: int
    kind: IncidentKind
    text: str


@dataclass(frozen=True, slots=True)
class Incidents:
    """Everything unusual: how often each kind, why (most frequent reasons first), and the first
    events of each kind in the order of time."""

    counts: dict[IncidentKind, int]
    reasons: dict[IncidentKind, tuple[tuple[str, int], ...]]
    events: tuple[Incident, ...]

    def commonest(self, kind: IncidentKind) -> str:
        """The commonest reason of a kind with its count, for people; empty without one."""
        found = self.reasons.get(kind, ())
        return CommonReason(*found[0], self.counts[kind]).text if found else ""

    @property
    def total(self) -> int:
        """Number of incidents of all kinds."""
        return sum(self.counts.values())


@dataclass(slots=True)
class IncidentTally:
    """Counts incidents of commands, statuses, dead letters and ledger entries."""

    _counts: Counter[IncidentKind] = field(default_factory=Counter)
    _reasons: dict[IncidentKind, ReasonTally] = field(default_factory=dict)
    _events: dict[IncidentKind, list[Incident]] = field(default_factory=dict)
    _incarnations: dict[tuple[_Role, str], dict[str, int]] = field(default_factory=dict)
    """By role and process: when each incarnation was first heard of."""
    _moved: set[tuple[str, int]] = field(default_factory=set)

    def handle(self, record: Command | Status | DeadLetter | Step) -> None:
        """Count what a record tells of. Takeovers are counted by `attempts`."""
        at = record.created_ms
        match record:
            case Command():
                self._incarnation("worker", record.worker, record.incarnation, at)
            case Status():
                role: _Role = "worker" if record.role == "rollout" else record.role
                self._incarnation(role, record.process, record.incarnation, at)
            case Step():
                self._incarnation("trainer", "trainer", record.trainer, at)
            case DeadLetter():
                pass
        match incident_kind(record), record:
            case "migration", Command():
                self._moved.add((record.trajectory_id, record.attempt))
                text = f"{_attempt(record)} leaves {record.worker}: {record.reason}"
                self._add("migration", at, text, record.reason)
            case "superseded", Command():
                text = f"{record.worker} is to drop {_attempt(record)}: {record.reason}"
                self._add("superseded", at, text, record.reason)
            case "fencing", Command():
                text = f"{record.worker} ({record.incarnation[:8]}) is to stop: {record.reason}"
                self._add("fencing", at, text, "worker replaced by a newer one")
            case "failure", Status():
                reason = record.message or "no message"
                self._add("failure", at, f"{record.process} failed: {reason}", reason)
            case "dead letter", DeadLetter():
                about = f"{record.trajectory_id}: " if record.trajectory_id else ""
                text = f"{record.code}, {about}{record.reason} (from {record.process})"
                self._add("dead letter", at, text, letter_reason(record))
            case "set aside", Step():
                for group in record.set_aside:
                    reason = group.reason or "no reason"
                    text = f"{group.group_id} of version {group.version}: {reason}"
                    self._add("set aside", at, text, reason)
            case _:
                pass

    def attempts(self, orders: Mapping[str, Mapping[int, Ordered]]) -> None:
        """Start commands by trajectory and attempt, once all commands were handled."""
        for identity, attempts in orders.items():
            for number, order in sorted(attempts.items()):
                if number == 0 or (identity, number - 1) in self._moved:
                    continue
                before = attempts.get(number - 1)
                lost = before.worker if before is not None else "a worker"
                again = before is not None and before.worker == order.worker
                reason = "its worker started anew" if again else "its worker was lost"
                text = f"{identity}#{number} goes on at {order.worker}: {lost} "
                text += "started anew" if again else "was lost"
                self._add("takeover", order.created_ms, text, reason)

    def incidents(self) -> Incidents:
        """What was collected."""
        for (role, process), known in self._incarnations.items():
            ordered = sorted(known.items(), key=lambda item: item[1])
            for (before, _), (after, at) in itertools.pairwise(ordered):
                text = f"{process}: {after[:8]} follows {before[:8]}"
                self._add(role, at, text, "another incarnation")
        self._incarnations.clear()
        events = [event for kept in self._events.values() for event in kept]
        return Incidents(
            counts=dict(self._counts),
            reasons={kind: found.most(REASONS_KEPT) for kind, found in self._reasons.items()},
            events=tuple(sorted(events, key=lambda event: event.at_ms)),
        )

    def _incarnation(self, role: _Role, process: str, incarnation: str, at_ms: int) -> None:
        known = self._incarnations.setdefault((role, process), {})
        known[incarnation] = min(at_ms, known.get(incarnation, at_ms))

    def _add(self, kind: IncidentKind, at_ms: int, text: str, reason: str) -> None:
        self._counts[kind] += 1
        self._reasons.setdefault(kind, ReasonTally()).add(reason)
        kept = self._events.setdefault(kind, [])
        if len(kept) < EVENTS_KEPT:
            kept.append(Incident(at_ms, kind, text))


def _attempt(record: Command) -> str:
    return f"{record.trajectory_id}#{record.attempt}"
