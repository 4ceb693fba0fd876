"""A whole run of model processes: who lives, and the turns that they get."""

from collections.abc import Callable

from dora.core.audit.starts import StartCheck
from dora.core.scheduling.records import DecisionRecords
from dora.core.scheduling.scheduler import Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.window import Window
from dora.schemas.records import Sampling
from tests.protocol.coordinator import ModelCoordinator
from tests.protocol.log import RUN, Crash, Fenced, SimulatedLog
from tests.protocol.trainer import ModelTrainer
from tests.protocol.worker import ModelWorker

LANES = 2
HEARTBEAT_TIMEOUT, LOAD_TIMEOUT = 4.0, 8.0
MAX_ATTEMPTS = 2

Reward = Callable[[str], float | None]
"""Reward by trajectory id; None where scoring fails."""


def signal(trajectory_id: str) -> float:
    """Rewards that differ within each group."""
    return 0.0 if trajectory_id.endswith("/1") else 1.0


class ModelRun:
    """Processes, dead and alive; a tick is a second."""

    def __init__(
        self,
        staleness: int = 1,
        batch: int = 2,
        group: int = 2,
        steps: int = 1000,
        evaluations: int = 0,
        compacted: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        self.now = 0.0
        self.made = 0
        self.window = Window(staleness, batch)
        behind = staleness if schedule is not None and schedule.fill_older else 0
        self.log = SimulatedLog(StartCheck((staleness + 1) * batch, behind))
        self.group, self.steps, self.compacted = group, steps, compacted
        self.rules = Rules(
            self.window, group, steps, 1.0, HEARTBEAT_TIMEOUT, LOAD_TIMEOUT, MAX_ATTEMPTS,
            2 * evaluations, evaluations, schedule or Schedule(rebalance_seconds=3.0),
        )  # fmt: skip
        self.maker = DecisionRecords(RUN, group, Sampling(1.0, 1.0, 0, 1, ()), lambda: 0)
        self.trainers: list[ModelTrainer] = []
        self.coordinators: list[ModelCoordinator] = []
        self.workers: list[ModelWorker] = []
        self.latest: dict[str, str] = {}  # newest incarnation by worker
        self.fates: dict[str, Crash] = {}  # what comes of the next commit that has records
        self.slow: set[str] = set()  # trajectories that get a token every tenth tick only

    def begin(self, *workers: str) -> None:
        """Starts everybody."""
        self.start_trainer().recover()
        self.start_coordinator()
        for name in workers:
            self.start_worker(name)

    def start_trainer(self) -> ModelTrainer:
        trainer = ModelTrainer(self.log, self.window, self.group, LANES, self.steps, self._new("t"))
        self.trainers.append(trainer)
        return trainer

    def start_coordinator(self) -> ModelCoordinator:
        coordinator = ModelCoordinator(
            self.log, self.rules, self.maker, LANES, self._new("c"), self.compacted
        )
        self.coordinators.append(coordinator)
        return coordinator

    def start_worker(self, name: str) -> ModelWorker:
        self.latest[name] = self._new(name)
        worker = ModelWorker(
            self.log, name, self.latest[name], self.window.max_staleness, LANES,
            many=self.rules.schedule.adapters,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def _new(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made}"

    def recover(self, trainer: ModelTrainer) -> None:
        try:
            trainer.recover()
        except Fenced:
            self.trainers.remove(trainer)

    def commit_step(self, trainer: ModelTrainer, crash: Crash | None = None) -> None:
        if trainer.pending is not None:
            crash = crash or self.fates.pop("trainer", None)
        try:
            alive = trainer.commit(crash)
        except Fenced:
            alive = False
        if not alive:
            self.trainers.remove(trainer)

    def decide(self, coordinator: ModelCoordinator) -> None:
        try:
            coordinator.decide(self.now)
        except Fenced:
            self.coordinators.remove(coordinator)

    def commit(self, coordinator: ModelCoordinator, crash: Crash | None = None) -> None:
        if coordinator.pending is not None and coordinator.pending[1]:
            crash = crash or self.fates.pop("coordinator", None)
        try:
            alive = coordinator.commit(self.now, crash)
        except Fenced:
            alive = False
        if not alive:
            self.coordinators.remove(coordinator)

    def stop_if_told(self, worker: ModelWorker) -> None:
        if worker.stop_received:
            worker.stop()
            self.workers.remove(worker)

    def tick(self, frozen: int = 0, reward: Reward = signal) -> None:
        """A second in which everybody does all there is to do, except whose bit is set: 1 trainers,
        2 coordinators, 4, 8, .. workers."""
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
            self.recover(trainer)
            return
        if trainer.pending is None:
            for place in trainer.reader.behind:
                trainer.take(place)
            trainer.prepare()
        self.commit_step(trainer)

    def _coordinators_turn(self, coordinator: ModelCoordinator) -> None:
        while coordinator.phase < 3:
            coordinator.rebuild(self.now)
        if coordinator.pending is not None:
            self.commit(coordinator)
            return
        for place in coordinator.reader.behind:
            coordinator.take(place, self.now)
        if coordinator.done(self.now):
            self.coordinators.remove(coordinator)
            return
        self.decide(coordinator)
        if coordinator in self.coordinators:
            self.commit(coordinator)
        if coordinator in self.coordinators:
            coordinator.take_over()
            coordinator.scan()
            coordinator.beat()

    def _workers_turn(self, worker: ModelWorker, reward: Reward) -> None:
        if worker.loading:
            worker.end_load()
            return
        self.work(worker, reward)
        if worker.stop_received:
            self.stop_if_told(worker)
        else:
            worker.beat()

    def work(self, worker: ModelWorker, reward: Reward = signal) -> None:
        """A turn of a worker, of which nothing need be acknowledged yet."""
        worker.take_commands()
        for trajectory_id in worker.generating:
            if trajectory_id not in self.slow or self.now % 10 == 0:
                worker.extend(trajectory_id, 1, None)
        for trajectory_id in worker.scoring:
            worker.finish(trajectory_id, reward(trajectory_id))

    def stuck(self, due: int) -> str:
        """What a run that does not go on waits for."""
        core = self.coordinators[-1].core if self.coordinators else None
        trainer = self.trainers[-1] if self.trainers else None
        return (
            f"version {self.log.newest} of {due}; trainer waits for "
            f"{trainer.builder.next_batch().blocked if trainer else 'a start'}; "
            + (
                f"outstanding {dict(core.state.outstanding)}, unplaced {sorted(core.pending)}, "
                f"being read {sorted(core.scans)}, workers {core.workers.pool.views()}"
                if core
                else "no coordinator"
            )
        )
