"""From what is known to who generates what: placement, balance and pauses of one tick.

Nothing is decided twice: what one tick has sent, the next one sees in workers, pool and
waiting trajectories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest

from dora.core.filling import fillable, oldest_filled
from dora.core.scheduling.pending import PendingAttempt, PendingQueue
from dora.core.scheduling.placement import Admit, PlacementPlan, Situation, Switch, assign
from dora.core.scheduling.rebalancing import Rebalancing
from dora.core.scheduling.schedules import Pauses, Schedule
from dora.core.scheduling.workers import WorkerRegistry
from dora.core.state import RunState
from dora.core.window import Window
from dora.schemas.records import (
    Status,
)

RUN_COMPLETE = "the run is complete"
"""Reason of the last yields and stops of a run: nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What of a run's configuration a coordinator decides by; timeouts in seconds."""

    window: Window
    group_size: int
    steps: int
    success_threshold: float = 1.0
    heartbeat_timeout: float = 30.0
    load_timeout: float = 900.0
    max_attempts: int = 5
    evaluation_every: int = 0
    evaluation_prompts: int = 0
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True, slots=True)
class Yield:
    """Let a worker stop an attempt and hand it back."""

    worker: Status
    trajectory_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be committed in one transaction; admissions come before what follows from them.

    `moves` lets workers stop attempts and hand their tokens over, `pauses` suspends generation,
    `stops` ends workers because the run is complete, `zombies` ends replaced incarnations,
    `given_up` ends trajectories that no worker survives: their groups will be set aside. Plans name
    workers; `addressees` are their newest statuses.
    """

    evaluations: tuple[Admit, ...] = ()
    plan: PlacementPlan = field(default_factory=PlacementPlan)
    yields: tuple[Yield, ...] = ()
    moves: tuple[Yield, ...] = ()
    pauses: tuple[Status, ...] = ()
    stops: tuple[Status, ...] = ()
    zombies: tuple[Status, ...] = ()
    given_up: tuple[PendingAttempt, ...] = ()
    last_yields: bool = False
    addressees: Mapping[str, Status] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.evaluations
            or self.plan
            or self.yields
            or self.moves
            or self.pauses
            or self.stops
            or self.zombies
            or self.given_up
        )


class Scheduler:
    """Plans over what a coordination knows; it owns only when it last rebalanced and paused."""

    def __init__(
        self,
        rules: Rules,
        state: RunState,
        workers: WorkerRegistry,
        waiting: PendingQueue,
        *,
        ranked: bool,
    ) -> None:
        self._ranked = ranked
        self.pauses = Pauses()
        self._rules = rules
        self._state = state
        self._workers = workers
        self._waiting = waiting
        workers.pool.follows = rules.schedule.roams or rules.schedule.adapters
        self._rebalancing = Rebalancing(
            rules.schedule.rebalance_seconds, rules.schedule.memory_threshold
        )

    def place(self, now: float, *, blocked: bool) -> tuple[PlacementPlan, list[Yield]]:
        """Who generates what; `blocked`: what is about to be placed comes before new groups."""
        schedule, state = self._rules.schedule, self._state
        self._workers.pool.turn_to(state.newest)
        admissible = schedule.admissible(state, self._rules.steps - state.newest)
        made = assign(
            self._workers.pool,
            self._waiting,
            Situation(
                newest=state.newest,
                admissible=0 if blocked else admissible,
                next_ordinal=state.next_ordinal,
                group_size=self._rules.group_size,
                older={} if blocked else self._older(admissible),
                whole=schedule.whole,
                ahead=self._ahead(),
                roams=schedule.roams,
                many=schedule.adapters,
                migration=schedule.moves,
            ),
        )
        demand = (admissible - len(made.plan.admissions)) * self._rules.group_size
        pool = self._workers.pool
        left = {pool.view(switch.worker).version for switch in made.plan.switches}
        moves = self._moves(made.homeless, demand, left, now)
        giving = {each.worker.process for each in moves}
        if any(start.worker in giving for start in made.plan.starts):
            starts = tuple(start for start in made.plan.starts if start.worker not in giving)
            return replace(made.plan, starts=starts), moves
        return made.plan, moves

    def _ahead(self) -> int:
        """How many trajectories may wait so that the longest of them start first. With a window of
        one version, all; else they would wait under a version that is no more the newest."""
        if not self._ranked:
            return 0
        if self._rules.window.max_staleness == 0:
            return self._rules.window.capacity * self._rules.group_size
        return self._workers.pool.capacity // 4

    def _older(self, admissible: int) -> dict[int, int]:
        """An older version with idle slots on its last worker, and how many groups may start under
        it; none where the newest version has room for all that may start."""
        window, newest, size = self._rules.window, self._state.newest, self._rules.group_size
        pool = self._workers.pool
        schedule = self._rules.schedule
        if not schedule.fills:
            return {}
        if admissible * size <= pool.shelf(newest).room:
            return {}
        for version in range(newest - 1, oldest_filled(window, newest) - 1, -1):
            shelf = pool.shelf(version)
            alone = shelf.workers - shelf.leaving == 1
            if not (alone and shelf.room) or self._waiting.count(version):
                continue
            most = min(admissible, -(-shelf.room // size))
            count = fillable(window, newest, self._state.outstanding, version, most)
            if count:
                return {version: count}
        return {}

    def _moves(self, homeless: list[int], demand: int, left: set[int], now: float) -> list[Yield]:
        """What is to go to another worker. Versions that workers have just `left` are looked at
        once these are gone: their room goes with them."""
        workers, newest = self._workers, self._state.newest
        moves: list[Yield] = []
        if self._rules.schedule.moves:
            emptied = self._rebalancing.evict(workers.pool, homeless, newest)
            if not emptied:
                emptied = self._rebalancing.consolidate(
                    workers.pool,
                    self._waiting,
                    newest=newest,
                    demand=demand,
                    left=left,
                    quiet_since=workers.settled_at,
                    now=now,
                )
            for each in emptied:
                moves += self._move(each.worker, each.reason, None, now)
        if self._rules.schedule.migration and not self._rules.schedule.roams:
            for name in workers.pressed:
                count = self._rebalancing.relief(workers, self._waiting, name, now)
                if count:
                    moves += self._move(name, "its memory runs high", count, now)
        return moves

    def _move(self, name: str, reason: str, count: int | None, now: float) -> list[Yield]:
        """Moves of all trajectories of a worker, or of the `count` youngest that may move."""
        worker = self._workers.worker(name)
        if worker is None:
            return []
        held = [
            (lease.sent_at, identity, lease.attempt)
            for identity in worker.leases - worker.moving
            if (lease := self._workers.held(identity)) is not None
        ]
        if count is not None:
            settled = now - self._rules.schedule.rebalance_seconds
            held = nlargest(count, [h for h in held if h[2] == 0 or h[0] <= settled])
        return [Yield(worker.status, identity, n, reason) for _, identity, n in sorted(held)]

    def pause(self, plan: PlacementPlan) -> tuple[PlacementPlan, list[Status]]:
        """Who pauses while a step is trained on the same devices, and who goes on after it."""
        if not self._rules.schedule.pauses:
            return plan, []
        newest = self._state.newest
        pauses, resumed = self.pauses.due(self._workers.workers(), newest)
        switching = {switch.worker for switch in plan.switches}
        switches = [
            Switch(status.process, newest, "training is over")
            for status in resumed
            if status.process not in switching
        ]
        return replace(plan, switches=(*plan.switches, *switches)), [
            status for status in pauses if status.process not in switching
        ]

    def addressees(self, plan: PlacementPlan) -> dict[str, Status]:
        names = {start.worker for start in plan.starts}
        names.update(switch.worker for switch in plan.switches)
        workers = ((name, self._workers.worker(name)) for name in names)
        return {name: worker.status for name, worker in workers if worker is not None}
