"""Schedules side by side: means and spread over repeated runs, timelines, and what limited a run.

Every schedule's figures are compared with the ideal of its own runs' tokens, and with `sync` in the
same repeat, so that neither lucky lengths nor a slow hour of the machine favours one schedule.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dora.bench.measures import (
    Interval,
    Measures,
    clipped,
    measured_span,
    merged,
    training_interval,
)
from dora.log.schedule_log import ScheduleLog
from dora.simulation.device import LATE_LIMIT

COLUMNS = (
    "step_seconds",
    "ideal_share",
    "ratio_to_sync",
    "trainer_idle_share",
    "rollout_only_share",
    "staleness_mean",
    "staleness_max",
    "migrations",
    "overhead_share",
)
"""Names of the figures of a schedule, as in the JSON file."""

SCALED_OVERHEAD_LIMIT = 0.1
PROCESSOR_LIMIT = 0.95


@dataclass(frozen=True, slots=True)
class RunResult:
    """A measured and audited run. `ideal_seconds` is the ideal step for the tokens of its steps,
    `processor_share` of all processors was in use while it ran. `violations` counts the audit's
    findings but those that the schedule breaks by design (`partial`: versions within a
    trajectory), which are `mixed_version`."""

    schedule: str
    repeat: int
    rollout: int
    measures: Measures
    ideal_seconds: float
    processor_share: float
    violations: int
    mixed_version: int

    @property
    def ideal_share(self) -> float:
        """The ideal step as a share of the measured one."""
        return self.ideal_seconds / self.measures.step_seconds


def compare(results: Sequence[RunResult]) -> dict[str, dict[str, Any]]:
    """By schedule, in order of first appearance: the means of `COLUMNS` over the repeats, and under
    `spread` the smallest and largest value of each. `ratio_to_sync` is how many times faster than
    `sync` of the same repeat; None where that was not run."""
    by_schedule: dict[str, list[RunResult]] = {}
    for result in results:
        by_schedule.setdefault(result.schedule, []).append(result)
    sync = {r.repeat: r.measures.step_seconds for r in by_schedule.get("sync", [])}
    return {name: _summary(runs, sync) for name, runs in by_schedule.items()}


def _summary(runs: Sequence[RunResult], sync: Mapping[int, float]) -> dict[str, Any]:
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for run in runs:
        measures = asdict(run.measures) | {"ideal_share": run.ideal_share}
        for name in COLUMNS:
            if name in measures:
                values[name].append(measures[name])
        if run.repeat in sync:
            values["ratio_to_sync"].append(sync[run.repeat] / run.measures.step_seconds)
    summary: dict[str, Any] = {n: statistics.fmean(v) if v else None for n, v in values.items()}
    summary["staleness_max"] = max(run.measures.staleness_max for run in runs)
    return summary | {
        "spread": {name: [min(each), max(each)] for name, each in values.items() if each},
        "repeats": len(runs),
        "rollout_devices": runs[0].rollout,
        "ideal_seconds": statistics.fmean(run.ideal_seconds for run in runs),
        "tokens_per_step": statistics.fmean(run.measures.tokens for run in runs),
        "violations": sum(run.violations for run in runs),
        "mixed_version": sum(run.mixed_version for run in runs),
        "overhead_seconds": {
            name: statistics.fmean(asdict(run.measures.overhead)[name] for run in runs)
            for name in asdict(runs[0].measures.overhead)
        },
        "scaled_overhead_share": statistics.fmean(r.measures.scaled_overhead_share for r in runs),
        "late_share": max(run.measures.late_share for run in runs),
        "processor_share": max(run.processor_share for run in runs),
    }


def limits(results: Iterable[RunResult]) -> list[str]:
    """Sentences on runs in which this machine was the limit, not the schedule."""
    found = []
    for run in results:
        what = f"{run.schedule}, repeat {run.repeat + 1}"
        late, scaled = run.measures.late_share, run.measures.scaled_overhead_share
        if late > LATE_LIMIT:
            found.append(
                f"{what}: emulated responses were reported {late:.1%} of their time too late"
            )
        if scaled > SCALED_OVERHEAD_LIMIT:
            found.append(
                f"{what}: decoding, commits and messages took {scaled:.1%} of the scaled step"
            )
        if run.processor_share > PROCESSOR_LIMIT:
            found.append(f"{what}: the processors were {run.processor_share:.0%} busy")
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """A device generates `version`, from and to seconds of the emulated cluster."""

    device: str
    version: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The measured steps of a run. `training` are (version made, begin, end)."""

    schedule: str
    seconds: float
    devices: tuple[str, ...]
    spans: tuple[Span, ...]
    training: tuple[tuple[int, float, float], ...]


def timeline(
    log: ScheduleLog,
    schedule: str,
    warmup: int,
    steps: int,
    time_scale: float,
    *,
    interrupts: bool = False,
) -> Timeline:
    """What the devices did while the measured steps went on; `interrupts`: generation pauses while
    a step is trained and goes on with the new version (partial rollouts)."""
    begin, end = measured_span(log, warmup, steps)

    def seconds(at: float) -> float:
        return (at - begin) / 1000 / time_scale

    training = [
        (step.version_out, *clip)
        for step in log.steps[: warmup + steps]
        for clip in clipped([training_interval(step.created_ms, step.metrics)], begin, end)
    ]
    pauses = [(start, stop) for _, start, stop in training] if interrupts else []
    places: dict[tuple[str, int], list[Interval]] = {}
    for each in log.occupancies(round(end)):
        whole = (each.version, each.start_ms, each.end_ms)
        for version, start, stop in _pieces(log, *whole) if interrupts else [whole]:
            places.setdefault((each.worker, version), []).append((start, stop))
    spans = [
        Span(device, version, seconds(start), seconds(stop))
        for (device, version), parts in sorted(places.items())
        for start, stop in _without(clipped(merged(parts), begin, end), pauses)
    ]
    devices = sorted({span.device for span in spans}, key=lambda name: (len(name), name))
    return Timeline(
        schedule,
        seconds(end),
        tuple(devices),
        tuple(spans),
        tuple((version, seconds(start), seconds(stop)) for version, start, stop in training),
    )


def _pieces(
    log: ScheduleLog, version: int, start: float, end: float
) -> Iterable[tuple[int, float, float]]:
    """An attempt that is interrupted, by the version that generates: the newest one announced."""
    changes = sorted((at, v) for v, at in log.announced_ms.items() if v >= version)
    edges = [start, *(float(at) for at, _ in changes if start < at < end), end]
    for left, right in itertools.pairwise(edges):
        newest = max((v for at, v in changes if at <= left), default=version)
        yield newest, left, right


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What of disjoint intervals lies in no hole."""
    rest = list(intervals)
    for begin, end in holes:
        rest = [
            part
            for start, stop in rest
            for part in ((start, min(stop, begin)), (max(start, end), stop))
            if part[1] > part[0]
        ]
    return rest
