"""What a report shows of a run, as values.

Their size is bounded whatever the run's size is, except curves with a point per step, which
`statistics.thinned` makes small.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dora.consumers.report.statistics import Histogram, Percentiles, Point
from dora.consumers.report.timeline import Timeline
from dora.core.audit.report import AuditReport
from dora.log.incidents import Incidents


@dataclass(frozen=True, slots=True)
class KeyNumbers:
    """The numbers at the top; None where the log does not say. The same as `dora run`'s summary.

    `success_source` is `evaluation` where held-out prompts were evaluated, else `training`. Wall
    time runs from the run's start to its last ledger entry or trajectory, interruptions included.
    """

    steps: int
    wall_seconds: float
    success_first: float | None
    success_last: float | None
    success_source: str
    trajectories: int
    tokens: int
    tokens_per_second: float | None
    max_staleness: int
    staleness_bound: int
    staleness_mean: float | None
    groups_trained: int
    groups_set_aside: int
    set_aside_reason: str
    """The commonest, with its count; empty without one."""
    dead_letter_reason: str
    truncated_share: float | None
    unscored_share: float | None
    live_versions_max: int
    trainer_idle_share: float | None
    logprob_mismatch_mean: float | None
    step_seconds: float | None
    response_length_mean: float | None
    takeovers: int
    migrations: int


@dataclass(frozen=True, slots=True)
class Tail:
    """Generated tokens of the training trajectories of one version."""

    version: int
    lengths: Percentiles


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the seconds of a step went that was committed `seconds` after the run's start, or of
    `steps` neighbouring ones. `other` is the rest: the commit and standstill."""

    step: int
    steps: int
    seconds: float
    idle: float
    train: float
    publish: float
    other: float


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version and where it came from; None where the log does not have it any more
    (announcements are compacted). `size` is in bytes, `seconds` count from the run's start."""

    version: int
    seconds: float
    checksum: str
    groups: int | None
    set_aside: int
    trajectories: int
    kind: str | None
    checkpoint: str | None
    size: int | None
    trainer: str | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run. Curves of training are over the committed steps, `evaluations` over versions; a point
    of the step that made version n has `step` n."""

    run: str
    run_id: str
    dora_version: str
    schedule: str
    started_ms: int
    numbers: KeyNumbers
    success: tuple[Point, ...]
    reward: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    evaluation_rewards: tuple[Point, ...]
    metrics: dict[str, tuple[Point, ...]]
    staleness: dict[int, int]
    lengths: Histogram
    tails: tuple[Tail, ...]
    errors: dict[str, int]
    timeline: Timeline
    times: tuple[StepTime, ...]
    generated: tuple[tuple[float, float], ...]
    trained: tuple[tuple[float, float], ...]
    versions: tuple[VersionRow, ...]
    incidents: Incidents
    audit: AuditReport | None
    audit_refused: str | None
    config: dict[str, str]
    missing: tuple[str, ...]
    unreadable: tuple[str, ...]


def flattened(recorded: str) -> dict[str, str]:
    """A recorded configuration (JSON) as `section.key` to value in JSON; empty if it is none."""
    try:
        data = json.loads(recorded) if recorded else {}
    except ValueError:
        return {}
    return dict(_flat("", data)) if isinstance(data, dict) else {}


def _flat(prefix: str, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            found += _flat(f"{prefix}{key}.", value)
        else:
            found.append((f"{prefix}{key}", json.dumps(value, ensure_ascii=False)))
    return found


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of two configurations; None where one does not have it."""

    key: str
    first: str | None
    second: str | None


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[Difference]:
    """The keys with different values, in order; the run's name and directory are left out."""
    keys = {*first, *second} - {"run.name", "run.directory"}
    return [
        Difference(key, first.get(key), second.get(key))
        for key in sorted(keys)
        if first.get(key) != second.get(key)
    ]


def other_task(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Whether two configurations train on different tasks, so that success cannot be compared."""
    names = ("task.kind", "task.name", "task.path", "task.verifier", "task.parameters")
    keys = {k for k in {*first, *second} if k in names or k.startswith("task.parameters.")}
    return any(first.get(key) != second.get(key) for key in keys)
