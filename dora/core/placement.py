"""The words in which placement speaks: workers, work, and what a plan makes of them.

Which worker generates what is decided in `core.assignment`, what moves between workers in
`core.rebalancing` (DORA paper, Algorithm 1).
"""

from dataclasses import dataclass

from dora.schemas.records import Purpose, VersionRun


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


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A started trajectory that no worker holds; `attempt` is the number of its next attempt.

    That attempt goes on from the prefix, packed as in the records; `prefix_runs` as in Command.
    """

    group_id: str
    sample: int
    version: int
    ordinal: int
    purpose: Purpose
    attempt: int
    prefix_token_ids: bytes = b""
    prefix_logprobs: bytes = b""
    prefix_runs: tuple[VersionRun, ...] = ()


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
    work: Unplaced


@dataclass(frozen=True, slots=True)
class Admit:
    """Start a new group under a version."""

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


def due_evaluations(*, opened: int, newest: int, every: int, last: int) -> list[int]:
    """Versions in (opened, newest] that are to be evaluated, oldest first.

    `opened` is the newest version with an admission in the journal (-1: none): a version that was
    passed over gets none any more.
    """
    versions = range(opened + 1, newest + 1)
    return [v for v in versions if v in (0, last) or (every > 0 and v % every == 0)]
