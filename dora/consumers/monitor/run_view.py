"""A run's records made into snapshots, for `dora status`, the live display and the summary.

What is shown follows from the records taken and the time given, no matter how the topics
interleave. Contradictions in the log are counted and shown, they do not stop the view.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from dora.bus.reader import Message, Unreadable
from dora.consumers.monitor.snapshot import (
    EvaluationPoint,
    Snapshot,
    StepPoint,
    VersionBacklog,
    assess,
)
from dora.consumers.monitor.waits import Progress, Sent, Wait, blocking, explain, starved
from dora.core.groups import Group, ReasonTally
from dora.core.identity import success_threshold, tokens_per_step
from dora.core.state import RunState, finished_facts
from dora.core.step_metrics import VersionSpans
from dora.core.window import Window
from dora.log.incidents import RecentIncidents, letter_reason
from dora.log.presence import ProcessView
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

_RATE_SECONDS = 60.0
_PROBLEMS_KEPT = 20


class RunView:
    """A run's records made into snapshots. No I/O: feed records, ask for snapshots."""

    def __init__(
        self,
        run: str,
        *,
        steps_target: int | None = None,
        heartbeat_timeout: float = 30.0,
        load_timeout: float = 900.0,
        launched_ms: int | None = None,
        whole_history: bool = True,
    ) -> None:
        self.run = run
        self.started: RunStarted | None = None
        self.state: RunState | None = None
        self.policies: dict[int, Policy] = {}
        self.whole_history = whole_history
        """Whether every trajectory of the run is taken, or only those of the window."""
        self._steps_target = steps_target
        self._heartbeat_timeout = heartbeat_timeout
        self._load_timeout = load_timeout
        self._launched_ms = launched_ms
        self._statuses: dict[str, Status] = {}
        self._steps: list[StepPoint] = []
        self._spans = VersionSpans()
        self._incidents = RecentIncidents()
        self._recent: deque[tuple[int, int]] = deque()
        self._last_ms: int | None = None
        self._admitted_ms: dict[str, int] = {}
        self._sent: dict[str, Sent] = {}
        self._progress: Mapping[str, Progress] = {}
        self._set_aside = ReasonTally()
        self._dead_letters = ReasonTally()
        self._unreadable = 0
        self._problems: list[str] = []

    def handle(self, message: Message) -> None:
        """Handle one message of any of the run's topics."""
        value = message.value
        place = f"{message.topic}[{message.partition}]@{message.offset}"
        if not isinstance(value, Unreadable):
            self._incidents.handle(value)
        try:
            match value:
                case Unreadable():
                    self._unreadable += 1
                    self._problem(f"{place}: {value.reason}")
                case RunStarted():
                    self._start(value)
                case Policy():
                    self.policies[value.version] = value
                    self._forget_policies()
                case Status():
                    self._statuses[value.process] = value
                case DeadLetter():
                    self._dead_letters.add(letter_reason(value))
                case Step():
                    self._commit(value)
                case Command(kind="start"):
                    self._send(value, message.offset)
                case Admission() if self.state is not None:
                    self.state.admit(value)
                    self._admitted_ms[value.group_id] = value.created_ms
                    if value.purpose == "train":
                        self._spans.start(value.policy_version, value.created_ms)
                case Trajectory() if self.state is not None:
                    self._finish(value, message.partition, message.offset)
                case _:
                    pass  # other commands tell this view nothing
        except ValueError as error:
            self._problem(f"{place}: {error}")

    def snapshot(self, time_ms: int) -> Snapshot:
        """The run as seen so far, at `time_ms` (Unix milliseconds)."""
        state = self.state
        processes = self._processes(time_ms)
        evaluations = tuple(
            EvaluationPoint(
                tally.version,
                tally.admitted,
                tally.finished,
                tally.failed,
                tally.successes,
                tally.success_rate,
                tally.reward_mean,
            )
            for _, tally in sorted((state.evaluations if state else {}).items())
        )
        newest = state.newest if state else -1
        waiting = self.blocking()
        waits = self._explain(waiting, time_ms, processes)
        health, reasons = assess(
            time_ms=time_ms,
            started_ms=self.started.created_ms if self.started else None,
            newest=newest,
            steps_target=self._target(),
            evaluating=not all(point.complete for point in evaluations),
            step_times_ms=[point.created_ms for point in self._steps],
            processes=processes,
            launched_ms=self._launched_ms,
            waits=waits,
            starved=starved(state, processes) if state else None,
        )
        counters = state.counters if state else None
        return Snapshot(
            run=self.run,
            time_ms=time_ms,
            health=health,
            reasons=reasons,
            waits=waits,
            waiting_for=len(waiting),
            started_ms=self.started.created_ms if self.started else None,
            last_ms=self._last_ms,
            steps_target=self._target(),
            newest=newest,
            max_staleness=self.started.max_staleness if self.started else 0,
            groups_per_step=self.started.groups_per_step if self.started else 0,
            group_size=self.started.group_size if self.started else 0,
            groups_outstanding=state.outstanding_total if state else 0,
            groups_capacity=state.window.capacity if state else 0,
            versions=self._backlog(processes),
            processes=processes,
            steps=tuple(self._steps),
            evaluations=evaluations,
            trajectories=counters.trajectories if counters else 0,
            tokens=counters.generated_tokens if counters else 0,
            tokens_generated_per_second=self._generated_rate(time_ms),
            tokens_trained_per_second=self._trained_rate(),
            groups_trained=counters.trained_groups if counters else 0,
            groups_set_aside=counters.set_aside_groups if counters else 0,
            duplicates=counters.duplicates if counters else 0,
            late=counters.late if counters else 0,
            foreign=counters.foreign if counters else 0,
            dead_letters=self._dead_letters.total,
            set_aside_reason=self._set_aside.commonest,
            dead_letter_reason=self._dead_letters.commonest,
            unreadable=self._unreadable,
            problems=tuple(self._problems),
            whole_history=self.whole_history,
            live_versions_max=self._spans.most_at_once(),
            incidents=self._incidents.newest(),
        )

    def blocking(self) -> list[tuple[Group, int]]:
        """Groups and samples that hold the next batch up; see `waits.blocking`."""
        if self.state is None:
            return []
        target = self._target()
        return blocking(self.state, trained=target is not None and self.state.newest >= target)

    def set_progress(self, progress_of: Mapping[str, Progress]) -> None:
        """Take the newest chunks of those trajectories that waits are to be explained of."""
        self._progress = progress_of

    def _explain(
        self, waiting: list[tuple[Group, int]], time_ms: int, processes: Sequence[ProcessView]
    ) -> tuple[Wait, ...]:
        holders = {}
        for status in self._statuses.values():
            for held in status.running:
                identity, _, attempt = held.rpartition("#")
                if attempt.isdecimal():
                    holders[identity] = (status.process, int(attempt))
        return explain(
            waiting,
            time_ms=time_ms,
            holders=holders,
            sent=self._sent,
            progress_of=self._progress,
            admitted_ms=self._admitted_ms,
            processes=processes,
        )

    def _send(self, command: Command, offset: int) -> None:
        known = self._sent.get(command.trajectory_id)
        if known is None or command.attempt >= known.attempt:
            self._sent[command.trajectory_id] = Sent.of(command, offset)

    def _start(self, record: RunStarted) -> None:
        if self.state is not None:
            self._problem("the ledger holds a second RunStarted record")
            return
        self.started = record
        self.state = RunState(
            Window(
                record.max_staleness,
                record.groups_per_step,
                tokens_per_step(record.identity),
            ),
            record.group_size,
            success_threshold(record.identity),
            lasting=self.whole_history,
        )
        self.state.start()
        self._seen(record.created_ms)

    def _commit(self, step: Step) -> None:
        if self.state is None:
            raise ValueError("a step comes before the RunStarted record")
        self.state.commit(step)
        self._seen(step.created_ms)
        for ref in step.set_aside:
            self._set_aside.add(ref.reason or "no reason")
        if step.kind == "step":
            self._steps.append(StepPoint(step.version_out, step.created_ms, dict(step.metrics)))
            self._forget()

    def _forget(self) -> None:
        """What concerns trajectories that are not waited for any more."""
        assert self.state is not None
        groups, oldest = self.state.groups, self.state.window.oldest_live(self.state.newest)
        self._admitted_ms = {g: at for g, at in self._admitted_ms.items() if g in groups}
        self._sent = {t: sent for t, sent in self._sent.items() if sent.version >= oldest}

    def _finish(self, record: Trajectory, partition: int, offset: int) -> None:
        assert self.state is not None
        before = self.state.counters.trajectories
        self.state.finish(finished_facts(record, partition, offset))
        self._seen(record.created_ms)
        if self.state.counters.trajectories > before and record.purpose == "train":
            self._spans.finish(record.policy_version, record.created_ms)
        if self.state.counters.trajectories > before:
            self._recent.append((record.created_ms, record.generated_tokens))
            self._trim(record.created_ms)

    def _seen(self, created_ms: int) -> None:
        self._last_ms = max(self._last_ms or 0, created_ms)

    def _trim(self, now_ms: int) -> None:
        while self._recent and self._recent[0][0] < now_ms - 1000 * _RATE_SECONDS:
            self._recent.popleft()

    def _forget_policies(self) -> None:
        if self.started is not None:
            for version in [v for v in self.policies if v < max(self.policies) - self.started.ring]:
                del self.policies[version]

    def _problem(self, text: str) -> None:
        if len(self._problems) < _PROBLEMS_KEPT:
            self._problems.append(text)

    def _target(self) -> int | None:
        if self._steps_target is not None:
            return self._steps_target
        for status in self._statuses.values():
            if status.role == "trainer" and "steps_target" in status.metrics:
                return int(status.metrics["steps_target"])
        return None

    def _processes(self, time_ms: int) -> tuple[ProcessView, ...]:
        order = {"trainer": 0, "coordinator": 1, "rollout": 2}
        views = [
            ProcessView.of(
                status,
                time_ms,
                heartbeat_timeout=self._heartbeat_timeout,
                load_timeout=self._load_timeout,
            )
            for status in self._statuses.values()
        ]
        return tuple(sorted(views, key=lambda view: (order.get(view.role, 3), view.process)))

    def _backlog(self, processes: Iterable[ProcessView]) -> tuple[VersionBacklog, ...]:
        if self.state is None:
            return ()
        hosts: dict[int, int] = {}
        for process in processes:
            if process.role == "rollout" and process.alive and process.version >= 0:
                hosts[process.version] = hosts.get(process.version, 0) + 1
        groups: dict[int, int] = {}
        training: dict[int, int] = {}
        evaluation: dict[int, int] = {}
        for group, missing in self.state.unfinished():
            if group.purpose == "eval":
                evaluation[group.version] = evaluation.get(group.version, 0) + len(missing)
            else:
                groups[group.version] = groups.get(group.version, 0) + 1
                training[group.version] = training.get(group.version, 0) + len(missing)
        outstanding = self.state.outstanding
        known = {*outstanding, *evaluation, *hosts, self.state.newest}
        return tuple(
            VersionBacklog(
                version,
                outstanding.get(version, 0),
                groups.get(version, 0),
                training.get(version, 0),
                evaluation.get(version, 0),
                hosts.get(version, 0),
            )
            for version in sorted(known)
        )

    def _generated_rate(self, time_ms: int) -> float:
        self._trim(time_ms)
        if not self._recent:
            return 0.0
        span = min(_RATE_SECONDS, (time_ms - self._recent[0][0]) / 1000)
        return sum(tokens for _, tokens in self._recent) / max(span, 1.0)

    def _trained_rate(self) -> float:
        last = self._steps[-5:]
        seconds = sum(point.metrics.get("step_seconds", 0.0) for point in last)
        return sum(point.metrics.get("tokens", 0.0) for point in last) / seconds if seconds else 0.0
