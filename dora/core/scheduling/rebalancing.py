"""Moving requests between workers of one version (DORA paper, Algorithm 1).

Invariants: requests move only where a whole worker comes free by it or where memory runs high; what
is taken from a worker fits on the others of its version, or makes way for an older version that has
no worker. A worker that got a version or another's requests within the last period is left alone,
so nothing moves twice within a period, and a state that does not change is balanced once.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from math import ceil

from dora.core.scheduling.pending import PendingQueue
from dora.core.scheduling.pool import Pool, WorkerView
from dora.core.scheduling.workers import WorkerRegistry

_LOOKED_AT = 8
"""Of the lightest workers of a version, how many are looked at for one to be emptied."""
_WORTH_FREEING = 0.5
"""Share of a worker's capacity for which the newest version must have use."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """A worker whose requests are to go elsewhere, and why."""

    worker: str
    reason: str


def shares(unfinished: Mapping[int, int], newest: int, room: int, total: float) -> dict[int, float]:
    """Splits the capability `total` over versions in proportion to unfinished requests.

    The newest counts up to the `room` that the others leave it, and no less than what it has
    nowhere else to go: newest first for free room. Where all requests fill all slots, each version
    gets what its requests fill.
    """
    counted = dict(unfinished)
    if newest in counted:
        others = sum(counted.values()) - counted[newest]
        counted[newest] = min(counted[newest], max(0, room - others))
    whole = sum(counted.values())
    if not whole:
        return dict.fromkeys(counted, 0.0)
    return {version: total * count / whole for version, count in counted.items()}


class Rebalancing:
    """When a balance is due, and which workers are emptied by it. `period` in seconds; 0: only
    after each new version."""

    def __init__(self, period: float, memory_threshold: float) -> None:
        self._period = period
        self._memory_threshold = memory_threshold
        self._newest = -1
        self._done_at: dict[int, float] = {}
        self._relieved_at: dict[str, float] = {}

    def due(self, version: int, newest: int, now: float) -> bool:
        """Whether the workers of an old version are to be looked at."""
        if newest != self._newest:
            self._newest = newest
            self._done_at.clear()
        at = self._done_at.get(version)
        return at is None or (self._period > 0 and now - at >= self._period)

    def consolidate(
        self,
        pool: Pool,
        waiting: PendingQueue,
        *,
        newest: int,
        demand: int,
        left: Set[int] = frozenset(),
        quiet_since: Callable[[str], float],
        now: float,
    ) -> list[Emptied]:
        """Workers of old versions to be emptied, oldest version first, because the others of their
        version have room for their requests and the newest has use for them.

        `demand` is how many requests could run under the newest version, beyond those that do;
        versions in `left` are losing workers in this very moment and wait.
        """
        old = [v for v in pool.hosting() if v != newest]
        if not old:
            return []
        unfinished = {v: pool.shelf(v).load + waiting.count(v) for v in (*old, newest)}
        unfinished[newest] += demand
        fair = shares(unfinished, newest, pool.capacity, pool.capability)
        wanted = demand + waiting.count(newest) - pool.shelf(newest).room
        wanted -= self._coming(pool, newest)
        emptied: list[Emptied] = []
        for version in old:
            if version in left or not self.due(version, newest, now):
                continue
            for view in self._spare(pool, waiting, version, fair[version], quiet_since, now):
                if wanted < view.capacity * _WORTH_FREEING:
                    return emptied
                wanted -= view.capacity
                self._done_at[version] = now
                reason = f"version {version} fits on fewer workers"
                emptied.append(Emptied(view.name, reason))
        return emptied

    def _coming(self, pool: Pool, newest: int) -> int:
        """Room that workers on their way to the newest version bring."""
        average = pool.capacity / len(pool) if len(pool) else 0
        leaving = sum(pool.shelf(v).leaving for v in pool.hosting() if v != newest)
        return int(average * (pool.arriving.get(newest, 0) + leaving))

    def _spare(
        self,
        pool: Pool,
        waiting: PendingQueue,
        version: int,
        fair: float,
        quiet_since: Callable[[str], float],
        now: float,
    ) -> Iterable[WorkerView]:
        """The lightest workers of a version, as long as the rest has room for their requests."""
        shelf = pool.shelf(version)
        staying = shelf.workers - shelf.leaving
        capability = shelf.capability
        room = shelf.room - waiting.count(version) - shelf.leaving_load
        for view in pool.lightest(version, _LOOKED_AT):
            own = view.capacity - view.load
            weight = view.capacity * view.speed
            if staying < 2 or room - own < view.load or capability - weight < fair - weight / 2:
                return
            if not view.load or now - quiet_since(view.name) < self._period:
                continue
            staying -= 1
            room -= own + view.load
            capability -= weight
            yield view

    def evict(
        self,
        pool: Pool,
        homeless: Iterable[int],
        newest: int,
    ) -> list[Emptied]:
        """Workers to be emptied for versions that have work and no worker, the oldest first: of a
        version that has several, or of a newer one, the newest first."""
        emptied: list[Emptied] = []
        hosts = sorted(pool.hosting(), reverse=True)
        on_the_way = sum(pool.shelf(version).leaving for version in hosts)
        taken: set[str] = set()
        for version in homeless:
            if on_the_way > 0:
                on_the_way -= 1
                continue
            for host in hosts:
                shelf = pool.shelf(host)
                if shelf.workers - shelf.leaving < 2 and host <= version:
                    continue
                found = pool.lightest(host, len(taken) + 1)
                names = [view.name for view in found] or list(shelf.names)
                free = [n for n in names if n not in taken and not pool.view(n).leaving]
                if free:
                    taken.add(free[0])
                    reason = f"version {version} has work and no worker"
                    emptied.append(Emptied(free[0], reason))
                    break
        return emptied

    def relief(self, workers: WorkerRegistry, waiting: PendingQueue, name: str, now: float) -> int:
        """How many requests a worker whose memory runs high gives away: as many as bring it a tenth
        below the threshold and find room elsewhere, at most once a period and never all."""
        worker, pool = workers.worker(name), workers.pool
        if worker is None or not pool.knows(name) or worker.moving or worker.leaving:
            return 0
        if now - self._relieved_at.get(name, float("-inf")) < max(self._period, 1.0):
            return 0
        view, used = pool.view(name), worker.status.metrics["kv_used_share"]
        versions = view.versions or (view.version,)
        room = min(pool.shelf(v).room - waiting.count(v) for v in versions)
        share = min(1.0, max(0.0, 1 - 0.9 * self._memory_threshold / used))
        count = min(ceil(view.load * share), view.load - 1, room)
        if count > 0:
            self._relieved_at[name] = now
        return max(count, 0)
