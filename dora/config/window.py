"""The sections `window` and `schedule`: how stale a group may get, and what is generated when."""

from typing import Annotated

from pydantic import Field

from dora.config.section import Positive, Section
from dora.core.scheduling.schedules import ScheduleKind


class WindowSection(Section):
    """The asynchrony window (staleness bound) and the sizes that it is made of."""

    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """K: a group of version v is trained at version n only if n - v <= K; 0 is synchronous."""
    groups_per_step: Positive = 32
    """B: groups in one training step."""
    group_size: Positive = 8
    """G: trajectories of one prompt, compared with one another."""
    tokens_per_step: Positive | None = None
    """Budget of generated tokens of one training step: it takes groups until the budget is
    reached, and at most groups_per_step; needs max_staleness of at least 1. With it at most
    max_staleness * groups_per_step + 1 groups are in flight, so choose groups_per_step about twice
    as large as what usually makes the budget. Without it each step takes groups_per_step."""

    @property
    def ring(self) -> int:
        """Slots of the version-partitioned topics: one for each live version and one to spare."""
        return self.max_staleness + 2


class ScheduleSection(Section):
    """Schedule of rollout and training, and the balancing of work over workers."""

    kind: ScheduleKind = "dora"
    """`dora`: several versions generate at once, each trajectory by one of them. For comparison:
    `sync` generates a batch, then trains it; `one-step-off` generates the next batch while one is
    trained; `partial` interrupts trajectories at each update and goes on with the new weights,
    which breaks consistency within a trajectory (C1) by design."""
    colocated: bool = False
    """Rollout and training take turns on the same devices: generation pauses while a step is
    trained. For `sync` and `partial`."""
    migration: bool = True
    """Move trajectories between workers of one version, so that few workers hold the long tail of
    an old version and the others go on to the newest."""
    rebalance_seconds: Annotated[float, Field(ge=0)] = 10.0
    """Seconds between periodic checks of the balance, besides those after each step and under
    memory pressure; 0 is never."""
    memory_threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of a worker's key-value cache in use above which trajectories move to other workers."""
    fill_older: bool = False
    """Let new groups start under an older live version where its last worker has idle slots, as far
    as the window allows. For `dora` with full weights; with `window.tokens_per_step` nothing is
    filled. Groups are then older when trained, and those of old versions finish later."""
    longest_first: bool = False
    """Start groups first whose prompts had long responses before. Needs prompts that repeat, and
    the task's data on the coordinator's machine."""
