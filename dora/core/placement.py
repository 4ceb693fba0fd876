"""Which worker generates what, and which version it hosts (DESIGN: coordinator, schedules).

Invariants of every plan:
- a trajectory starts only on a worker that hosts its group's version (C1);
- a new group starts only under the newest version, and only as far as the window admits (C3);
- a version with unplaced work gets a worker before idle workers move to the newest version, the
  oldest first, so that no version starves (C2);
- no worker is given more than its capacity, and none switches while it holds a trajectory.

A worker moves to the newest version as soon as it is idle; moving work between workers is not done
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.ring import train_group_id
from dora.schemas.records import Purpose


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement needs to know of a worker.

    `version` is the hosted one (-1: none), `load` the trajectories it holds or was sent,
    `switching_to` the version of a switch under way.
    """

    name: str
    version: int
    capacity: int
    load: int
    switching_to: int | None = None


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A started trajectory that no worker holds; `attempt` is the number of its next attempt.

    That attempt goes on from the prefix, packed as in the records.
    """

    group_id: str
    sample: int
    version: int
    ordinal: int
    purpose: Purpose
    attempt: int
    prefix_token_ids: bytes = b""
    prefix_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class Switch:
    """Let an idle worker load another version."""

    worker: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Let a worker generate a trajectory."""

    worker: str
    work: Unplaced


@dataclass(frozen=True, slots=True)
class Admit:
    """Start a new group under the newest version."""

    group_id: str
    ordinal: int
    version: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions in the order in which they take effect: admissions come before their starts."""

    admissions: tuple[Admit, ...] = ()
    starts: tuple[Start, ...] = ()
    switches: tuple[Switch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admissions or self.starts or self.switches)


@dataclass(slots=True)
class _Planner:
    workers: dict[str, WorkerView]
    load: dict[str, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    switches: dict[str, Switch] = field(default_factory=dict)
    admissions: list[Admit] = field(default_factory=list)

    def settled(self, version: int) -> list[WorkerView]:
        """Workers that host `version` and stay there."""
        return [
            worker
            for worker in self.workers.values()
            if worker.version == version
            and worker.switching_to is None
            and worker.name not in self.switches
        ]

    def least_loaded(self, candidates: Sequence[WorkerView], room: int) -> WorkerView | None:
        free = [w for w in candidates if w.capacity - self.load[w.name] >= room]
        return min(free, key=lambda w: (self.load[w.name] / w.capacity, w.name), default=None)

    def start(self, worker: WorkerView, work: Unplaced) -> None:
        self.load[worker.name] += 1
        self.starts.append(Start(worker.name, work))

    def idle(self) -> list[WorkerView]:
        return [
            worker
            for worker in self.workers.values()
            if self.load[worker.name] == 0
            and worker.switching_to is None
            and worker.name not in self.switches
        ]

    def switch(self, worker: WorkerView, version: int, reason: str) -> None:
        self.switches[worker.name] = Switch(worker.name, version, reason)


def plan(
    workers: Sequence[WorkerView],
    unplaced: Sequence[Unplaced],
    *,
    newest: int,
    admissible: int,
    next_ordinal: int,
    group_size: int,
) -> Plan:
    """Places unplaced trajectories, moves idle workers, and starts up to `admissible` new groups.

    `workers` are those that answer and are able to generate; `newest` is the newest committed
    version; `admissible` is how many groups the window (and the end of the run) lets start.
    """
    planner = _Planner({w.name: w for w in workers}, {w.name: w.load for w in workers})
    left: list[Unplaced] = []
    for work in sorted(unplaced, key=lambda u: (u.version, u.ordinal, u.sample)):
        worker = planner.least_loaded(planner.settled(work.version), 1)
        if worker is None:
            left.append(work)
        else:
            planner.start(worker, work)

    hosted = {w.version for w in workers if w.switching_to is None}
    hosted |= {w.switching_to for w in workers if w.switching_to is not None}
    homeless = sorted({work.version for work in left} - hosted)
    reserved: set[str] = set()
    for version in homeless:
        idle = planner.idle()
        if idle:
            # a worker on an old version leaves nothing behind; one on the newest would
            worker = min(idle, key=lambda w: (w.version == newest, w.name))
            planner.switch(worker, version, f"version {version} has work and no worker")
            continue
        busy = [w for w in planner.settled(newest) if w.name not in reserved]
        if version != newest and busy:
            # nothing new for the least loaded one, so that it comes free for the old version
            reserved.add(min(busy, key=lambda w: (planner.load[w.name], w.name)).name)
    for worker in planner.idle():
        if worker.version != newest and newest >= 0:
            planner.switch(worker, newest, f"idle, and version {newest} is the newest")

    if not any(work.version == newest for work in left):
        for ordinal in range(next_ordinal, next_ordinal + max(admissible, 0)):
            candidates = [w for w in planner.settled(newest) if w.name not in reserved]
            worker = planner.least_loaded(candidates, group_size)
            if worker is None:
                break
            group_id = train_group_id(ordinal)
            planner.admissions.append(Admit(group_id, ordinal, newest))
            for sample in range(group_size):
                planner.start(worker, Unplaced(group_id, sample, newest, ordinal, "train", 0))
    return Plan(tuple(planner.admissions), tuple(planner.starts), tuple(planner.switches.values()))


def due_evaluations(*, opened: int, newest: int, every: int, last: int) -> list[int]:
    """Versions in (opened, newest] that are to be evaluated, oldest first.

    `opened` is the newest version with an admission in the journal (-1: none): admissions have
    non-decreasing versions, so a version that was passed over can get none any more.
    """
    versions = range(opened + 1, newest + 1)
    return [v for v in versions if v in (0, last) or (every > 0 and v % every == 0)]
