"""Which worker generates what, and which version it hosts (DORA paper, Algorithm 1).

Every plan keeps these rules:
- a trajectory starts only on a worker that hosts its group's version (C1);
- a new group starts only under a version for which the window admits it (C3);
- a version with pending work gets a worker before idle workers move to the newest version, the
  oldest first, so that no version starves (C2);
- no worker is given more than its capacity, and none that hosts one version at a time switches
  while it holds a trajectory.

Planning leaves the pool as it found it: a plan takes effect when it is in the log.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dora.core.ring import train_group_id
from dora.core.scheduling.pending import PendingAttempt, PendingQueue
from dora.core.scheduling.pool import Pool, WorkerView


@dataclass(frozen=True, slots=True)
class Switch:
    """Let a worker load a version: an idle one another, one that hosts many one more."""

    worker: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Let a worker generate a trajectory."""

    worker: str
    work: PendingAttempt


@dataclass(frozen=True, slots=True)
class Admit:
    """Start a new group under a version."""

    group_id: str
    ordinal: int
    version: int


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Decisions in the order in which they take effect: admissions come before their starts."""

    admissions: tuple[Admit, ...] = ()
    starts: tuple[Start, ...] = ()
    switches: tuple[Switch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admissions or self.starts or self.switches)


def due_evaluations(*, opened: int, newest: int, every: int, last: int) -> list[int]:
    """Versions in (opened, newest] that are to be evaluated, oldest first.

    `opened` is the newest version with an admission in the journal (-1: none): a version that was
    passed over gets none any more.
    """
    versions = range(opened + 1, newest + 1)
    return [v for v in versions if v in (0, last) or (every > 0 and v % every == 0)]


STARTS_PER_PLAN = 4096
"""More starts wait for the next plan, so that no tick and no transaction takes long."""
WORTH_A_LOAD = 0.25
"""Share of a worker's capacity that must wait before a worker loads a version another hosts."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is made for.

    `admissible` new groups may start under `newest`, or, of these, as many as `older` says under
    the one older version that it names. `whole` admits them all at once, be there room or not;
    `ahead` admits until that many trajectories wait, whose order of starts is not the journal's.
    `roams`: workers of the newest version generate for all (partial rollouts). `many`: workers
    host several versions. `migration`: work may be taken from a worker for an older version's sake.
    """

    newest: int
    admissible: int
    next_ordinal: int
    group_size: int
    older: Mapping[int, int] = field(default_factory=dict)
    whole: bool = False
    ahead: int = 0
    roams: bool = False
    many: bool = False
    migration: bool = False


@dataclass(slots=True)
class Assignment:
    """A plan, and the versions that have work and will find no worker by it."""

    plan: PlacementPlan
    homeless: list[int]


def assign(pool: Pool, waiting: PendingQueue, situation: Situation) -> Assignment:
    """Places waiting trajectories, moves idle workers, and starts new groups."""
    planner = _Planner(pool, waiting, situation)
    try:
        return planner.run()
    finally:
        planner.undo()


class _Planner:
    def __init__(self, pool: Pool, waiting: PendingQueue, situation: Situation) -> None:
        self.pool = pool
        self.waiting = waiting
        self.it = situation
        self.before: dict[str, WorkerView] = {}
        self.starts: list[Start] = []
        self.switches: dict[str, Switch] = {}
        self.admissions: list[Admit] = []

    def run(self) -> Assignment:
        left: dict[int, int] = {}
        for version in self.waiting.versions():
            # a worker that was emptied for an older version does not stay
            may_stay = all(self.pool.hosted(older) for older in left)
            rest = self.waiting.count(version) - self.place(version, may_stay=may_stay)
            if rest:
                left[version] = rest
        homeless = [] if self.it.roams else self.house(left)
        self.go_to_newest()
        waits = left.get(self.it.newest, 0)
        if not waits or waits < self.it.ahead:
            self.admit(waits)
        plan = PlacementPlan(
            tuple(self.admissions), tuple(self.starts), tuple(self.switches.values())
        )
        return Assignment(plan, homeless)

    def undo(self) -> None:
        for view in self.before.values():
            self.pool.put(view)

    def put(self, view: WorkerView) -> None:
        self.before.setdefault(view.name, self.pool.view(view.name))
        self.pool.put(view)

    def start(self, view: WorkerView, *works: PendingAttempt) -> None:
        self.put(view.with_load(view.load + len(works)))
        self.starts += [Start(view.name, work) for work in works]

    def switch(self, name: str, version: int, reason: str) -> None:
        self.put(replace(self.pool.view(name), switching_to=version))
        self.switches[name] = Switch(name, version, reason)

    def host(self, version: int) -> WorkerView | None:
        """Where a trajectory of the version is to start."""
        return self.pool.least_loaded(self.it.newest if self.it.roams else version)

    def place(self, version: int, *, may_stay: bool) -> int:
        """Starts what waits of a version; returns how many."""
        placed = 0
        room = STARTS_PER_PLAN - len(self.starts)
        shelf = self.pool.shelf(self.it.newest if self.it.roams else version)
        limit = min(room, shelf.room)
        for work in self.waiting.first(version, limit):
            view = self.host(version)
            if view is None:
                break
            self.start(view, work)
            placed += 1
        alone = shelf.workers == shelf.leaving and not self.it.roams
        if alone and may_stay and room and not placed:
            placed = self.stay(version)
        return placed

    def stay(self, version: int) -> int:
        """An empty worker that was to leave the version stays if there is no other."""
        for name in sorted(self.pool.idle(version)):
            view = self.pool.view(name)
            works = self.waiting.first(version, view.capacity)
            if view.leaving and works:
                self.start(replace(view, leaving=False), *works)
                return len(works)
        return 0

    def idle(self) -> Iterator[str]:
        """Idle workers: first those on no or an old version, which leave nothing behind."""
        newest = self.it.newest
        for version in (-1, *(v for v in self.pool.hosting() if v != newest), newest):
            for name in sorted(self.pool.idle(version)):
                if name not in self.switches and not self.pool.view(name).versions:
                    yield name

    def house(self, left: Mapping[int, int]) -> list[int]:
        """Gives versions with work and without room a worker, oldest first; returns those for
        which there is none."""
        homeless = []
        for version in sorted(left):
            if self.pool.hosted(version):
                continue
            reason = f"version {version} has work and no worker"
            name = self.loader(version) if self.it.many else next(self.idle(), None)
            if name is not None:
                self.switch(name, version, reason)
            else:
                homeless.append(version)
                if not self.it.many and not self.it.migration and version != self.it.newest:
                    self.reserve()
        for version in sorted(left):
            if version not in homeless:
                self.help(version, left[version])
        return homeless

    def help(self, version: int, left: int) -> None:
        """Idle workers go where more waits than will soon find room."""
        if version == self.it.newest or self.it.many or self.pool.arriving.get(version):
            return
        for name in self.idle():
            view = self.pool.view(name)
            if left <= view.capacity * WORTH_A_LOAD:
                return
            if view.version != version:
                self.switch(name, version, f"version {version} has more work than room")
                left -= view.capacity

    def loader(self, version: int) -> str | None:
        """A worker that can host one version more."""
        for host in (self.it.newest, *self.pool.hosting()):
            for view in self.pool.lightest(host, 8):
                room = view.adapters is None or len(view.versions) < view.adapters
                if room and view.switching_to is None and version not in view.versions:
                    return view.name
        return next(self.pool.idle(-1), None)

    def reserve(self) -> None:
        """Nothing new for the least loaded worker, so that it comes free for an old version."""
        view = self.pool.least_loaded(self.it.newest)
        if view is not None:
            self.put(replace(view, leaving=True))

    def go_to_newest(self) -> None:
        newest = self.it.newest
        if newest < 0:
            return
        if self.it.roams or self.it.many:
            for name in tuple(self.pool.behind):
                view = self.pool.view(name)
                if view.adapters is None or len(view.versions) < view.adapters:
                    self.switch(name, newest, f"version {newest} is the newest")
            return
        for name in self.idle():
            if self.pool.view(name).version == newest:
                return
            self.switch(name, newest, f"idle, and version {newest} is the newest")

    def admit(self, waits: int) -> None:
        """New groups: first under an older version, for the rule for these holds in the journal
        before the others."""
        it = self.it
        ordinal, end = it.next_ordinal, it.next_ordinal + max(it.admissible, 0)
        for version in (*it.older, it.newest):
            newest = version == it.newest
            limit = end if newest else min(end, ordinal + it.older[version])
            while ordinal < limit and self.may_admit(version, waits):
                if newest and it.ahead:  # what waits is placed by rank in the next plan
                    self.admissions.append(Admit(train_group_id(ordinal), ordinal, version))
                    waits += it.group_size
                else:
                    self.begin(ordinal, version)
                ordinal += 1

    def may_admit(self, version: int, waits: int) -> bool:
        """Whether one more group may be admitted, as far as placement is concerned."""
        if version == self.it.newest and (self.it.whole or self.it.ahead):
            return self.it.whole or waits < self.it.ahead
        return len(self.starts) < STARTS_PER_PLAN and self.host(version) is not None

    def begin(self, ordinal: int, version: int) -> None:
        """Admits a group and starts it: on one worker if it fits there whole, else sample by
        sample; what finds no room now waits."""
        size, group_id = self.it.group_size, train_group_id(ordinal)
        self.admissions.append(Admit(group_id, ordinal, version))
        works = [PendingAttempt(group_id, n, version, ordinal, "train", 0) for n in range(size)]
        view = self.host(version)
        room = 0 if view is None else view.capacity - view.load
        if view is not None and room >= size and len(self.starts) < STARTS_PER_PLAN:
            self.start(view, *works)
            return
        for work in works:
            view = self.host(version)
            if view is None or len(self.starts) >= STARTS_PER_PLAN:
                return
            self.start(view, work)
