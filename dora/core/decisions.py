"""What a coordinator decides by, and what it decides.

Invariant: a decision is complete: what is to be committed in one transaction follows from it and
from the statuses that it names, and from nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dora.core.placement import Admit, Plan, Unplaced
from dora.core.schedules import Schedule
from dora.core.window import Window
from dora.schemas.records import Status

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
    plan: Plan = field(default_factory=Plan)
    yields: tuple[Yield, ...] = ()
    moves: tuple[Yield, ...] = ()
    pauses: tuple[Status, ...] = ()
    stops: tuple[Status, ...] = ()
    zombies: tuple[Status, ...] = ()
    given_up: tuple[Unplaced, ...] = ()
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
