"""How well a schedule kept trainer and devices busy, computed from a run's log.

Every measure is computed from the records of the measured steps: the `steps` committed after the
first `warmup` ones. Times of the log are wall-clock milliseconds; an emulated second takes
`time_scale` of them. Measures named `*_seconds` are seconds of the emulated cluster.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from dora.log.schedule_log import ScheduleLog

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Emulation:
    """What a scaled run emulates: `time_scale` wall-clock seconds per second of its devices, and
    how long training, publishing and loading weights take there."""

    time_scale: float
    train_seconds: float = 0.0
    train_seconds_per_token: float = 0.0
    publish_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """Wall-clock seconds per step that dora and Kafka take beside the emulated work.

    `commit`: between the end of one step and the begin of the wait for the next: the transaction,
    and reading what has come. `training` and `publishing`: what these took beyond the emulated
    time: decoding, sums over the batch, writing and hashing files. `decision`: from the announced
    version to the first admission or command to load it; where devices or window leave no room,
    waiting for it counts, too. `switching`: the median over workers and versions from
    the command to load a version to the first trajectory there, beyond the emulated time.
    `delivery`: the median from a start command to its worker, for all others. `scoring`: the median
    from a trajectory's last token to its record. `pickup`: from the last record that a batch needed
    to the begin of its training, where the trainer was waiting for it.
    """

    commit: float
    training: float
    publishing: float
    decision: float
    switching: float
    delivery: float
    scoring: float
    pickup: float

    @property
    def total(self) -> float:
        """The sum: as if all of it held the step up."""
        return math.fsum(astuple(self))


@dataclass(frozen=True, slots=True)
class Measures:
    """A schedule's measures over some steps.

    - `step_seconds`: mean time between two commits.
    - `tokens`: mean generated tokens of a step.
    - `trainer_idle_share`: share of the time that the trainer waited for a batch.
    - `rollout_only_share`: share of the time in which at least one trajectory was being generated
      and no step was trained.
    - `staleness_mean`, `staleness_max`: over the trained groups, version of the policy less that of
      the group.
    - `migrations`: trajectories that were moved to another worker, per step.
    - `overhead_share`: `overhead.total` as a share of the step on a cluster in real time, where the
      step takes `step_seconds` and dora takes what it took here. Not all of it holds a step up, so
      it is an upper bound. `scaled_overhead_share` is the share of this run's own, shorter steps.
    - `late_share`: share of the responses' time by which emulated workers reported them too late,
      mean of the workers; see `core.emulation_check`.
    """

    step_seconds: float
    tokens: float
    trainer_idle_share: float
    rollout_only_share: float
    staleness_mean: float
    staleness_max: int
    migrations: float
    overhead: Overhead
    overhead_share: float
    scaled_overhead_share: float
    late_share: float
    trajectories: int


def measure(log: ScheduleLog, warmup: int, steps: int, emulation: Emulation) -> Measures:
    """Measures of the steps `warmup + 1` to `warmup + steps`; ValueError if the log lacks some."""
    if len(log.steps) < warmup + steps or steps < 1:
        raise ValueError(f"{len(log.steps)} steps are committed, {warmup + steps} are needed")
    measured = log.steps[warmup : warmup + steps]
    begin, end = measured_span(log, warmup, steps)
    wall = (end - begin) / 1000
    if wall <= 0:
        raise ValueError(f"the measured steps took {wall} s: the clock went backwards")
    busy = [training_interval(step.created_ms, step.metrics) for step in measured]
    generating = merged(
        (o.start_ms, o.end_ms) for o in log.occupancies(round(end)) if o.end_ms > begin
    )
    alone = length(clipped(generating, begin, end)) - overlap(generating, merged(busy), begin, end)
    staleness = [step.version_in - group.version for step in measured for group in step.trained]
    tokens = sum(step.metrics.get("tokens", 0.0) for step in measured) / steps
    step_wall = wall / steps
    overhead = overhead_of(log, warmup, steps, emulation)
    step_seconds = step_wall / emulation.time_scale
    return Measures(
        step_seconds=step_seconds,
        tokens=tokens,
        trainer_idle_share=sum(s.metrics.get("idle_seconds", 0.0) for s in measured) / wall,
        rollout_only_share=alone / 1000 / wall,
        staleness_mean=statistics.fmean(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        migrations=sum(begin < at <= end for at in log.moved_ms) / steps,
        overhead=overhead,
        overhead_share=overhead.total / step_seconds,
        scaled_overhead_share=overhead.total / step_wall,
        late_share=late_share(log),
        trajectories=sum(len(group.samples) for step in measured for group in step.trained),
    )


def measured_span(log: ScheduleLog, warmup: int, steps: int) -> Interval:
    """Begin and end of the measured steps in Unix milliseconds: the commits before the first and
    of the last; without warm-up the announcement of version 0."""
    begin = log.steps[warmup - 1].created_ms if warmup else log.announced_ms[0]
    return float(begin), float(log.steps[warmup + steps - 1].created_ms)


def training_interval(created_ms: int, metrics: "dict[str, float]") -> Interval:
    """From the beginning of a step's training to its commit. The ledger's record is made once
    training and publishing are done."""
    seconds = metrics.get("train_seconds", 0.0) + metrics.get("publish_seconds", 0.0)
    return created_ms - 1000 * seconds, float(created_ms)


def overhead_of(log: ScheduleLog, warmup: int, steps: int, emulation: Emulation) -> Overhead:
    """The `Overhead` of a step: means per step, or medians where `Overhead` says so."""
    scale = emulation.time_scale
    measured = log.steps[warmup : warmup + steps]
    commits, trainings, publications, decisions, pickups = [], [], [], [], []
    before = measured_span(log, warmup, steps)[0]
    ordered = dict(log.admitted_ms)
    for (_, version), at in log.switched_ms.items():
        ordered[version] = min(at, ordered.get(version, at))
    for step in measured:
        said = step.metrics
        idle, train = said.get("idle_seconds", 0.0), said.get("train_seconds", 0.0)
        publish = said.get("publish_seconds", 0.0)
        commits.append((step.created_ms - before) / 1000 - idle - train - publish)
        emulated = emulation.train_seconds
        emulated += emulation.train_seconds_per_token * said.get("tokens", 0.0)
        trainings.append(train - scale * emulated)
        publications.append(publish - scale * emulation.publish_seconds)
        version = step.version_in
        if version in log.announced_ms and version in ordered:
            decisions.append((ordered[version] - log.announced_ms[version]) / 1000)
        begins = training_interval(step.created_ms, said)[0]
        needed = [
            finished.created_ms
            for group in step.trained
            for sample in group.samples
            if (finished := log.generated.get(f"{group.group_id}/{sample.sample}")) is not None
        ]
        waited = begins - max(needed, default=begins)
        if needed and waited < 1000 * idle:
            pickups.append(waited / 1000)
        before = float(step.created_ms)
    begin, end = measured_span(log, warmup, steps)
    switching, delivery = _arrivals(log, begin, end, scale * emulation.load_seconds)
    scored = [
        (each.created_ms - each.generated_ms) / 1000
        for each in log.generated.values()
        if begin < each.created_ms <= end
    ]
    return Overhead(
        commit=_mean(commits),
        training=_mean(trainings),
        publishing=_mean(publications),
        decision=_mean(decisions),
        switching=_median(switching),
        delivery=_median(delivery),
        scoring=_median(scored),
        pickup=_mean(pickups),
    )


def _arrivals(
    log: ScheduleLog, begin: float, end: float, load: float
) -> tuple[list[float], list[float]]:
    """Seconds from command to start: of the first trajectories of a version on their workers,
    beyond the `load` (seconds); and of all others."""
    first: dict[tuple[str, int], tuple[int, int]] = {}
    later = []
    arrived = sorted(
        (finished.started_ms, order.created_ms, (order.worker, order.version))
        for identity, finished in log.generated.items()
        if (order := log.orders.get(identity, {}).get(finished.attempt)) is not None
        and begin < order.created_ms <= end
    )
    for started, ordered, place in arrived:
        if place not in first:
            first[place] = (started, ordered)
        elif ordered >= first[place][0]:
            later.append((started - ordered) / 1000)
    switching = [
        (started - max(ordered, log.switched_ms[place] + 1000 * load)) / 1000
        for place, (started, ordered) in first.items()
        if place in log.switched_ms
    ]
    return switching, later


def late_share(log: ScheduleLog) -> float:
    """Mean of what the workers report; 0 if none does."""
    said = [m["emulation_late_share"] for m in log.workers.values() if "emulation_late_share" in m]
    return _mean(said)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def clipped(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """What of the intervals lies between `begin` and `end`."""
    parts = [(max(start, begin), min(stop, end)) for start, stop in intervals]
    return [(start, stop) for start, stop in parts if stop > start]


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths."""
    return sum(end - start for start, end in intervals)


def overlap(
    first: Sequence[Interval], second: Sequence[Interval], begin: float, end: float
) -> float:
    """Length of what both unions of disjoint, ordered intervals cover between `begin` and `end`."""
    total, i, j = 0.0, 0, 0
    one, two = clipped(first, begin, end), clipped(second, begin, end)
    while i < len(one) and j < len(two):
        total += max(0.0, min(one[i][1], two[j][1]) - max(one[i][0], two[j][0]))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return total


def _mean(values: Sequence[float]) -> float:
    return max(0.0, statistics.fmean(values)) if values else 0.0


def _median(values: Sequence[float]) -> float:
    return max(0.0, statistics.median(values)) if values else 0.0
