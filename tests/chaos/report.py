"""The report of a chaos run.

Invariant: a run passed only if every fault was made and recovered from, every process that had been
replaced stopped by itself, and audit, conservation and redo found nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.chaos.plan import KINDS, VICTIMS, Fault


@dataclass(slots=True)
class Outcome:
    """What became of one fault; times in seconds, `at` from the start of the run."""

    fault: Fault
    at: float | None = None
    recovery: float | None = None
    frozen: float | None = None
    replaced_exit: int | None = None
    """Exit code of the frozen process that another one had replaced."""

    def to_json(self) -> dict[str, Any]:
        """The outcome as an entry of the report."""
        fault = self.fault
        line: dict[str, Any] = {
            "number": fault.number,
            "at_seconds": _rounded(self.at),
            "kind": fault.kind,
            "victim": fault.victim,
            "process": fault.process,
            "effect": fault.effect,
            "recovery_seconds": _rounded(self.recovery),
        }
        if fault.point is not None:
            line |= {"point": fault.point, "passage": fault.passage}
        if fault.effect == "freeze":
            line |= {"frozen_seconds": _rounded(self.frozen), "successor": fault.successor}
        if self.replaced_exit is not None:
            line["replaced_exit_code"] = self.replaced_exit
        return line


@dataclass(frozen=True, slots=True)
class Conservation:
    """Whether every group that started is accounted for, and every prompt was used once."""

    started: int
    """Groups in the journal; -1 if the audit counted others."""
    trained: int
    set_aside: int
    outstanding: int
    skipped_ordinals: int
    repeated_ordinals: int

    @property
    def holds(self) -> bool:
        """started = trained + set aside + outstanding, and the ordinals are 0, 1, 2, ..."""
        accounted = self.trained + self.set_aside + self.outstanding
        return (
            self.started == accounted and self.skipped_ordinals == 0 and self.repeated_ordinals == 0
        )


def conservation(audit: dict[str, Any], ordinals: Sequence[int]) -> Conservation:
    """The count, from an audit's report and the ordinals in the journal's order."""
    distinct = set(ordinals)
    return Conservation(
        started=len(ordinals) if len(ordinals) == audit["groups_started"] else -1,
        trained=audit["groups_trained"],
        set_aside=audit["groups_set_aside"],
        outstanding=audit["groups_outstanding"],
        skipped_ordinals=(max(distinct) + 1 if distinct else 0) - len(distinct),
        repeated_ordinals=len(ordinals) - len(distinct),
    )


@dataclass(slots=True)
class Findings:
    """What a chaos run found, as far as it got."""

    seed: int
    engine: str
    outcomes: list[Outcome]
    wall_seconds: float = 0.0
    steps: int = 0
    trajectories: int = 0
    takeovers: int = 0
    resumed_tokens: int = 0
    fenced: int = 0
    """Replaced trainers and coordinators that stopped with the exit code of a fenced process."""
    own_exits: list[str] = field(default_factory=list)
    """Processes that ended although no fault of theirs was made, and were started again."""
    disk_mib: float = 0.0
    audit: dict[str, Any] | None = None
    conservation: Conservation | None = None
    max_staleness_allowed: int = 0
    redo: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)
    """Why the run did not pass, apart from what audit, conservation and redo say."""

    @property
    def passed(self) -> bool:
        """Whether nothing was lost and nobody hung."""
        audit = self.audit
        return (
            not self.failures
            and all(outcome.recovery is not None for outcome in self.outcomes)
            and audit is not None
            and not any(audit["violations"].values())
            and audit["max_staleness"] <= self.max_staleness_allowed
            and self.conservation is not None
            and self.conservation.holds
            and self.redo is not None
            and bool(self.redo["identical"])
        )

    def to_json(self) -> dict[str, Any]:
        """The report as one object."""
        made = [outcome for outcome in self.outcomes if outcome.at is not None]
        times = _times(self.outcomes)
        audit, redo = self.audit or {}, self.redo or {}
        return {
            "seed": self.seed,
            "engine": self.engine,
            "passed": self.passed,
            "faults": {kind: sum(o.fault.kind == kind for o in made) for kind in KINDS},
            "faults_by_victim": {v: sum(o.fault.victim == v for o in made) for v in VICTIMS},
            "recovery_seconds_median": _rounded(median(times)) if times else None,
            "recovery_seconds_max": _rounded(max(times)) if times else None,
            "recovery_seconds_by_victim": {
                victim: {"median": _rounded(median(some)), "max": _rounded(max(some))}
                for victim in VICTIMS
                if (some := _times(o for o in made if o.fault.victim == victim))
            },
            "violations": audit.get("violations"),
            "conserved": self.conservation is not None and self.conservation.holds,
            "conservation": None if self.conservation is None else asdict(self.conservation),
            "max_staleness": audit.get("max_staleness"),
            "max_staleness_allowed": self.max_staleness_allowed,
            "redo_identical": bool(redo.get("identical", False)),
            "redo": self.redo,
            "steps": self.steps,
            "groups": audit.get("groups_started"),
            "trajectories": self.trajectories,
            "takeovers": self.takeovers,
            "resumed_tokens": self.resumed_tokens,
            "duplicates_ignored": audit.get("duplicates_ignored"),
            "fenced": self.fenced,
            "own_exits": self.own_exits,
            "wall_seconds": _rounded(self.wall_seconds),
            "disk_mib": _rounded(self.disk_mib),
            "failures": self.failures,
            "findings": audit.get("findings", []),
            "notes": audit.get("notes", []),
            "list": [outcome.to_json() for outcome in self.outcomes],
        }


def summary(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    made = sum(report["faults"].values())
    lines = [
        f"{made} of {len(report['list'])} faults made: {_counts(report['faults'])}; "
        f"{_counts(report['faults_by_victim'])}",
    ]
    if report["recovery_seconds_median"] is not None:
        lines.append(
            f"seconds to recover: median {report['recovery_seconds_median']}, "
            f"worst {report['recovery_seconds_max']}"
        )
        for victim, figures in report["recovery_seconds_by_victim"].items():
            lines.append(f"  {victim}: median {figures['median']}, worst {figures['max']}")
    lines.append(
        f"{report['steps']} steps, {report['trajectories']} trajectories, {report['takeovers']} "
        f"taken over with {report['resumed_tokens']} tokens kept, "
        f"{report['duplicates_ignored']} duplicates ignored, {report['fenced']} fenced"
    )
    if report["violations"] is not None:
        lines.append(f"violations: {_counts(report['violations'])}")
        lines.append(
            f"largest staleness: {report['max_staleness']} of {report['max_staleness_allowed']}"
        )
    if (count := report["conservation"]) is not None:
        lines.append(
            f"conserved: {_yes(report['conserved'])} ({count['started']} started = "
            f"{count['trained']} trained + {count['set_aside']} set aside + "
            f"{count['outstanding']} outstanding; {count['skipped_ordinals']} prompts skipped, "
            f"{count['repeated_ordinals']} repeated)"
        )
    if (redo := report["redo"]) is not None:
        lines.append(
            f"redo identical: {_yes(report['redo_identical'])} ({redo['steps']} steps redone from "
            f"version 0, {len(redo['differing'])} differ)"
        )
    lines += [f"finding: {finding['sentence']}" for finding in report["findings"]]
    lines += [f"failure: {text}" for text in report["failures"]]
    verdict = "passed" if report["passed"] else "FAILED"
    lines.append(
        f"chaos {verdict} with seed {report['seed']} and engine {report['engine']} in "
        f"{report['wall_seconds']} s"
    )
    return lines


def _times(outcomes: Any) -> list[float]:
    return [outcome.recovery for outcome in outcomes if outcome.recovery is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
