"""Makes the report of what was read.

Invariant: pure; a run without a committed step, without trajectories or without workers has a
report too, with empty curves.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from dora.consumers.report.data import KeyNumbers, RunReport, StepTime, Tail, VersionRow, flattened
from dora.consumers.report.statistics import (
    CURVE_POINTS,
    Moments,
    Point,
    blocks,
    histogram,
    length_edges,
    percentiles,
    wilson,
)
from dora.consumers.report.tally import Control, Scores, Tally
from dora.core.audit.report import AuditReport
from dora.core.identity import schedule_of
from dora.core.step_metrics import idle_share, mismatch_mean, success, total
from dora.log.incidents import Incidents
from dora.schemas.records import Policy, RunStarted, Step

TIME_STEPS = 120
METRICS = (
    "loss",
    "grad_norm",
    "reference_kl",
    "entropy",
    "clip_fraction",
    "logprob_mismatch_mean",
    "logprob_mismatch_max",
    "logprob_mismatch_kl",
    "logprob_drift_mean",
)


def assemble(
    started: RunStarted,
    ledger: Sequence[Step],
    policies: Mapping[int, Policy],
    control: Control,
    tally: Tally,
    *,
    audit: AuditReport | None,
    audit_refused: str | None,
    missing: Sequence[str],
    unreadable: Sequence[str],
) -> RunReport:
    """The report; `audit_refused` says why an audit was asked for and is not there."""
    steps = [entry for entry in ledger if entry.kind == "step"]
    incidents = control.incidents.incidents()
    staleness: Counter[int] = Counter(
        step.version_in - group.version for step in steps for group in step.trained
    )
    last_ms = max(started.created_ms, tally.last_ms, *(e.created_ms for e in ledger[-1:]))
    seconds_of = {
        version: (policy.created_ms - started.created_ms) / 1000
        for version, policy in policies.items()
    } | {step.version_out: _since(started, step) for step in steps}
    longest = max((max(values) for values in tally.lengths.values()), default=0)
    tails = [
        Tail(version, found)
        for version, values in sorted(tally.lengths.items())
        if (found := percentiles(values)) is not None
    ]
    return RunReport(
        run=started.run,
        run_id=started.run_id,
        dora_version=started.dora_version,
        schedule=schedule_of(started.identity),
        started_ms=started.created_ms,
        numbers=_numbers(started, steps, ledger, tally, incidents, staleness, last_ms),
        success=_success(started, steps, tally.by_step),
        reward=_reward(started, steps, tally.by_step),
        evaluations=_evaluations(tally.evaluated, seconds_of, rewards=False),
        evaluation_rewards=_evaluations(tally.evaluated, seconds_of, rewards=True),
        metrics=_metrics(started, steps),
        staleness=dict(sorted(staleness.items())),
        lengths=histogram(tally.lengths.values(), length_edges(longest)),
        tails=tuple(tails),
        errors=dict(tally.errors.most_common()),
        timeline=tally.timeline(),
        times=_times(started, steps),
        generated=tuple(tally.generated.rates()) if tally.trajectories else (),
        trained=_trained(started, steps),
        versions=_versions(started, ledger, policies, tally, seconds_of),
        incidents=incidents,
        audit=audit,
        audit_refused=audit_refused,
        config=flattened(started.config) or flattened(started.identity),
        missing=tuple(missing),
        unreadable=tuple(unreadable),
    )


def _since(started: RunStarted, step: Step) -> float:
    return max(0.0, (step.created_ms - started.created_ms) / 1000)


def _numbers(
    started: RunStarted,
    steps: Sequence[Step],
    ledger: Sequence[Step],
    tally: Tally,
    incidents: Incidents,
    staleness: Counter[int],
    last_ms: int,
) -> KeyNumbers:
    wall = max(0.0, (last_ms - started.created_ms) / 1000)
    metrics = [step.metrics for step in steps]
    evaluated = [
        scores.successes / scores.rewards.count for _, scores in sorted(tally.evaluated.items())
    ]
    measured = success(evaluated, metrics)
    responses = total(metrics, "trajectories")
    trained = sum(staleness.values())
    return KeyNumbers(
        steps=len(steps),
        wall_seconds=wall,
        success_first=measured.first,
        success_last=measured.last,
        success_source=measured.source,
        trajectories=tally.trajectories,
        tokens=tally.tokens,
        tokens_per_second=tally.tokens / wall if wall else None,
        max_staleness=max(staleness, default=0),
        staleness_bound=started.max_staleness,
        staleness_mean=sum(k * n for k, n in staleness.items()) / trained if trained else None,
        groups_trained=trained,
        groups_set_aside=sum(len(entry.set_aside) for entry in ledger),
        live_versions_max=tally.spans.most_at_once(),
        trainer_idle_share=idle_share(metrics),
        logprob_mismatch_mean=mismatch_mean(metrics),
        step_seconds=_since(started, steps[-1]) / len(steps) if steps else None,
        response_length_mean=total(metrics, "tokens") / responses if responses else None,
        takeovers=incidents.counts.get("takeover", 0),
        migrations=incidents.counts.get("migration", 0),
    )


def _success(
    started: RunStarted, steps: Sequence[Step], scores: Mapping[int, Scores]
) -> tuple[Point, ...]:
    """Share of successes of each step's batch as the ledger has it, with Wilson's interval; pooled
    over neighbouring steps where there are many."""
    told = [step for step in steps if "success_rate" in step.metrics]
    points = []
    for chosen in blocks(told, CURVE_POINTS):
        successes = trials = 0.0
        for step in chosen:
            count = step.metrics.get("trajectories")
            if count is None:
                known = scores.get(step.version_out)
                count = float(known.rewards.count) if known is not None else 1.0
            successes += step.metrics["success_rate"] * count
            trials += count
        found = wilson(successes, trials)
        if found is not None:
            points.append(
                Point(
                    chosen[-1].version_out,
                    _since(started, chosen[-1]),
                    found.value,
                    found.low,
                    found.high,
                )
            )
    return tuple(points)


def _reward(
    started: RunStarted, steps: Sequence[Step], scores: Mapping[int, Scores]
) -> tuple[Point, ...]:
    """Mean reward of each step's batch with 1.96 standard errors of its trajectories; without a
    band where these are deleted."""
    told = [step for step in steps if "reward_mean" in step.metrics]
    points = []
    for chosen in blocks(told, CURVE_POINTS):
        mean = math.fsum(step.metrics["reward_mean"] for step in chosen) / len(chosen)
        pooled, whole = Moments(), True
        for step in chosen:
            known = scores.get(step.version_out)
            expected = sum(len(group.samples) for group in step.trained)
            whole = whole and known is not None and known.rewards.count == expected
            if known is not None:
                pooled.merge(known.rewards)
        band = pooled.interval if whole else None
        half = (band.high - band.low) / 2 if band is not None else None
        points.append(
            Point(
                chosen[-1].version_out,
                _since(started, chosen[-1]),
                mean,
                None if half is None else mean - half,
                None if half is None else mean + half,
            )
        )
    return tuple(points)


def _evaluations(
    evaluated: Mapping[int, Scores], seconds_of: Mapping[int, float], *, rewards: bool
) -> tuple[Point, ...]:
    points = []
    for version, scores in sorted(evaluated.items()):
        band = (
            scores.rewards.interval if rewards else wilson(scores.successes, scores.rewards.count)
        )
        if band is not None:
            at = seconds_of.get(version, 0.0)
            points.append(Point(version, at, band.value, band.low, band.high))
    return tuple(points)


def _metrics(started: RunStarted, steps: Sequence[Step]) -> dict[str, tuple[Point, ...]]:
    """Each known metric that the ledger has, a point per step that has it."""
    curves = {
        name: tuple(
            Point(step.version_out, _since(started, step), step.metrics[name])
            for step in steps
            if name in step.metrics and math.isfinite(step.metrics[name])
        )
        for name in METRICS
    }
    return {name: points for name, points in curves.items() if points}


def _times(started: RunStarted, steps: Sequence[Step]) -> tuple[StepTime, ...]:
    """Seconds of each step, or sums over neighbouring steps where there are many."""
    result = []
    before = started.created_ms
    for chosen in blocks(steps, TIME_STEPS):
        spent = [step.metrics for step in chosen]
        idle, train, publish = (
            total(spent, name) for name in ("idle_seconds", "train_seconds", "publish_seconds")
        )
        last = chosen[-1]
        other = max(0.0, (last.created_ms - before) / 1000 - idle - train - publish)
        before = last.created_ms
        result.append(
            StepTime(
                last.version_out, len(chosen), _since(started, last), idle, train, publish, other
            )
        )
    return tuple(result)


def _trained(started: RunStarted, steps: Sequence[Step]) -> tuple[tuple[float, float], ...]:
    """When steps were committed, and the tokens of their batches per second since the one before;
    over neighbouring steps where there are many."""
    result = []
    before = started.created_ms
    for chosen in blocks(steps, CURVE_POINTS):
        wall = (chosen[-1].created_ms - before) / 1000
        before = chosen[-1].created_ms
        if wall > 0:
            tokens = total((step.metrics for step in chosen), "tokens")
            result.append((_since(started, chosen[-1]), tokens / wall))
    return tuple(result)


def _versions(
    started: RunStarted,
    ledger: Sequence[Step],
    policies: Mapping[int, Policy],
    tally: Tally,
    seconds_of: Mapping[int, float],
) -> tuple[VersionRow, ...]:
    steps = {entry.version_out: entry for entry in ledger if entry.kind == "step"}
    aside: Counter[int] = Counter()
    for entry in ledger:
        aside[entry.version_in if entry.kind != "step" else entry.version_out] += len(
            entry.set_aside
        )
    rows = []
    for version in sorted({0, *steps, *policies}):
        step, policy = steps.get(version), policies.get(version)
        checksum = step.weights_checksum if step is not None else ""
        if not checksum and policy is not None:
            checksum = policy.weights_checksum
        rows.append(
            VersionRow(
                version=version,
                seconds=max(0.0, seconds_of.get(version, 0.0)),
                checksum=checksum,
                groups=len(step.trained) if step is not None else None,
                set_aside=aside[version],
                trajectories=len(tally.lengths.get(version, ())),
                kind=policy.kind if policy is not None else None,
                checkpoint=step.checkpoint if step is not None else None,
                size=sum(file.size for file in policy.files) if policy is not None else None,
                trainer=step.trainer if step is not None else None,
            )
        )
    return tuple(rows)
