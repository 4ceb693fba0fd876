"""Reads a run's log into a `RunReport`.

The trajectories are read once; of each only its length, sums and times stay. Records that are
missing or unreadable are named in the report and do not stop it. The log may grow meanwhile: the
ledger is read first, so the records that it names are there.
"""

import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dora.bus.settings import ClusterSettings
from dora.consumers.audit import Progress, audit_run
from dora.consumers.report.data import KeyNumbers, RunReport, StepTime, Tail, VersionRow, flattened
from dora.consumers.report.statistics import (
    CURVE_POINTS,
    Moments,
    Point,
    TimeBins,
    blocks,
    histogram,
    length_edges,
    percentiles,
    wilson,
)
from dora.consumers.report.timeline import Timeline, TimelineFold
from dora.core.audit.report import AuditReport
from dora.core.identity import schedule_of, success_threshold
from dora.core.step_metrics import VersionSpans, idle_share, mismatch_mean, share, success, total
from dora.errors import DeadlineError, RunError, TopicError
from dora.log.incidents import Incidents, IncidentTally
from dora.log.run_log import RunLog
from dora.log.schedule_log import Ordered, attempt_spans
from dora.schemas.records import (
    Admission,
    Command,
    DeadLetter,
    Policy,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

_PROGRESS_RECORDS = 5_000


def read_report(
    settings: ClusterSettings,
    run: str,
    *,
    audit: bool = True,
    deadline: float = 3600.0,
    progress: Progress | None = None,
) -> RunReport:
    """The report of `run` as of now; without `audit` the log is not audited.

    `progress` is called now and then with a topic and the records of it that were read. TopicError
    if there is no such run, RunError if it has not begun, BusError if the cluster fails,
    DeadlineError if a pass over a topic, or everything until the audit's end, takes more than
    `deadline` seconds.
    """
    until = time.monotonic() + deadline
    log = RunLog(settings, run, deadline=deadline)
    control = Control(log.started, log.ledger)
    for record in log.control():
        control.add(record)
    control.incidents.attempts(control.orders)
    newest = max((step.version_out for step in log.ledger), default=0)
    tally = Tally(
        log.started,
        max(newest, *log.policies, 0),
        log.trained_at(),
        log.admissions.values(),
        control,
    )
    for number, placed in enumerate(log.trajectories()):
        tally.add(placed.record)
        if progress is not None and number % _PROGRESS_RECORDS == 0:
            progress(log.topics.trajectories, number)
    audited: AuditReport | None = None
    refused: str | None = None
    if audit:
        try:
            left = until - time.monotonic()
            audited = audit_run(settings, run, deadline=left, progress=progress)
        except DeadlineError as error:
            raise DeadlineError(
                f"the report of run {run} took more than {deadline:g} s",
                hint="Give it more time with --timeout, or leave the audit out with --no-audit.",
            ) from error
        except (TopicError, RunError) as error:
            refused = error.message
    return assemble(
        log.started,
        log.ledger,
        log.policies,
        control,
        tally,
        audit=audited,
        audit_refused=refused,
        missing=log.missing,
        unreadable=log.unreadable,
    )


_ERRORS_HELD = 200


@dataclass(slots=True)
class Scores:
    """Rewards of some trajectories, and how many were successes; those without one are left out."""

    rewards: Moments = field(default_factory=Moments)
    successes: int = 0


class Control:
    """What a report keeps of a run's commands, statuses and dead letters; their order is free."""

    def __init__(self, started: RunStarted, ledger: Iterable[Step]) -> None:
        self.incidents = IncidentTally()
        self.orders: dict[str, dict[int, Ordered]] = {}
        """Start commands by trajectory and attempt, evaluations included."""
        self.workers: set[str] = set()
        self.last_ms = started.created_ms
        """Time of the last record."""
        self.settled_ms: dict[str, int] = {}
        """When each group was trained or set aside: its trajectories had ended by then."""
        for entry in ledger:
            self.incidents.handle(entry)
            for group in (*entry.trained, *entry.set_aside):
                self.settled_ms[group.group_id] = entry.created_ms
            self.last_ms = max(self.last_ms, entry.created_ms)

    def add(self, record: Command | Status | DeadLetter) -> None:
        """Add one record."""
        self.incidents.handle(record)
        if isinstance(record, Command) and record.kind == "start":
            order = Ordered(record.worker, record.policy_version, record.created_ms)
            self.orders.setdefault(record.trajectory_id, {}).setdefault(record.attempt, order)
            self.workers.add(record.worker)
        self.last_ms = max(self.last_ms, record.created_ms)


class Tally:
    """Adds up the counted trajectories of a run, in any order, once `control` is complete."""

    def __init__(
        self,
        started: RunStarted,
        newest: int,
        trained_at: Mapping[str, int],
        admissions: Iterable[Admission],
        control: Control,
    ) -> None:
        self.threshold = success_threshold(started.identity)
        self.trajectories = 0
        self.tokens = 0
        self.last_ms = 0
        self.by_step: dict[int, Scores] = {}
        """Trained trajectories by the version that their step made."""
        self.evaluated: dict[int, Scores] = {}
        """Evaluation by version."""
        self.lengths: dict[int, array[int]] = {}
        """Generated tokens of training trajectories by version."""
        self.errors: Counter[str] = Counter()
        """Trajectories without a reward by the code of their error."""
        self.generated = TimeBins()
        self.spans = VersionSpans()
        self._started_ms = started.created_ms
        self._trained_at = trained_at
        self._orders = control.orders
        self._settled_ms = control.settled_ms
        self._end_ms = control.last_ms
        self._timeline = TimelineFold(control.workers, newest, started.created_ms, self._end_ms)
        for admission in admissions:
            if admission.purpose == "train":
                self.spans.start(admission.policy_version, admission.created_ms)

    def add(self, record: Trajectory) -> None:
        """Add a trajectory that was not added before."""
        tokens = record.generated_tokens
        self.trajectories += 1
        self.tokens += tokens
        self.last_ms = max(self.last_ms, record.created_ms)
        begin = (record.started_ms - self._started_ms) / 1000
        end = (record.generated_ms - self._started_ms) / 1000
        self.generated.spread(begin, end, tokens - record.resumed_tokens)
        attempts = self._orders.pop(record.trajectory_id, None)
        if attempts is not None:
            self._timeline.add(attempt_spans(attempts, record, self._end_ms))
        if record.reward is None:
            code = (record.error or "").partition(":")[0]
            known = code in self.errors or len(self.errors) < _ERRORS_HELD
            self.errors[code if known else "other"] += 1
        if record.purpose == "eval":
            self._score(self.evaluated.setdefault(record.policy_version, Scores()), record)
            return
        self.spans.finish(record.policy_version, record.created_ms)
        self.lengths.setdefault(record.policy_version, array("l")).append(tokens)
        step = self._trained_at.get(record.group_id)
        if step is not None:
            self._score(self.by_step.setdefault(step, Scores()), record)

    def timeline(self) -> Timeline:
        """The timeline, with unfinished and deleted trajectories; call it once, in the end."""
        for identity, attempts in self._orders.items():
            end = self._settled_ms.get(identity.rpartition("/")[0], self._end_ms)
            self._timeline.add(attempt_spans(attempts, None, end))
        self._orders.clear()
        return self._timeline.timeline()

    def _score(self, scores: Scores, record: Trajectory) -> None:
        # a trajectory without a reward is no success: evaluation counts it, a step never has one
        scores.rewards.add(record.reward if record.reward is not None else 0.0)
        scores.successes += record.reward is not None and record.reward >= self.threshold


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
        set_aside_reason=incidents.commonest("set aside"),
        dead_letter_reason=incidents.commonest("dead letter"),
        truncated_share=share(metrics, "truncated_fraction"),
        unscored_share=share(metrics, "unscored_fraction"),
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
    measured = [step for step in steps if "success_rate" in step.metrics]
    points = []
    for chosen in blocks(measured, CURVE_POINTS):
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
    measured = [step for step in steps if "reward_mean" in step.metrics]
    points = []
    for chosen in blocks(measured, CURVE_POINTS):
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
