"""The section `[schedule]`: what is generated when, and by which worker.

A schedule that does not fit its window is refused: `sync` needs a staleness of 0, `one-step-off`
of 1.
"""

from typing import Annotated, Literal

from pydantic import Field

from dora.config.section import Section


class ScheduleSection(Section):
    """Schedule of rollout and training, and the balancing of work over workers."""

    kind: Literal["dora", "sync", "one-step-off", "partial"] = "dora"
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
