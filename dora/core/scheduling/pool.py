"""The workers that can generate, indexed by version and load.

What the index says of a version is what a walk over all views would say. A change of one
worker costs O(log workers), a question O(1) amortised, so that no decision looks at every worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement needs to know of a worker.

    `version` is the hosted one (-1: none), `versions` all of them where a worker hosts many; `load`
    the trajectories it holds or was sent, those included that are about to leave it; `switching_to`
    the version of a load under way. `leaving`: its work goes elsewhere, so that it can load another
    version. `pressed`: its memory runs high, or it is giving work away. `speed` is relative to its
    peers. `adapters` is how many versions a worker that hosts many has room for.
    """

    name: str
    version: int
    capacity: int
    load: int
    switching_to: int | None = None
    versions: tuple[int, ...] = ()
    leaving: bool = False
    pressed: bool = False
    speed: float = 1.0
    adapters: int | None = None

    def with_load(self, load: int) -> "WorkerView":
        """The same worker with another load."""
        return WorkerView(
            self.name, self.version, self.capacity, load, self.switching_to, self.versions,
            self.leaving, self.pressed, self.speed, self.adapters,
        )  # fmt: skip


_Entry = tuple[float, str, int]


@dataclass(slots=True)
class Shelf:
    """The settled workers of one version: they host it and no load is under way.

    `leaving` of them are being emptied, and hold `leaving_load`. `load` and `room` count
    trajectories, `room` only where new ones may start; `capability` is the sum of capacities, each
    times the worker's speed.
    """

    workers: int = 0
    leaving: int = 0
    leaving_load: int = 0
    load: int = 0
    room: int = 0
    capability: float = 0.0
    names: dict[str, None] = field(default_factory=dict)
    idle: dict[str, None] = field(default_factory=dict)
    heap: list[_Entry] = field(default_factory=list)


def _room(view: WorkerView) -> int:
    closed = view.leaving or view.pressed
    return 0 if closed else max(0, view.capacity - view.load)


def _settled(view: WorkerView) -> tuple[int, ...]:
    """The versions for which the worker is at hand."""
    if view.versions:
        return view.versions
    return () if view.switching_to is not None or view.version < 0 else (view.version,)


class Pool:
    """Views by name. `newest` is the version that every worker is to host in the end."""

    def __init__(self) -> None:
        self.newest = -1
        self.follows = False
        """Whether busy workers load the newest version too; `behind` is kept for these only."""
        self.capacity = 0
        self.capability = 0.0
        self.arriving: dict[int, int] = {}
        """Loads under way, by version."""
        self.homeless: dict[str, None] = {}
        """Idle workers that host nothing."""
        self.behind: dict[str, None] = {}
        """Workers that neither host nor load the newest version."""
        self._views: dict[str, WorkerView] = {}
        self._stamps: dict[str, int] = {}
        self._shelves: dict[int, Shelf] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._views)

    def views(self) -> list[WorkerView]:
        """All workers that can generate, or are on their way to."""
        return list(self._views.values())

    def view(self, name: str) -> WorkerView:
        """The worker of that name; KeyError if it cannot generate."""
        return self._views[name]

    def knows(self, name: str) -> bool:
        """Whether the worker can generate, or is on its way to."""
        return name in self._views

    def put(self, view: WorkerView) -> None:
        """A worker came or changed."""
        before = self._views.get(view.name)
        if before == view:
            return
        if before is not None:
            self._unshelve(before)
        self._views[view.name] = view
        self._shelve(view)

    def drop(self, name: str) -> None:
        """A worker cannot generate any more."""
        before = self._views.pop(name, None)
        if before is not None:
            self._unshelve(before)
            self._stamps.pop(name, None)

    def turn_to(self, newest: int) -> None:
        """Another version is the newest."""
        if newest == self.newest:
            return
        self.newest = newest
        if self.follows:
            self._fall_behind()

    def _fall_behind(self) -> None:
        self.behind = {name: None for name, view in self._views.items() if self._is_behind(view)}

    def shelf(self, version: int) -> Shelf:
        """The settled workers of a version."""
        return self._shelves.get(version) or Shelf()

    def hosted(self, version: int) -> bool:
        """Whether some worker hosts the version or loads it."""
        return self.shelf(version).workers > 0 or self.arriving.get(version, 0) > 0

    def hosting(self) -> list[int]:
        """Versions with settled workers, oldest first."""
        return sorted(self._shelves)

    def least_loaded(self, version: int) -> WorkerView | None:
        """The settled worker of `version` with the lowest load for its capability that may start
        one more trajectory; of equal ones the first by name."""
        shelf = self._shelves.get(version)
        if shelf is None:
            return None
        heap = shelf.heap
        while heap:
            _, name, stamp = heap[0]
            if self._stamps.get(name) == stamp:
                return self._views[name]
            heappop(heap)
        return None

    def lightest(self, version: int, count: int) -> list[WorkerView]:
        """Up to `count` settled workers of a version that may start something, lightest first."""
        found: list[WorkerView] = []
        entries: list[_Entry] = []
        shelf = self._shelves.get(version)
        while shelf is not None and len(found) < count:
            view = self.least_loaded(version)
            if view is None:
                break
            entries.append(heappop(shelf.heap))
            found.append(view)
        for entry in entries:
            heappush(self._shelves[version].heap, entry)
        return found

    def idle(self, version: int) -> Iterator[str]:
        """Idle settled workers of a version; -1: that host nothing."""
        if version < 0:
            return iter(tuple(self.homeless))
        return iter(tuple(self.shelf(version).idle))

    def _is_behind(self, view: WorkerView) -> bool:
        if not self.follows:
            return False
        if view.versions:
            return self.newest not in view.versions and view.switching_to is None
        return view.version != self.newest and view.switching_to is None

    def _shelve(self, view: WorkerView) -> None:
        name, load = view.name, view.load
        self._stamp += 1
        stamp = self._stamps[name] = self._stamp
        room, capability = _room(view), view.capacity * view.speed
        self.capacity += view.capacity
        self.capability += capability
        if view.switching_to is not None:
            self.arriving[view.switching_to] = self.arriving.get(view.switching_to, 0) + 1
        elif self._is_behind(view):
            self.behind[name] = None
        if view.version < 0 and not view.versions and view.switching_to is None and not load:
            self.homeless[name] = None
        for version in _settled(view):
            shelf = self._shelves.get(version)
            if shelf is None:
                shelf = self._shelves[version] = Shelf()
            shelf.workers += 1
            shelf.leaving += view.leaving
            shelf.leaving_load += load if view.leaving else 0
            shelf.names[name] = None
            shelf.load += load
            shelf.room += room
            shelf.capability += capability
            if load == 0:
                shelf.idle[name] = None
            if room:
                heap = shelf.heap
                if len(heap) > 64 + 4 * shelf.workers:
                    stamps = self._stamps
                    heap[:] = [entry for entry in heap if stamps.get(entry[1]) == entry[2]]
                    heapify(heap)
                heappush(heap, ((load + 1) / capability, name, stamp))

    def _unshelve(self, view: WorkerView) -> None:
        name = view.name
        room, capability = _room(view), view.capacity * view.speed
        self.capacity -= view.capacity
        self.capability -= capability
        self.behind.pop(name, None)
        self.homeless.pop(name, None)
        if view.switching_to is not None:
            count = self.arriving[view.switching_to] - 1
            if count:
                self.arriving[view.switching_to] = count
            else:
                del self.arriving[view.switching_to]
        for version in _settled(view):
            shelf = self._shelves[version]
            shelf.workers -= 1
            shelf.leaving -= view.leaving
            shelf.leaving_load -= view.load if view.leaving else 0
            shelf.load -= view.load
            shelf.room -= room
            shelf.capability -= capability
            shelf.idle.pop(name, None)
            del shelf.names[name]
            if not shelf.workers:
                del self._shelves[version]
