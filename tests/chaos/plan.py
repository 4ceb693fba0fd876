"""Which faults a chaos run makes, in which order: a function of the seed alone.

Invariant: equal seed, number and mix give equal plans. Victims and kinds come in the mix's shares
as exactly as whole numbers allow, and a victim's points are used in turn, so that even a short plan
covers every victim and a long one every point. When a fault strikes also depends on the run: each
waits until its victim is well, and then for its own random delay.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, Literal, TypeVar

from dora.faults import POINTS, Point

Victim = Literal["trainer", "coordinator", "worker", "broker"]
Kind = Literal["kill", "freeze", "point"]
Effect = Literal["kill", "freeze"]
Successor = Literal["none", "same", "other"]

VICTIMS: tuple[Victim, ...] = ("trainer", "coordinator", "worker", "broker")
KINDS: tuple[Kind, ...] = ("kill", "freeze", "point")

# How often a process passes a point before it is struck, at most.
PASSAGES: Mapping[Point, int] = {
    "trainer.weights_stored": 3,
    "trainer.checkpoint_stored": 1,
    "trainer.before_transaction": 3,
    "trainer.inside_transaction": 3,
    "trainer.after_transaction": 3,
    "coordinator.inside_transaction": 8,
    "coordinator.after_transaction": 8,
    "worker.chunk_sent": 40,
    "worker.trajectory_sent": 6,
    "worker.version_loading": 2,
    "worker.version_loaded": 2,
}

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of victims, and of kinds for each victim. `delay` is the longest wait, in seconds,
    between a victim's recovery and its next fault."""

    victims: Mapping[Victim, float]
    kinds: Mapping[Victim, Mapping[Kind, float]]
    workers: tuple[str, ...]
    delay: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `process` is the process that is struck: a worker's id, or the victim's name."""

    number: int
    victim: Victim
    process: str
    kind: Kind
    effect: Effect
    point: Point | None
    passage: int
    """Which passage of `point` strikes, from 1; 0 without a point."""
    delay: float
    """Seconds that the victim is well before it is struck, or armed."""
    successor: Successor
    """Who takes over while the victim is frozen: nobody, a process of the same name, or (workers
    only) one of another name."""
    stretch: float
    """From 0 to 1: how much longer than the timeouts a freeze lasts."""

    @property
    def variable(self) -> str | None:
        """Value of `DORA_FAULT` that makes the process strike itself; None without a point."""
        return None if self.point is None else f"{self.point}:{self.effect}:{self.passage}"


def shares(weights: Mapping[K, float], total: int) -> dict[K, int]:
    """`total` things split in proportion to `weights`, by largest remainder; ties go to the first.

    The counts differ from the exact shares by less than 1 and add up to `total`.
    """
    whole = sum(weights.values())
    exact = {key: total * weight / whole for key, weight in weights.items()}
    counts = {key: int(share) for key, share in exact.items()}
    ranked = sorted(exact, key=lambda key: counts[key] - exact[key])
    for key in ranked[: total - sum(counts.values())]:
        counts[key] += 1
    return counts


def points_of(victim: Victim) -> list[Point]:
    """The points that a victim's processes pass."""
    return [point for point in POINTS if point.startswith(f"{victim}.")]


def plan(seed: int, faults: int, mix: Mix) -> list[Fault]:
    """The faults of a run, in the order in which they are to strike."""
    random = Random(f"dora chaos {seed}")
    turns: list[tuple[Victim, Kind]] = []
    for victim, count in shares(mix.victims, faults).items():
        kinds = _without_points(mix.kinds[victim]) if not points_of(victim) else mix.kinds[victim]
        for kind, number in shares(kinds, count).items():
            turns += [(victim, kind)] * number
    random.shuffle(turns)
    points = {victim: _Turns(points_of(victim), random) for victim in VICTIMS}
    effects = {victim: _Turns[Effect](("kill", "freeze", "kill"), random) for victim in VICTIMS}
    workers = _Turns(mix.workers, random)
    result = []
    for number, (victim, kind) in enumerate(turns):
        point = points[victim].next() if kind == "point" else None
        effect: Effect = effects[victim].next() if point is not None else _effect(kind)
        result.append(
            Fault(
                number=number,
                victim=victim,
                process=workers.next() if victim == "worker" else victim,
                kind=kind,
                effect=effect,
                point=point,
                passage=0 if point is None else random.randint(1, PASSAGES[point]),
                delay=random.uniform(0.0, mix.delay),
                successor=_successor(victim, random) if effect == "freeze" else "none",
                stretch=random.random(),
            )
        )
    return result


def _effect(kind: Kind) -> Effect:
    return "freeze" if kind == "freeze" else "kill"


def _without_points(kinds: Mapping[Kind, float]) -> Mapping[Kind, float]:
    return {kind: share for kind, share in kinds.items() if kind != "point"}


def _successor(victim: Victim, random: Random) -> Successor:
    if victim == "broker":
        return "none"
    choices: tuple[Successor, ...] = ("none", "same", "same")
    return random.choice((*choices, "other") if victim == "worker" else choices)


class _Turns(Generic[T]):
    """Every one of `items` in random order, then all again in another order."""

    def __init__(self, items: Sequence[T], random: Random) -> None:
        self._items = items
        self._random = random
        self._left: list[T] = []

    def next(self) -> T:
        """The next one."""
        if not self._left:
            self._left = list(self._items)
            self._random.shuffle(self._left)
        return self._left.pop()
