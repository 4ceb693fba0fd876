"""What went wrong in a run and what was done about it, from commands, statuses and ledger.

Invariant: counts are complete; of events and of reasons only the first are kept, so that a report
on a run full of incidents stays small. Incarnations are known from what they wrote: a process that
came and went without a word in the log is not seen.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dora.core.scheduling.scheduler import RUN_COMPLETE
from dora.log.schedule_log import Ordered
from dora.schemas.records import Command, DeadLetter, Status, Step

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
_REASONS_HELD = 2_000


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

    @property
    def total(self) -> int:
        """Number of incidents of all kinds."""
        return sum(self.counts.values())


@dataclass(slots=True)
class IncidentFold:
    """Collects incidents; feed commands, statuses, dead letters and ledger entries."""

    _counts: Counter[IncidentKind] = field(default_factory=Counter)
    _reasons: dict[IncidentKind, Counter[str]] = field(default_factory=dict)
    _events: dict[IncidentKind, list[Incident]] = field(default_factory=dict)
    _incarnations: dict[tuple[_Role, str], dict[str, int]] = field(default_factory=dict)
    """By role and process: when each incarnation was first heard of."""
    _moved: set[tuple[str, int]] = field(default_factory=set)

    def command(self, record: Command) -> None:
        """A command to a worker."""
        self._incarnation("worker", record.worker, record.incarnation, record.created_ms)
        attempt = f"{record.trajectory_id}#{record.attempt}"
        match record.kind:
            case "move":
                self._moved.add((record.trajectory_id, record.attempt))
                text = f"{attempt} leaves {record.worker}: {record.reason}"
                self._add("migration", record.created_ms, text, record.reason)
            case "yield" if record.reason != RUN_COMPLETE:
                text = f"{record.worker} is to drop {attempt}: {record.reason}"
                self._add("superseded", record.created_ms, text, record.reason)
            case "stop" if record.reason != RUN_COMPLETE:
                text = f"{record.worker} ({record.incarnation[:8]}) is to stop: {record.reason}"
                self._add("fencing", record.created_ms, text, "worker replaced by a newer one")
            case _:
                pass

    def status(self, record: Status) -> None:
        """What a process says of itself."""
        role: _Role = "worker" if record.role == "rollout" else record.role
        self._incarnation(role, record.process, record.incarnation, record.created_ms)
        if record.state == "failed":
            text = f"{record.process} failed: {record.message or 'no message'}"
            self._add("failure", record.created_ms, text, record.message or "no message")

    def dead_letter(self, record: DeadLetter) -> None:
        """What could not be read or scored."""
        about = f"{record.trajectory_id}: " if record.trajectory_id else ""
        text = f"{record.code}, {about}{record.reason} (from {record.process})"
        self._add("dead letter", record.created_ms, text, record.code)

    def entry(self, record: Step) -> None:
        """An entry of the ledger."""
        self._incarnation("trainer", "trainer", record.trainer, record.created_ms)
        for group in record.set_aside:
            reason = group.reason or "no reason"
            text = f"{group.group_id} of version {group.version}: {reason}"
            self._add("set aside", record.created_ms, text, reason)

    def attempts(self, orders: Mapping[str, Mapping[int, Ordered]]) -> None:
        """Start commands by trajectory and attempt, once all commands were taken."""
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
            reasons={kind: _most(found) for kind, found in self._reasons.items()},
            events=tuple(sorted(events, key=lambda event: event.at_ms)),
        )

    def _incarnation(self, role: _Role, process: str, incarnation: str, at_ms: int) -> None:
        known = self._incarnations.setdefault((role, process), {})
        known[incarnation] = min(at_ms, known.get(incarnation, at_ms))

    def _add(self, kind: IncidentKind, at_ms: int, text: str, reason: str) -> None:
        self._counts[kind] += 1
        reasons = self._reasons.setdefault(kind, Counter())
        if reason in reasons or len(reasons) < _REASONS_HELD:
            reasons[reason] += 1
        else:
            reasons["other reasons"] += 1
        kept = self._events.setdefault(kind, [])
        if len(kept) < EVENTS_KEPT:
            kept.append(Incident(at_ms, kind, text))


def _most(found: Counter[str]) -> tuple[tuple[str, int], ...]:
    top = found.most_common(REASONS_KEPT)
    rest = sum(found.values()) - sum(count for _, count in top)
    return (*top, ("other reasons", rest)) if rest else tuple(top)
