"""What an audit found: counts, and a sentence with ids and offsets for each violation.

The counts are complete; of each kind only the first findings are kept, so that a report
on a thoroughly damaged log stays small.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

MEANINGS: dict["Kind", str] = {
    "lost": "started or named, but not there",
    "duplicated": "started, trained or written more than once",
    "mixed_version": "tokens of more than one version",
    "mixed_prompt": "samples of more than one prompt in a group",
    "stale": "trained too many versions later",
    "incomplete_group": "trained without all its samples",
    "torn_step": "ledger, policies and samples disagree",
    "checksum": "other weights than the ledger says",
}


Kind = Literal[
    "lost",
    "duplicated",
    "mixed_version",
    "mixed_prompt",
    "stale",
    "incomplete_group",
    "torn_step",
    "checksum",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
FINDINGS_KEPT = 200
"""Findings kept of each kind, and notes kept."""


@dataclass(frozen=True, slots=True)
class Place:
    """A record of the log."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation: what it concerns, where it shows, and what it is in a sentence."""

    kind: Kind
    ids: tuple[str, ...]
    places: tuple[Place, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of an audit. All groups are those of training; evaluation is left out.

    `groups_outstanding` counts those that may still be trained: one whose version has left the
    window is lost, and the groups are then not `conserved`. `max_staleness` is the largest
    `version_in - version` of a trained group, 0 while none is. `duplicates_ignored` counts finished
    records that do not count because an earlier one does; `notes` say what could not be checked and
    why.
    """

    run: str
    steps: int
    groups_started: int
    groups_trained: int
    groups_set_aside: int
    groups_outstanding: int
    max_staleness: int
    trajectories: int
    duplicates_ignored: int
    violations: dict[Kind, int]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def conserved(self) -> bool:
        """Whether every group that was started is trained, set aside or outstanding."""
        return self.groups_started == (
            self.groups_trained + self.groups_set_aside + self.groups_outstanding
        )

    @property
    def violated(self) -> bool:
        """Whether any rule is broken."""
        return any(self.violations.values())

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "run": self.run,
            "steps": self.steps,
            "groups_started": self.groups_started,
            "groups_trained": self.groups_trained,
            "groups_set_aside": self.groups_set_aside,
            "groups_outstanding": self.groups_outstanding,
            "conserved": self.conserved,
            "max_staleness": self.max_staleness,
            "violations": dict(self.violations),
            "trajectories": self.trajectories,
            "duplicates_ignored": self.duplicates_ignored,
            "findings": [
                {
                    "kind": finding.kind,
                    "ids": list(finding.ids),
                    "offsets": [
                        {
                            "topic": place.topic,
                            "partition": place.partition,
                            "offset": place.offset,
                        }
                        for place in finding.places
                    ],
                    "sentence": finding.sentence,
                }
                for finding in self.findings
            ],
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Findings:
    """Collects violations and notes while an audit runs."""

    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    kept: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    notes_omitted: int = 0

    def add(
        self, kind: Kind, sentence: str, *places: Place, ids: tuple[str, ...] = (), count: int = 1
    ) -> None:
        """Count `count` violations and keep the sentence, if there is room."""
        if self.counts[kind] < FINDINGS_KEPT:
            self.kept.append(Finding(kind, ids, places, sentence))
        self.counts[kind] += count

    def note(self, sentence: str) -> None:
        """Keep a remark that is no violation, if there is room."""
        if len(self.notes) < FINDINGS_KEPT:
            self.notes.append(sentence)
        else:
            self.notes_omitted += 1

    def copy(self) -> "Findings":
        """An independent copy."""
        return Findings(dict(self.counts), list(self.kept), list(self.notes), self.notes_omitted)

    @property
    def sorted(self) -> tuple[Finding, ...]:
        """The findings kept, by kind; within a kind in order of discovery."""
        return tuple(sorted(self.kept, key=lambda finding: KINDS.index(finding.kind)))
