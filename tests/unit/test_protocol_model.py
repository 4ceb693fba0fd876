"""The protocol under crashes, freezes, zombies, delays and reordering, in many interleavings.

The real core decides: coordination, window, state, placement, prefixes, planner, attempts. What is
simulated is the log (`tests.protocol.log`), the turns that the processes get, and their deaths.
After every step the real audit judges the whole log; in the end everybody is let run, and the run
must go on. `DORA_MODEL_EXAMPLES` sets the number of interleavings, `DORA_MODEL_STEPS` their length.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dora.config import Config
from dora.core.coordination import Rules
from dora.core.window import Window
from dora.producers.record_maker import RecordMaker
from tests.protocol.coordinator import Crash, ModelCoordinator
from tests.protocol.log import RUN, Fenced, SimulatedLog
from tests.protocol.trainer import ModelTrainer
from tests.protocol.worker import ModelWorker

LANES = 2
HEARTBEAT_TIMEOUT, LOAD_TIMEOUT = 4.0, 8.0
MAX_ATTEMPTS = 2
TICKS = 150
"""Ticks in which a run on which nothing goes wrong any more must make its next steps."""
WORKERS = ("w0", "w1", "w2")

indices = st.integers(0, 5)
counts = st.sampled_from([1, 2, 5, None])
crashes: st.SearchStrategy[Crash | None] = st.sampled_from(
    [None, None, "before", "inside", "after"]
)
rewards = st.sampled_from([1.0, 0.0, None])
ends = st.sampled_from([None, None, "stop", "error"])


class Protocol(RuleBasedStateMachine):
    """All processes of a run, dead and alive."""

    @initialize(
        staleness=st.integers(0, 2),
        batch=st.integers(1, 2),
        group=st.integers(1, 2),
        steps=st.sampled_from([4, 1000]),
        evaluations=st.integers(0, 1),
        workers=st.integers(1, len(WORKERS)),
        ticks=st.integers(0, 40),
        all_return=st.booleans(),
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
    ) -> None:
        self.now = 0.0
        self.made = 0
        self.window = Window(staleness, batch)
        self.log = SimulatedLog((staleness + 1) * batch)
        self.group, self.steps = group, steps
        self.rules_ = Rules(
            self.window, group, steps, 1.0, HEARTBEAT_TIMEOUT, LOAD_TIMEOUT, MAX_ATTEMPTS,
            2 * evaluations, evaluations,
        )  # fmt: skip
        config = Config.model_validate(
            {
                "run": {"name": RUN},
                "policy": {"model": "model"},
                "task": {"kind": "reasoning-gym", "name": "spell_backward"},
                "trainer": {"steps": steps},
                "window": {
                    "max_staleness": staleness,
                    "groups_per_step": batch,
                    "group_size": group,
                },
            }
        )
        self.maker = RecordMaker(config, lambda: 0)
        self.names, self.all_return = WORKERS[:workers], all_return
        self.trainers: list[ModelTrainer] = []
        self.coordinators: list[ModelCoordinator] = []
        self.workers: list[ModelWorker] = []
        self.latest: dict[str, str] = {}  # newest incarnation by worker
        self.audited = -1
        self.start_trainer()
        self.trainers[0].recover()
        self.start_coordinator()
        for name in self.names:
            self.start_worker(name)
        for _ in range(ticks):
            self.tick()

    def start_trainer(self) -> None:
        self.trainers.append(
            ModelTrainer(self.log, self.window, self.group, LANES, self.steps, self.new("t"))
        )

    def start_coordinator(self) -> None:
        self.coordinators.append(
            ModelCoordinator(self.log, self.rules_, self.maker, LANES, self.new("c"))
        )

    def start_worker(self, name: str) -> None:
        self.latest[name] = self.new(name)
        self.workers.append(
            ModelWorker(self.log, name, self.latest[name], self.window.max_staleness, LANES)
        )

    def new(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made}"

    # Turns of single processes

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(which=indices, count=counts, place=indices)
    def coordinator_reads(self, which: int, count: int | None, place: int) -> None:
        if not self.coordinators:
            return
        coordinator = self.coordinators[which % len(self.coordinators)]
        if coordinator.phase < 3:
            coordinator.rebuild(self.now)
        elif coordinator.pending is None and coordinator.reader.behind:
            behind = coordinator.reader.behind
            coordinator.take(behind[place % len(behind)], self.now, count)

    @rule(which=indices)
    def coordinator_decides(self, which: int) -> None:
        if self.coordinators:
            coordinator = self.coordinators[which % len(self.coordinators)]
            if coordinator.phase == 3 and coordinator.pending is None:
                self._decide(coordinator)

    def _decide(self, coordinator: ModelCoordinator) -> None:
        try:
            coordinator.decide(self.now)
        except Fenced:
            self.coordinators.remove(coordinator)

    @rule(which=indices, crash=crashes)
    def coordinator_commits(self, which: int, crash: Crash | None) -> None:
        if self.coordinators:
            self._commit(self.coordinators[which % len(self.coordinators)], crash)

    def _commit(self, coordinator: ModelCoordinator, crash: Crash | None = None) -> None:
        try:
            alive = coordinator.commit(self.now, crash)
        except Fenced:
            alive = False
        if not alive:
            self.coordinators.remove(coordinator)

    @rule(which=indices, taken=st.booleans())
    def coordinator_takes_over(self, which: int, taken: bool) -> None:
        if self.coordinators:
            coordinator = self.coordinators[which % len(self.coordinators)]
            if coordinator.pending is None:
                if taken:
                    coordinator.take_over()
                else:
                    coordinator.scan()

    @rule()
    def another_coordinator_starts(self) -> None:
        if len(self.coordinators) < 2:
            self.start_coordinator()

    @rule(which=indices, count=counts)
    def worker_reads(self, which: int, count: int | None) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            worker.take_commands(count)
            self._stop_if_told(worker)

    def _stop_if_told(self, worker: ModelWorker) -> None:
        if worker.told_to_stop:
            worker.stop()
            self.workers.remove(worker)

    @rule(which=indices, item=indices, tokens=st.integers(0, 3), end=ends)
    def worker_generates(self, which: int, item: int, tokens: int, end: str | None) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.generating:
                worker.extend(worker.generating[item % len(worker.generating)], tokens, end)

    @rule(which=indices, item=indices, reward=rewards)
    def worker_scores(self, which: int, item: int, reward: float | None) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.scoring:
                worker.finish(worker.scoring[item % len(worker.scoring)], reward)

    @rule(which=indices, place=indices, count=counts)
    def worker_is_acknowledged(self, which: int, place: int, count: int | None) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.outbox:
                worker.acknowledge(list(worker.outbox)[place % len(worker.outbox)], count)

    @rule(which=indices)
    def worker_beats(self, which: int) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.loading:
                worker.end_load()
            else:
                worker.beat()

    @rule(which=indices, item=indices)
    def worker_hands_back(self, which: int, item: int) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.generating:
                trajectory_id = worker.generating[item % len(worker.generating)]
                number = worker.attempts[trajectory_id].command.attempt
                worker.hand_back(trajectory_id, number)

    @rule(which=indices, item=indices)
    def worker_forgets(self, which: int, item: int) -> None:
        """An attempt is gone without a word."""
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            if worker.generating:
                del worker.attempts[worker.generating[item % len(worker.generating)]]

    @rule(which=indices)
    def worker_dies(self, which: int) -> None:
        if self.workers:
            del self.workers[which % len(self.workers)]

    @rule(which=indices)
    def worker_starts(self, which: int) -> None:
        """In the place of a dead one, or of one that only seemed dead."""
        if len(self.workers) < len(self.names):
            self.start_worker(self.names[which % len(self.names)])

    @rule(which=indices, place=indices, count=counts)
    def trainer_reads(self, which: int, place: int, count: int | None) -> None:
        if not self.trainers:
            return
        trainer = self.trainers[which % len(self.trainers)]
        if not trainer.started:
            self._recover(trainer)
        elif trainer.pending is None and trainer.reader.behind:
            trainer.take(trainer.reader.behind[place % len(trainer.reader.behind)], count)

    def _recover(self, trainer: ModelTrainer) -> None:
        try:
            trainer.recover()
        except Fenced:
            self.trainers.remove(trainer)

    @rule(which=indices)
    def trainer_trains(self, which: int) -> None:
        if self.trainers:
            trainer = self.trainers[which % len(self.trainers)]
            if trainer.started and trainer.pending is None:
                trainer.prepare()

    @rule(which=indices, crash=crashes)
    def trainer_commits(self, which: int, crash: Crash | None) -> None:
        if self.trainers:
            self._commit_step(self.trainers[which % len(self.trainers)], crash)

    def _commit_step(self, trainer: ModelTrainer, crash: Crash | None = None) -> None:
        try:
            alive = trainer.commit(crash)
        except Fenced:
            alive = False
        if not alive:
            self.trainers.remove(trainer)

    @rule()
    def another_trainer_starts(self) -> None:
        if len(self.trainers) < 2:
            self.start_trainer()

    # Turns of many

    @rule(ticks=st.integers(1, 12), reward=rewards)
    def all_goes_well(self, ticks: int, reward: float | None) -> None:
        """For a while."""
        for _ in range(ticks):
            self.tick(reward=reward)

    @rule(ticks=st.integers(1, 8), mask=st.integers(0, 63))
    def some_are_slow(self, ticks: int, mask: int) -> None:
        """Those whose bit is set do nothing for a while."""
        for _ in range(ticks):
            self.tick(mask)

    @rule(bit=st.integers(0, 5), ticks=st.integers(5, 14))
    def one_freezes_for_long(self, bit: int, ticks: int) -> None:
        """Beyond the timeouts; then it goes on as if nothing had been."""
        for _ in range(ticks):
            self.tick(1 << bit)

    @rule(which=indices, ticks=st.integers(0, 8))
    def a_worker_is_replaced(self, which: int, ticks: int) -> None:
        """It was only believed dead: two incarnations of one name."""
        if self.workers:
            self.start_worker(self.workers[which % len(self.workers)].name)
            for _ in range(ticks):
                self.tick(4 << which % 4)

    def tick(self, frozen: int = 0, reward: float | None = 1.0) -> None:
        self.now += 1
        for trainer in list(self.trainers):
            if not frozen & 1:
                self._trainers_turn(trainer)
        for coordinator in list(self.coordinators):
            if not frozen & 2:
                self._coordinators_turn(coordinator)
        for number, worker in enumerate(list(self.workers)):
            if not frozen & 4 << number % 4:
                self._workers_turn(worker, reward)

    def _trainers_turn(self, trainer: ModelTrainer) -> None:
        if not trainer.started:
            self._recover(trainer)
            return
        if trainer.pending is None:
            for place in trainer.reader.behind:
                trainer.take(place)
            trainer.prepare()
        self._commit_step(trainer)

    def _coordinators_turn(self, coordinator: ModelCoordinator) -> None:
        while coordinator.phase < 3:
            coordinator.rebuild(self.now)
        if coordinator.pending is not None:
            self._commit(coordinator)
            return
        for place in coordinator.reader.behind:
            coordinator.take(place, self.now)
        if coordinator.done(self.now):
            self.coordinators.remove(coordinator)
            return
        self._decide(coordinator)
        if coordinator in self.coordinators:
            self._commit(coordinator)
        if coordinator in self.coordinators:
            coordinator.take_over()
            coordinator.scan()
            coordinator.beat()

    def _workers_turn(self, worker: ModelWorker, reward: float | None) -> None:
        if worker.loading:
            worker.end_load()
            return
        worker.take_commands()
        if worker.told_to_stop:
            self._stop_if_told(worker)
            return
        for trajectory_id in worker.generating:
            worker.extend(trajectory_id, 1, None)
        for trajectory_id in worker.scoring:
            # samples of a group differ, so that it has a signal
            differs = reward is not None and trajectory_id.endswith("/1")
            worker.finish(trajectory_id, 1.0 - reward if differs and reward is not None else reward)
        worker.beat()

    # What must hold

    @invariant()
    def every_rule_is_kept(self) -> None:
        """Judged by the real audit; the log itself checks the admission rule as it is written."""
        if not hasattr(self, "log"):
            return
        size = sum(map(len, self.log.partitions.values()))
        if size != self.audited:
            self.audited = size
            report = self.log.audit()
            assert not report.violated, report.findings
            assert report.conserved
            assert report.max_staleness <= self.window.max_staleness

    def teardown(self) -> None:
        """Whatever happened: once nothing goes wrong any more, the run goes on to its end, be it
        with one worker."""
        if not hasattr(self, "log"):
            return
        if not self.trainers:
            self.start_trainer()
        back = self.names if self.all_return else self.names[:1]
        for name in back:
            # an older incarnation that still lives is of no use: it will be told to stop
            if not any(worker.incarnation == self.latest[name] for worker in self.workers):
                self.start_worker(name)
        due = min(self.log.newest + self.window.max_staleness + 2, self.steps)
        for _ in range(TICKS):
            if self.log.newest >= due and (due < self.steps or self._ended):
                break
            if not self.coordinators:
                self.start_coordinator()
            self.tick()
        else:
            raise AssertionError(self._stuck(due))
        self.every_rule_is_kept()

    @property
    def _ended(self) -> bool:
        """Everybody was told that the run is complete, and evaluations are finished."""
        return not self.workers

    def _stuck(self, due: int) -> str:
        core = self.coordinators[-1].core
        return (
            f"version {self.log.newest} of {due} after {TICKS} ticks; outstanding "
            f"{dict(core.state.outstanding)}, unplaced {sorted(core.unplaced)}, being read "
            f"{sorted(core.scans)}, workers {core.roster.views()}, trainer waits for "
            f"{self.trainers[-1].planner.decide().blocked if self.trainers else 'a start'}"
        )


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=int(os.environ.get("DORA_MODEL_EXAMPLES", "60")),
    stateful_step_count=int(os.environ.get("DORA_MODEL_STEPS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
