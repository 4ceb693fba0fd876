"""Which staleness bound and which split between rollout and training devices suit a workload.

An advice rests on simulations alone, each of which is in it. Where a cluster is large, a
slice of it is simulated: fewer devices with proportionally fewer groups per step, so that every
device has the work that it would have.

The search is coarse to fine: for each bound it starts at the split at which generation with full
batches keeps pace with training, moves to the better neighbour until none is better, and halves its
stride. The step time is a valley over the split: fewer generating devices starve the trainer, more
slow it down.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dora.simulation.presets import Preset, ScheduleVariant
from dora.simulation.scenario import Impossible, Workload, check, scenario_of
from dora.simulation.simulator import Simulated, simulate

WORTH_A_VERSION = 0.01
"""A larger staleness bound must make the step at least this share shorter."""
SLICE_DEVICES = 64
"""Larger clusters are simulated by a slice of about this many devices."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: a schedule on a workload with `rollout` generating devices."""

    workload: Workload
    variant: ScheduleVariant
    rollout: int
    steps: int
    warmup: int
    control_seconds: float = 0.02
    tick_seconds: float = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a case came to: its simulation, and the step as a share of the ideal one."""

    variant: ScheduleVariant
    rollout: int
    training: int
    simulated: Simulated
    ideal_share: float

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.simulated.step_seconds


def judge(case: Case) -> Verdict:
    """Simulates a case. Raises Impossible if it can never run, Stuck if it does not come to its
    end."""
    preset = case.workload.preset
    rollout = preset.devices if case.variant.colocated else case.rollout
    simulated = simulate(
        scenario_of(
            case.workload,
            case.variant,
            rollout,
            steps=case.steps,
            warmup=case.warmup,
            control_seconds=case.control_seconds,
            tick_seconds=case.tick_seconds,
        )
    )
    return Verdict(
        case.variant,
        rollout,
        preset.devices if case.variant.colocated else preset.devices - rollout,
        simulated,
        case.workload.ideal_seconds(simulated.tokens) / simulated.step_seconds,
    )


Judge = Callable[[Sequence[Case]], Iterable[Verdict]]
"""Judges cases, in parallel if it can; the verdicts in their order."""


def judge_in_turn(cases: Sequence[Case]) -> Iterable[Verdict]:
    """One after the other, in this process."""
    return map(judge, cases)


def slice_of(preset: Preset, devices: int = SLICE_DEVICES) -> tuple[Preset, int]:
    """A part of a large cluster with the same work per device, and how many such parts it has."""
    parts = max(1, preset.devices // devices)
    while preset.devices % parts or preset.groups_per_step % parts:
        parts -= 1
    if parts == 1:
        return preset, 1
    part = replace(
        preset,
        devices=preset.devices // parts,
        groups_per_step=preset.groups_per_step // parts,
        splits=(),
    )
    return part, parts


def best_splits(
    workload: Workload,
    variants: Sequence[ScheduleVariant],
    *,
    steps: int,
    warmup: int,
    judges: Judge = judge_in_turn,
    control_seconds: float = 0.02,
    tick_seconds: float = 0.2,
) -> dict[ScheduleVariant, list[Verdict]]:
    """For each schedule all verdicts of its search, the best first. Raises Impossible if a schedule
    fits with no split."""
    preset = workload.preset
    searches = {variant: _Search(preset, variant, workload) for variant in variants}
    while True:
        wanted = [
            Case(workload, variant, rollout, steps, warmup, control_seconds, tick_seconds)
            for variant, search in searches.items()
            for rollout in search.wanted()
        ]
        if not wanted:
            break
        for case, verdict in zip(wanted, judges(wanted), strict=True):
            searches[case.variant].learned(case.rollout, verdict)
    return {
        variant: sorted(search.found.values(), key=lambda verdict: verdict.step_seconds)
        for variant, search in searches.items()
    }


class _Search:
    """Descends into the valley of one schedule."""

    def __init__(self, preset: Preset, variant: ScheduleVariant, workload: Workload) -> None:
        self.found: dict[int, Verdict] = {}
        self._splits: list[int] = []
        reason: Impossible | None = None
        for rollout in (preset.devices,) if variant.colocated else range(1, preset.devices):
            try:
                check(workload, variant, rollout)
            except Impossible as error:
                reason = error
            else:
                self._splits.append(rollout)
        if not self._splits:
            raise reason or Impossible(
                f"{variant.name} needs one device to generate and one to train: "
                f"there are {preset.devices}"
            )
        self._stride = 1 if len(self._splits) < 24 else len(self._splits) // 12
        start = preset.balanced_rollout() if len(self._splits) > 1 else self._splits[0]
        self._at = min(range(len(self._splits)), key=lambda n: abs(self._splits[n] - start))

    def wanted(self) -> list[int]:
        """Splits to try next; none when the search is over."""
        while True:
            around = (self._at, self._at - self._stride, self._at + self._stride)
            near = [self._splits[n] for n in around if 0 <= n < len(self._splits)]
            missing = [rollout for rollout in near if rollout not in self.found]
            if missing:
                return missing
            best = min(near, key=lambda rollout: self.found[rollout].step_seconds)
            if best != self._splits[self._at]:
                self._at = self._splits.index(best)
            elif self._stride > 1:
                self._stride = max(1, self._stride // 3)
            else:
                return []

    def learned(self, rollout: int, verdict: Verdict) -> None:
        """A split was judged."""
        self.found[rollout] = verdict


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended case and why, and the best of each schedule that was looked at."""

    chosen: Verdict
    reason: str
    best: tuple[Verdict, ...]
    parts: int
    """The cluster is this many times as large as what was simulated."""


def advise(
    workload: Workload,
    variants: Sequence[ScheduleVariant],
    *,
    steps: int,
    warmup: int,
    judges: Judge = judge_in_turn,
    control_seconds: float = 0.02,
    tick_seconds: float = 0.2,
) -> Advice:
    """The schedule with the least staleness bound that no larger one beats by more than
    `WORTH_A_VERSION`. Schedules that do not fit are left out; Impossible if none fits."""
    part, parts = slice_of(workload.preset)
    small = replace(workload, preset=part)
    fitting, refused = [], None
    for variant in variants:
        try:
            _Search(part, variant, small)
        except Impossible as error:
            refused = error
        else:
            fitting.append(variant)
    if not fitting:
        raise refused or Impossible("no schedule was named")
    found = best_splits(
        small, fitting, steps=steps, warmup=warmup, judges=judges,
        control_seconds=control_seconds, tick_seconds=tick_seconds,
    )  # fmt: skip
    best = [found[variant][0] for variant in fitting]
    by_staleness = sorted(
        best, key=lambda verdict: (verdict.variant.max_staleness, verdict.step_seconds)
    )
    chosen = by_staleness[0]
    for verdict in by_staleness[1:]:
        if verdict.step_seconds < chosen.step_seconds * (1 - WORTH_A_VERSION):
            chosen = verdict
    return Advice(chosen, _why(chosen, by_staleness, found[chosen.variant]), tuple(best), parts)


def _why(chosen: Verdict, best: Sequence[Verdict], tried: Sequence[Verdict]) -> str:
    simulated = chosen.simulated
    parts = []
    less = [each for each in best if each.variant.max_staleness < chosen.variant.max_staleness]
    more = [each for each in best if each.variant.max_staleness > chosen.variant.max_staleness]
    if less:
        rival = min(less, key=lambda verdict: verdict.step_seconds)
        gain = rival.step_seconds / chosen.step_seconds
        parts.append(f"{gain:.2f} times as fast as {rival.variant.name}, the best with less lag")
    if more:
        rival = min(more, key=lambda verdict: verdict.step_seconds)
        gain = chosen.step_seconds / rival.step_seconds - 1
        parts.append(
            f"{rival.variant.name} would gain {gain:.1%}"
            if gain > 0
            else "more lag would gain nothing"
        )
    if not chosen.variant.colocated:
        starved = simulated.trainer_idle_share
        parts.append(
            f"with {chosen.rollout} of {chosen.rollout + chosen.training} devices for rollout the "
            f"trainer waits {starved:.0%} of the time"
        )
        near = [each for each in tried if abs(each.rollout - chosen.rollout) == 1]
        parts += [
            f"{each.rollout} would take {each.step_seconds / chosen.step_seconds - 1:.0%} longer"
            for each in sorted(near, key=lambda each: each.rollout)
        ]
    return "; ".join(parts)
