"""The schedules: when groups are admitted, when versions are loaded, when generation pauses.

`dora` lets several versions generate at once. The rivals run in the same system for comparison:
`sync` generates a batch, then trains it (a window without staleness is all it takes);
`one-step-off` generates the next batch, all of one version, while one is trained; `partial`
interrupts every trajectory at each new version and goes on with the new weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dora.core.processes import GONE
from dora.core.scheduling.workers import WorkerState
from dora.core.state import RunState
from dora.schemas.records import Command, Status

ScheduleKind = Literal["dora", "sync", "one-step-off", "partial"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run is scheduled by; times in seconds, see `[schedule]` in the configuration.

    `adapters`: workers host every live version at once.
    """

    kind: ScheduleKind = "dora"
    colocated: bool = False
    migration: bool = True
    rebalance_seconds: float = 10.0
    memory_threshold: float = 0.95
    fill_older: bool = False
    longest_first: bool = False
    adapters: bool = False

    @property
    def roams(self) -> bool:
        """Whether trajectories go on under whatever version their worker hosts."""
        return self.kind == "partial"

    @property
    def moves(self) -> bool:
        """Whether requests move so that workers come free for another version."""
        return self.migration and not (self.roams or self.adapters)

    @property
    def fills(self) -> bool:
        """Whether groups start under an older version where its worker has idle slots."""
        return self.fill_older and self.kind == "dora" and not self.adapters

    @property
    def pauses(self) -> bool:
        """Whether generation stops while a step is trained."""
        return self.colocated and self.roams

    @property
    def whole(self) -> bool:
        """Whether a batch is admitted at once, be there room for it or not."""
        return self.kind == "one-step-off"

    def admissible(self, state: RunState, steps_left: int) -> int:
        """How many groups may start now; with `whole`, a batch or none."""
        groups = state.admissible(steps_left)
        if not self.whole:
            return groups
        size = state.window.groups_per_step
        ready = state.outstanding_total <= size and not state.live_versions()
        return min(groups, size) if ready else 0


class Pauses:
    """Who generates while a step is trained on the same devices.

    A worker is told to pause once a step, and to go on once it is over. After a restart both
    commands may be repeated.
    """

    def __init__(self) -> None:
        self._training = -1  # version at which a step is being trained; -1: none is
        self._told: dict[str, tuple[str, int]] = {}  # incarnation, and the step it pauses for

    def on_trainer_status(self, trainer: Status) -> None:
        """A status of the trainer."""
        self._training = trainer.version if trainer.state == "training" else -1

    def due(self, workers: Iterable[WorkerState], newest: int) -> tuple[list[Status], list[Status]]:
        """Who is to pause, and who is to go on under the version that it hosts."""
        training = newest if self._training == newest else -1
        pause, resume = [], []
        for worker in workers:
            status = worker.status
            if status.state in GONE or not worker.confirmed or status.version < 0:
                continue
            known = self._told.get(status.process)
            if known == (status.incarnation, training):
                continue
            if training >= 0:
                pause.append(status)
            elif worker.switching_to is None and status.version == newest:
                resume.append(status)
        return pause, resume

    def on_command(self, command: Command, newest: int) -> None:
        """A pause or a switch is in the log."""
        if command.kind == "pause":
            self._told[command.worker] = command.incarnation, newest
        elif command.kind == "switch":
            self._told[command.worker] = command.incarnation, -1
