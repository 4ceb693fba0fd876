"""The protocol under crashes, freezes, zombies, delays and reordering, in many interleavings.

The real core decides: coordination, window, state, placement, prefixes, batches, attempts. What is
simulated is the log (`tests.protocol.log`), the turns that the processes get, and their deaths.
After every step the real audit judges the whole log; in the end everybody is let run, and the run
must go on. `DORA_MODEL_EXAMPLES` sets the number of interleavings, `DORA_MODEL_STEPS` their length.
"""

import os
import sys

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dora.core.scheduling.schedules import Schedule
from tests.protocol.coordinator import ModelCoordinator
from tests.protocol.log import CHUNKS, TRAJECTORIES, Crash
from tests.protocol.run import ModelRun, Reward, signal
from tests.protocol.trainer import ModelTrainer
from tests.protocol.worker import ModelWorker

TICKS = 150
"""Ticks in which a run on which nothing goes wrong any more must make its next steps."""
TOPICS = (CHUNKS, TRAJECTORIES)
WORKERS = ("w0", "w1", "w2")

indices = st.integers(0, 5)
counts = st.sampled_from([1, 2, 5, None])
crashes: st.SearchStrategy[Crash | None] = st.sampled_from(
    [None, None, "before", "inside", "after"]
)
fates: st.SearchStrategy[Crash] = st.sampled_from(["before", "inside", "after"])
rewards = st.sampled_from([1.0, 0.0, None])


def nothing_works(trajectory_id: str) -> float | None:
    return None


def no_signal(trajectory_id: str) -> float | None:
    return 1.0


schedules = st.sampled_from(
    [
        Schedule(rebalance_seconds=3.0),
        Schedule(migration=False),
        Schedule(rebalance_seconds=2.0, fill_older=True),
        Schedule(adapters=True),
    ]
)
"""Migration moves requests; filling lets the journal's versions go back; adapters let a worker host
every live version."""
ends = st.sampled_from([None, None, "stop", "error"])


class Protocol(RuleBasedStateMachine):
    """Gives the processes of a run their turns, and ends them."""

    @initialize(
        staleness=st.integers(0, 3),
        batch=st.integers(1, 2),
        group=st.integers(1, 2),
        steps=st.sampled_from([4, 1000]),
        evaluations=st.integers(0, 1),
        workers=st.integers(1, len(WORKERS)),
        ticks=st.integers(0, 40),
        all_return=st.booleans(),
        compacted=st.booleans(),
        schedule=schedules,
    )
    def begin(
        self,
        staleness: int,
        batch: int,
        group: int,
        steps: int,
        evaluations: int,
        workers: int,
        ticks: int,
        all_return: bool,
        compacted: bool,
        schedule: Schedule,
    ) -> None:
        self.run = ModelRun(staleness, batch, group, steps, evaluations, compacted, schedule)
        self.names, self.all_return = WORKERS[:workers], all_return
        self.audited = -1
        self.run.begin(*self.names)
        for _ in range(ticks):
            self.run.tick()

    def coordinator(self, which: int) -> ModelCoordinator | None:
        alive = self.run.coordinators
        return alive[which % len(alive)] if alive else None

    def trainer(self, which: int) -> ModelTrainer | None:
        alive = self.run.trainers
        return alive[which % len(alive)] if alive else None

    def worker(self, which: int) -> ModelWorker | None:
        alive = self.run.workers
        return alive[which % len(alive)] if alive else None

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.run.now += seconds

    @rule(which=indices, count=counts, place=indices)
    def coordinator_reads(self, which: int, count: int | None, place: int) -> None:
        coordinator = self.coordinator(which)
        if coordinator is None:
            return
        if coordinator.phase < 3:
            coordinator.rebuild(self.run.now)
        elif coordinator.pending is None and (behind := coordinator.reader.behind):
            coordinator.take(behind[place % len(behind)], self.run.now, count)

    @rule(which=indices)
    def coordinator_decides(self, which: int) -> None:
        self._decide(self.coordinator(which))

    def _decide(self, coordinator: ModelCoordinator | None) -> None:
        if coordinator is not None and coordinator.phase == 3 and coordinator.pending is None:
            self.run.decide(coordinator)

    @rule(which=indices, crash=crashes | st.just("aborted"))
    def coordinator_commits(self, which: int, crash: Crash | None) -> None:
        coordinator = self.coordinator(which)
        self._decide(coordinator)
        if coordinator is not None and coordinator in self.run.coordinators:
            self.run.commit(coordinator, crash)

    @rule(which=indices, taken=st.booleans())
    def coordinator_takes_over(self, which: int, taken: bool) -> None:
        """Reads the chunks that are there now, or takes what it read some time ago."""
        coordinator = self.coordinator(which)
        if coordinator is not None and coordinator.pending is None:
            if taken:
                coordinator.take_over()
            else:
                coordinator.scan()

    @rule()
    def another_coordinator_starts(self) -> None:
        if len(self.run.coordinators) < 2:
            self.run.start_coordinator()

    @rule(which=indices, count=counts)
    def worker_reads(self, which: int, count: int | None) -> None:
        worker = self.worker(which)
        if worker is not None:
            worker.take_commands(count)
            self.run.stop_if_told(worker)

    @rule(which=indices, item=indices, tokens=st.integers(0, 3), end=ends)
    def worker_generates(self, which: int, item: int, tokens: int, end: str | None) -> None:
        worker = self.worker(which)
        if worker is not None and (generating := worker.generating):
            worker.extend(generating[item % len(generating)], tokens, end)

    @rule(which=indices, item=indices, reward=rewards)
    def worker_scores(self, which: int, item: int, reward: float | None) -> None:
        worker = self.worker(which)
        if worker is not None and (scoring := worker.scoring):
            worker.finish(scoring[item % len(scoring)], reward)

    @rule(which=indices, place=indices, count=counts)
    def worker_is_acknowledged(self, which: int, place: int, count: int | None) -> None:
        worker = self.worker(which)
        if worker is not None and (places := list(worker.outbox)):
            worker.acknowledge(places[place % len(places)], count)

    @rule(which=indices)
    def worker_beats(self, which: int) -> None:
        worker = self.worker(which)
        if worker is not None:
            if worker.loading:
                worker.end_load()
            else:
                worker.beat()

    @rule(which=indices, item=indices, word=st.booleans())
    def worker_drops_an_attempt(self, which: int, item: int, word: bool) -> None:
        """It hands it back, or forgets it without a word."""
        worker = self.worker(which)
        if worker is not None and (generating := worker.generating):
            trajectory_id = generating[item % len(generating)]
            if word:
                worker.hand_back(trajectory_id, worker.attempts[trajectory_id].command.attempt)
            else:
                del worker.attempts[trajectory_id]

    @rule(which=indices, turns=st.integers(0, 4), saved=st.sets(st.sampled_from(TOPICS)))
    def worker_dies(self, which: int, turns: int, saved: set[str]) -> None:
        """Amid its work; what it wrote to some topics was not acknowledged yet, and is gone."""
        worker = self.worker(which)
        if worker is None:
            return
        for _ in range(turns):
            self.run.work(worker)
        for place in list(worker.outbox):
            if place[0] in saved:
                worker.acknowledge(place)
        self.run.workers.remove(worker)

    @rule(which=indices)
    def worker_starts(self, which: int) -> None:
        if len(self.run.workers) < len(self.names):
            self.run.start_worker(self.names[which % len(self.names)])

    @rule(which=indices, place=indices, count=counts)
    def trainer_reads(self, which: int, place: int, count: int | None) -> None:
        trainer = self.trainer(which)
        if trainer is None:
            return
        if not trainer.started:
            self.run.recover(trainer)
        elif trainer.pending is None and (behind := trainer.reader.behind):
            trainer.take(behind[place % len(behind)], count)

    @rule(which=indices)
    def trainer_trains(self, which: int) -> None:
        self._train(self.trainer(which))

    def _train(self, trainer: ModelTrainer | None) -> None:
        if trainer is not None and trainer.started and trainer.pending is None:
            trainer.prepare()

    @rule(crash=fates)
    def a_trainer_will_fail(self, crash: Crash) -> None:
        """In its next step."""
        self.run.fates["trainer"] = crash

    @rule(crash=fates | st.just("aborted"))
    def a_coordinator_will_fail(self, crash: Crash) -> None:
        """In its next transaction."""
        self.run.fates["coordinator"] = crash

    @rule(which=indices, crash=crashes)
    def trainer_commits(self, which: int, crash: Crash | None) -> None:
        trainer = self.trainer(which)
        self._train(trainer)
        if trainer is not None:
            self.run.commit_step(trainer, crash)

    @rule()
    def another_trainer_starts(self) -> None:
        if len(self.run.trainers) < 2:
            self.run.start_trainer()

    @rule(ticks=st.integers(1, 12), reward=st.sampled_from([signal, no_signal, nothing_works]))
    def all_goes_well(self, ticks: int, reward: Reward) -> None:
        for _ in range(ticks):
            self.run.tick(reward=reward)

    @rule(ticks=st.integers(1, 8), mask=st.integers(0, 63))
    def some_are_slow(self, ticks: int, mask: int) -> None:
        for _ in range(ticks):
            self.run.tick(mask)

    @rule(bit=st.integers(0, 5), ticks=st.integers(5, 14))
    def one_freezes_for_long(self, bit: int, ticks: int) -> None:
        """Beyond the timeouts; then it goes on as if nothing had been."""
        for _ in range(ticks):
            self.run.tick(1 << bit)

    @rule(which=indices, ticks=st.integers(0, 8))
    def a_worker_is_replaced(self, which: int, ticks: int) -> None:
        """It was only believed dead: two incarnations of one name."""
        worker = self.worker(which)
        if worker is not None:
            self.run.start_worker(worker.name)
            for _ in range(ticks):
                self.run.tick(4 << which % 4)

    @invariant()
    def every_rule_is_kept(self) -> None:
        """Judged by the real audit; the log itself checks admissions as they are written."""
        if not hasattr(self, "run"):
            return
        size = sum(map(len, self.run.log.partitions.values()))
        if size != self.audited:
            self.audited = size
            report = self.run.log.audit()
            assert not report.violated, report.findings
            assert report.conserved
            assert report.max_staleness <= self.run.window.max_staleness

    def teardown(self) -> None:
        """Whatever happened: once nothing goes wrong any more, the run goes on, be it with one
        worker."""
        if not hasattr(self, "run") or sys.exception() is not None:
            return  # it failed already
        run = self.run
        run.fates.clear()
        if not run.trainers:
            run.start_trainer()
        if not self.all_return:  # the others are gone for good, with all that they hold
            self.names = self.names[:1]
            run.workers = [worker for worker in run.workers if worker.name in self.names]
        for name in self.names:
            # an older incarnation that still lives is of no use: it will be told to stop
            if not any(worker.incarnation == run.latest[name] for worker in run.workers):
                run.start_worker(name)
        due = min(run.log.newest + run.window.max_staleness + 2, run.steps)
        for _ in range(TICKS):
            if run.log.newest >= due and (due < run.steps or not run.workers):
                break
            if not run.coordinators:
                run.start_coordinator()
            run.tick()
        else:
            raise AssertionError(run.stuck(due))
        self.every_rule_is_kept()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=int(os.environ.get("DORA_MODEL_EXAMPLES", "100")),
    stateful_step_count=int(os.environ.get("DORA_MODEL_STEPS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
