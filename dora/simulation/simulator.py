"""A whole run in virtual time: the real core decides, models carry it out.

Coordination, state, batch rule and placement are those of a real run, fed with the same records;
only engines, training and the way of the records are models. Nothing is random: a scenario
gives the same result every time.
"""

import math
import statistics
from dataclasses import dataclass

from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.prefixes import Prefix
from dora.core.scheduling.records import DecisionRecords
from dora.schemas.records import Admission, Command, Record, RunStarted, Step, Trajectory
from dora.simulation.bus import Events, Mailbox
from dora.simulation.measures import Interval, RunCheck, Tally, TrainedStep
from dora.simulation.records import RUN, SAMPLING
from dora.simulation.scenario import Scenario
from dora.simulation.trainer import SimulatedTrainer
from dora.simulation.worker import ChunkLog, SimulatedWorker

_TIMELINE_WORKERS = 256


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out, over the steps after the warm-up unless it says otherwise; times in seconds.

    - `steps`: all steps, warm-up included. `step_seconds`: mean time between two commits.
    - `tokens`: mean generated tokens of a step.
    - `trainer_idle_share`: share of the time in which the trainer waited for a batch.
    - `rollout_only_share`: share of the time in which workers generated and nothing was trained.
    - `staleness_mean`, `staleness_max`: over the trained groups.
    - `moves`, `switches`: trajectories moved and versions loaded, per step.
    - `refused`: starts that reached a worker which did not host the version.
    - `slots_used`: mean share of the slots that hold a sequence.
    - `violations`: how often a rule was broken, in the whole run, but for `mixed_version`: how many
      trajectories hold tokens of several versions, as is meant under `partial`.
    - `events`, `decisions`: how much the simulation had to do, from its start.
    - `timeline`: which worker hosted what (clusters of up to 256 workers).
    """

    steps: tuple[TrainedStep, ...]
    warmup: int
    step_seconds: float
    tokens: float
    trainer_idle_share: float
    rollout_only_share: float
    staleness_mean: float
    staleness_max: int
    moves: float
    switches: float
    refused: int
    slots_used: float
    violations: int
    mixed_version: int
    events: int
    decisions: int
    trajectories: int
    seconds: float
    timeline: tuple[Interval, ...]

    @property
    def step_times(self) -> tuple[float, ...]:
        """Seconds of each measured step."""
        times = [0.0, *(step.committed_at for step in self.steps)]
        return tuple(
            after - before
            for before, after in zip(times[self.warmup :], times[self.warmup + 1 :], strict=False)
        )


class Stuck(RuntimeError):
    """A simulated run goes on no more; the message says what it waits for."""


class Simulation:
    """One run of a scenario; `run` once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = Events()
        self.core = Coordination(scenario.rules, "coordinator")
        self.tally = Tally(scenario.workers <= _TIMELINE_WORKERS)
        self.decisions = 0
        self._records = DecisionRecords(
            RUN, scenario.rules.group_size, SAMPLING, lambda: int(self.events.now * 1000)
        )
        self._check = RunCheck(scenario.rules)
        self._written = 0
        self._trajectories = 0
        self._chunks = ChunkLog({}, {})
        self._inbox = Mailbox(
            self.events, scenario.control_seconds, scenario.tick_seconds, self._coordinate
        )
        self._trainer = SimulatedTrainer(scenario, self.events, self.tally, self._write)
        self._workers = [
            SimulatedWorker(number, scenario, self.events, self.tally, self._chunks, self._write)
            for number in range(scenario.workers)
        ]
        self._by_name = {worker.name: worker for worker in self._workers}

    def run(self) -> Simulated:
        """Simulates until the last step is committed. Raises Stuck if it never is."""
        scenario, events = self.scenario, self.events
        first: dict[int, str] = {}
        for change in sorted(scenario.changes, key=lambda change: change.time):
            first.setdefault(change.worker, change.kind)
            worker = self._workers[change.worker]
            match change.kind:
                case "join":
                    events.at(change.time, worker.join)
                case "leave":
                    events.at(change.time, self._leave, worker, True)
                case "crash":
                    events.at(change.time, self._leave, worker, False)
        self.core.handle(_started(), 0, 0, now=0.0, live=True)
        for number, worker in enumerate(self._workers):
            if first.get(number) != "join":
                worker.join()
        self._trainer.begin()
        measured = scenario.warmup == 0
        patience, committed_at = scenario.patience_seconds, 0.0
        while len(self._trainer.steps) < scenario.steps:
            if not events.happen() or events.now > committed_at + patience:
                raise Stuck(self._waits_for())
            if self._trainer.steps:
                committed_at = self._trainer.steps[-1].committed_at
            if not measured and len(self._trainer.steps) == scenario.warmup:
                measured = True
                self.tally.restart(events.now)
        return self._result()

    def _leave(self, worker: SimulatedWorker, orderly: bool) -> None:
        worker.leave(orderly=orderly)

    def _write(self, record: Record) -> None:
        """A record is in the log; the readers of its topic will get it."""
        self._written += 1
        match record:
            case Trajectory():
                self._trajectories += 1
                self._check.handle(record, self._written)
                self._trainer.inbox.put(record, self._written)
                self._inbox.put(record, self._written)
            case Admission():
                self._check.handle(record, self._written)
                self._trainer.inbox.put(record, self._written)
            case Step():
                self._check.handle(record, self._written)
                self._inbox.put(record, self._written)
                for worker in self._workers:
                    worker.announced(record.version_out)
            case _:
                self._inbox.put(record, self._written)

    def _coordinate(self) -> None:
        """What the coordinator does in one turn: read, decide, commit, read chunks of the lost."""
        core, now = self.core, self.events.now
        for record, offset in self._inbox.arrived():
            core.handle(record, 0, offset, now=now)
        decision = core.decide(now)
        self.decisions += 1
        if decision:
            records = self._records.of_decision(decision)
            core.committed(decision, records, now)
            self._carry_out(records)
            if decision.plan.switches or decision.moves or decision.evaluations:
                self._inbox.call(now + max(self.scenario.tick_seconds, 1e-6))
        if core.scans:
            self.events.at(now + self.scenario.control_seconds, self._scan)

    def _carry_out(self, records: list[Record]) -> None:
        commands: dict[str, list[Command]] = {}
        for record in records:
            if isinstance(record, Command):
                self._check.handle(record, self._written)
                commands.setdefault(record.worker, []).append(record)
            else:
                self._write(record)
        at = self.events.now + self.scenario.control_seconds
        for name, orders in commands.items():
            self.events.at(at, self._by_name[name].receive, orders)

    def _scan(self) -> None:
        """The chunks of lost trajectories were read."""
        if not self.core.scans:
            return
        for identity in list(self.core.scans):
            barren_since = self._chunks.fruitful.get(identity, -1) + 1
            self.core.scanned(identity, Prefix(barren_since=barren_since))
        self._inbox.call(self.events.now)

    def _waits_for(self) -> str:
        core, state = self.core, self._trainer.state
        members = list(core.workers.workers())
        gone = sum(member.status.state in ("failed", "stopped") for member in members)
        return (
            f"at {self.events.now:.0f} s and version {state.newest} the run goes on no more: "
            f"outstanding by version {dict(state.outstanding)}, {len(core.pending)} trajectories "
            f"unplaced, {len(core.scans)} being read, {len(members) - gone} workers"
        )

    def _result(self) -> Simulated:
        scenario, tally, steps = self.scenario, self.tally, tuple(self._trainer.steps)
        now = self.events.now
        tally.end(now)
        measured = steps[scenario.warmup :]
        begin = steps[scenario.warmup - 1].committed_at if scenario.warmup else 0.0
        span = max(now - begin, math.ulp(1.0))
        staleness = [each for step in measured for each in step.staleness]
        idle = sum(step.began_at - step.waited_at for step in measured)
        slots = scenario.workers * scenario.slots
        violations, mixed = self._check.end(self.core.state.outstanding_total)
        return Simulated(
            steps=steps,
            warmup=scenario.warmup,
            step_seconds=span / len(measured),
            tokens=statistics.fmean(step.tokens for step in measured),
            trainer_idle_share=idle / span,
            rollout_only_share=tally.alone.integral / span,
            staleness_mean=statistics.fmean(staleness),
            staleness_max=max(staleness),
            moves=tally.moves / len(measured),
            switches=tally.switches / len(measured),
            refused=tally.refused,
            slots_used=tally.running.integral / span / slots,
            violations=violations,
            mixed_version=mixed,
            events=self.events.count,
            decisions=self.decisions,
            trajectories=self._trajectories,
            seconds=now,
            timeline=tuple(tally.timeline),
        )


def _started() -> RunStarted:
    return RunStarted("simulation", "", "", "", 0, 1, 1, 2, 1, "", {}, 0)


def simulate(scenario: Scenario) -> Simulated:
    """Runs a scenario. Raises Stuck if it comes to no end."""
    return Simulation(scenario).run()
