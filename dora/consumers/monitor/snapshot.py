"""What a run looks like at one moment, and whether it goes on.

A snapshot is a plain value, computed from the log and a given time; it converts to JSON
with `dataclasses.asdict`. A run that can no longer go on by itself is never called `running`.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dora.consumers.monitor.waits import Wait
from dora.core.groups import CommonReason
from dora.core.step_metrics import idle_share, mismatch_mean
from dora.log.incidents import RecentIncident
from dora.log.presence import ProcessView


def late_share(processes: Iterable[ProcessView]) -> float | None:
    """Mean lateness of the emulated workers (`emulation_late_share`); None if there are none."""
    shares = [
        process.metrics["emulation_late_share"]
        for process in processes
        if "emulation_late_share" in process.metrics
    ]
    return statistics.fmean(shares) if shares else None


Health = Literal["not started", "starting", "running", "stalled", "complete", "stopped"]

# A run is called stalled when a step takes this many times what steps took before, and at least
# the seconds below; before the first step, model loading and compiling take their time.
_PATIENCE = 5
_QUIET_SECONDS = 60.0
_FIRST_STEP_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class VersionBacklog:
    """What is still to do for one version. Groups are training groups."""

    version: int
    groups_outstanding: int
    groups_unfinished: int
    trajectories_unfinished: int
    evaluation_unfinished: int
    workers: int


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A committed step; `step` is the version that it made."""

    step: int
    created_ms: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Evaluation of one version on held-out prompts, so far."""

    version: int
    admitted: int
    finished: int
    unscored: int
    """Finished without a reward."""
    successes: int
    success_rate: float
    reward_mean: float

    @property
    def complete(self) -> bool:
        """Whether every trajectory that was started is finished."""
        return self.finished == self.admitted

    @property
    def scored(self) -> int:
        """Finished with a reward: what rate and mean are taken over."""
        return self.finished - self.unscored

    @property
    def text(self) -> str:
        """Success for people, with how many prompts it is taken over."""
        text = f"{self.success_rate:.3f} of {self.scored} held-out prompts"
        return text + (f" ({self.unscored} more got no score)" if self.unscored else "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at `time_ms`. Rates are tokens per second over the last minute of the log.

    `waits` explains some of the `waiting_for` trajectories that hold the next batch up.
    """

    run: str
    time_ms: int
    health: Health
    reasons: tuple[str, ...]
    waits: tuple[Wait, ...]
    waiting_for: int
    started_ms: int | None
    last_ms: int | None
    steps_target: int | None
    newest: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    groups_outstanding: int
    groups_capacity: int
    versions: tuple[VersionBacklog, ...]
    processes: tuple[ProcessView, ...]
    steps: tuple[StepPoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    trajectories: int
    tokens: int
    tokens_generated_per_second: float
    tokens_trained_per_second: float
    groups_trained: int
    groups_set_aside: int
    duplicates: int
    late: int
    foreign: int
    dead_letters: int
    unreadable: int
    problems: tuple[str, ...]
    whole_history: bool
    live_versions_max: int
    incidents: tuple[RecentIncident, ...] = ()
    set_aside_reason: CommonReason | None = None
    dead_letter_reason: CommonReason | None = None

    @property
    def step(self) -> int:
        """Committed steps."""
        return max(self.newest, 0)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step; empty before the first."""
        return self.steps[-1].metrics if self.steps else {}

    @property
    def trainer_idle_share(self) -> float | None:
        """Share of the trainer's time that it waited for batches, over all steps."""
        return idle_share([point.metrics for point in self.steps])

    @property
    def staleness_max(self) -> int:
        """Largest staleness that was trained."""
        said = (point.metrics.get("staleness_max", 0.0) for point in self.steps)
        return int(max(said, default=0.0))

    @property
    def logprob_mismatch_mean(self) -> float | None:
        """Mean difference between engine and trainer log-probabilities in nats, over all tokens."""
        return mismatch_mean(point.metrics for point in self.steps)


def assess(
    *,
    time_ms: int,
    started_ms: int | None,
    newest: int,
    steps_target: int | None,
    evaluating: bool,
    step_times_ms: Sequence[int],
    processes: Sequence[ProcessView],
    launched_ms: int | None = None,
    waits: Sequence[Wait] = (),
    starved: str | None = None,
) -> tuple[Health, tuple[str, ...]]:
    """Whether the run goes on, and why not.

    `step_times_ms` are the commit times of the steps, `evaluating` says whether evaluation
    trajectories are unfinished. With `launched_ms`, when the processes were started, those that
    have not spoken since are given time to load. A trainer that waits is stalled by a trajectory
    that got no token for a minute; `waits` and `starved` are added to the reasons then.
    """
    coordinating = any(process.role == "coordinator" and process.alive for process in processes)
    if steps_target is not None and newest >= steps_target and not (evaluating or coordinating):
        return "complete", _stranded(processes)
    if launched_ms is not None:
        processes = [p for p in processes if time_ms - 1000 * p.age_seconds >= launched_ms]
    launching = launched_ms is not None and time_ms - launched_ms < 1000 * _FIRST_STEP_SECONDS
    if not processes and not launching:
        health: Health = "not started" if started_ms is None else "stalled"
        return health, ("no process has reported",)
    if processes and all(process.state == "stopped" for process in processes) and not launching:
        return "stopped", ("all processes have stopped; `dora run` with the same file goes on",)
    roles = {process.role for process in processes}
    expected = [role for role in ("trainer", "coordinator", "rollout") if role not in roles]
    reasons = _missing(processes, [] if launching or started_ms is None else expected)
    if not reasons:
        moments = [moment for moment in (started_ms, launched_ms) if moment is not None]
        reasons = _quiet(time_ms, max(moments, default=None), step_times_ms, processes)
    # After a launch everybody is given the time to take up what lay still.
    launched = float("inf") if launched_ms is None else (time_ms - launched_ms) / 1000
    stuck = any(min(wait.stuck_seconds, launched) > _QUIET_SECONDS for wait in waits)
    idle = any(p.role == "trainer" and p.alive and p.state == "waiting" for p in processes)
    if reasons or (stuck and idle):
        reasons += [starved] if starved else []
        return "stalled", (*reasons, *(wait.text for wait in waits))
    if expected or started_ms is None:
        return "starting", tuple(f"waiting for the {role} process" for role in expected)
    return "running", ()


def _stranded(processes: Sequence[ProcessView]) -> tuple[str, ...]:
    """Workers that a complete run has left behind: it is the coordinator that ends them."""
    left = [p.process for p in processes if p.role == "rollout" and p.alive]
    if not left:
        return ()
    return (
        f"{', '.join(left)} still waits for commands and no coordinator lives: the next "
        "`dora coordinator` tells it to stop",
    )


def _missing(processes: Sequence[ProcessView], absent: Sequence[str]) -> list[str]:
    """Which of the processes without which nothing goes on is gone; `absent` roles never spoke."""
    reasons = [f"no {role} process has reported" for role in absent]
    coordinator_lives = any(p.alive for p in processes if p.role == "coordinator")
    for role in ("trainer", "coordinator"):
        mine = [process for process in processes if process.role == role]
        if not mine or any(process.alive for process in mine):
            continue
        last = min(mine, key=lambda process: process.age_seconds)
        # After the last step the trainer ends, and the coordinator has the last version evaluated.
        if not (role == "trainer" and last.state == "stopped" and coordinator_lives):
            reasons.append(_gone(last))
    workers = [process for process in processes if process.role == "rollout"]
    if workers and not any(worker.alive for worker in workers):
        reasons.append("no rollout worker is alive")
        reasons += [_gone(worker) for worker in workers]
    return reasons


def _gone(process: ProcessView) -> str:
    if process.state == "failed":
        return f"{process.process} failed: {process.message or 'no message'} ({process.place})"
    if process.state == "stopped":
        return f"{process.process} has stopped" + (f": {process.message}" * bool(process.message))
    return f"{process.process} silent for {process.age_seconds:.0f} s ({process.place})"


def _quiet(
    time_ms: int,
    started_ms: int | None,
    step_times_ms: Sequence[int],
    processes: Sequence[ProcessView],
) -> list[str]:
    """Whether there was no step for much longer than steps take."""
    if started_ms is None:
        return []
    recent = step_times_ms[-6:]
    # A clock that was set back, or another machine's, must not make steps of less than no time.
    gaps = [max(0.0, (after - before) / 1000) for before, after in itertools.pairwise(recent)]
    usual = statistics.median(gaps) if gaps else 0.0
    went_on = bool(recent) and recent[-1] > started_ms
    allowed = max(_QUIET_SECONDS, _PATIENCE * usual) if went_on else _FIRST_STEP_SECONDS
    quiet = (time_ms - max([started_ms, *recent])) / 1000
    if quiet <= allowed:
        return []
    reason = f"no step for {quiet:.0f} s"
    if gaps:
        reason += f" (a step takes {usual:.0f} s otherwise)"
    said = [p.message for p in processes if p.role == "trainer" and p.alive and p.message]
    return [f"{reason}; the trainer says: {said[0]}" if said else reason]
