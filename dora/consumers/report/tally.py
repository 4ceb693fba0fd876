"""What a report keeps of a run's trajectories and commands.

Invariant: of a trajectory only a length, sums and times stay, its tokens and its text never do;
the result does not depend on the order in which trajectories are taken.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dora.consumers.report.statistics import Moments, TimeBins
from dora.consumers.report.timeline import Timeline, TimelineFold
from dora.core.identity import success_threshold
from dora.core.step_metrics import VersionSpans
from dora.log.incidents import IncidentTally
from dora.log.schedule_log import Ordered, attempt_spans
from dora.schemas.records import (
    Admission,
    Command,
    DeadLetter,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

_ERRORS_HELD = 200


@dataclass(slots=True)
class Scores:
    """Rewards of some trajectories, and how many were successes; those without one are left out."""

    rewards: Moments = field(default_factory=Moments)
    successes: int = 0


class Control:
    """Commands, statuses and dead letters of a run, of any order."""

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

    def take(self, record: Command | Status | DeadLetter) -> None:
        """Take one record."""
        match record:
            case Command():
                self.incidents.handle(record)
                if record.kind == "start":
                    order = Ordered(record.worker, record.policy_version, record.created_ms)
                    self.orders.setdefault(record.trajectory_id, {}).setdefault(
                        record.attempt, order
                    )
                    self.workers.add(record.worker)
            case Status():
                self.incidents.handle(record)
            case DeadLetter():
                self.incidents.handle(record)
        self.last_ms = max(self.last_ms, record.created_ms)


class Tally:
    """Adds up the counted trajectories of a run whose control records were taken before."""

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

    def take(self, record: Trajectory) -> None:
        """Take one trajectory, each only once."""
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
        """The timeline, with what has not finished or is deleted; call it once, in the end."""
        for identity, attempts in self._orders.items():
            end = self._settled_ms.get(identity.rpartition("/")[0], self._end_ms)
            self._timeline.add(attempt_spans(attempts, None, end))
        self._orders.clear()
        return self._timeline.timeline()

    def _score(self, scores: Scores, record: Trajectory) -> None:
        # a trajectory without a reward is no success: evaluation counts it, a step never has one
        scores.rewards.add(record.reward if record.reward is not None else 0.0)
        scores.successes += record.reward is not None and record.reward >= self.threshold
