"""What a replay has to train: which steps, from where, and whether the log still holds them.

A plan is made only if every trajectory of its steps is in the log and the checkpoint that it begins
at is intact. Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.consumers.trainer.checkpoints import Checkpoints, starting_checkpoint
from dora.errors import RunError, UsageError
from dora.log.retention import deleted, span
from dora.log.run_log import RunLog
from dora.schemas.records import Step

_PLACES = ("run.directory", "weights.store")
_FIXED = {
    "trainer.engine": "another trainer has weights of another kind",
    "trainer.ranks": "a replay is one process",
}


@dataclass(frozen=True, slots=True)
class Base:
    """Weights that a replay begins with: those of `version`, in the checkpoint at `path`; what the
    run began with where `checkpoint` is None, its model where `path` is None too."""

    version: int
    checkpoint: str | None
    path: Path | None
    expected: str | None
    """Checksum that the log gives these weights; None where it does not."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Train `steps` from `base`; those from step `first` on were asked for. `passed_over` says
    which checkpoints could not be used, and why."""

    base: Base
    first: int
    steps: Sequence[Step]
    passed_over: tuple[str, ...] = ()


def check_sets(sets: Sequence[str]) -> bool:
    """Whether `sets` (`section.key=value`) ask for another training, not just for other paths.
    UsageError, naming the key, for one that logged data cannot follow."""
    changes = False
    for text in sets:
        key = text.partition("=")[0].strip()
        if key in _FIXED:
            raise UsageError(f"--set {key}: {_FIXED[key]}")
        if key.startswith("trainer."):
            changes = True
        elif key not in _PLACES:
            raise UsageError(
                f"--set {key}: the logged trajectories were made with the recorded value, and a "
                "replay cannot make others",
                hint="A replay can try other values of trainer.* (the loss, the optimizer, updates "
                f"per step), and be told where files lie: {', '.join(_PLACES)}.",
            )
    return changes


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """First and last of `A:B`, `A:`, `:B` or `A`; UsageError for anything else."""
    begin, colon, end = (part.strip() for part in text.partition(":"))
    if not all(part.isdecimal() or (not part and colon) for part in (begin, end or begin)):
        raise UsageError(f"--steps {text}: not of the form A:B, two step numbers")
    first = int(begin) if begin else None
    last = int(end) if end else (None if colon else first)
    if first is not None and last is not None and last < first:
        raise UsageError(f"--steps {text}: the first step comes after the last")
    return first, last


def make_plan(
    run: RunLog,
    config: Config,
    settings: ClusterSettings,
    first: int,
    last: int,
    *,
    checkpoints: bool = True,
    ranks: int = 1,
) -> ReplayPlan:
    """The plan for steps `first` to `last` of the run (see `RunLog.span`) in so many `ranks`, from
    the nearest checkpoint before them or, without `checkpoints`, from version 0. If `first` is the
    one after `last`, it is the plan for the way to version `last`.

    RunError if retention deleted what is needed (says what).
    """
    _check_continuous(run)
    passed_over: list[str] = []
    held = Checkpoints(config.run_directory / "checkpoints")
    if config.trainer.ranks != ranks and checkpoints:
        use = "one process" if ranks == 1 else f"{ranks} ranks"
        passed_over.append(f"checkpoints of {config.trainer.ranks} ranks are no use to {use}")
        checkpoints = False
    bases = [_starting(run, held), *(_on_disk(run, held) if checkpoints else ())]
    by_name = {base.checkpoint: base for base in bases if base.version < first and base.checkpoint}
    name, damaged = held.newest_intact(list(by_name))
    passed_over += [f"checkpoint {n} is not whole: {reason}" for n, reason in damaged.items()]
    base = bases[0] if name is None else by_name[name]
    needed = [step for step in run.steps if base.version < step.version_out <= last]
    _check_kept(run, settings, needed, bases, last)
    return ReplayPlan(base, first, needed, tuple(passed_over))


def _check_continuous(run: RunLog) -> None:
    for version, step in enumerate(run.steps):
        if step.version_in != version or step.version_out != version + 1:
            raise RunError(
                f"the ledger of run {run.run} is torn: a step from version {step.version_in} to "
                f"{step.version_out} stands where {version} to {version + 1} is due",
                hint=f"`dora audit {run.run}` says what is wrong with it.",
            )


def _starting(run: RunLog, held: Checkpoints) -> Base:
    policy = run.policies.get(0)
    name = starting_checkpoint(run.started, policy)
    expected = None if policy is None else policy.weights_checksum
    return Base(0, None, None if name is None else held.path(name), expected)


def _on_disk(run: RunLog, held: Checkpoints) -> list[Base]:
    """The checkpoints that are there, oldest first, whole or not."""
    there = held.names()
    return [
        Base(step.version_out, step.checkpoint, held.path(step.checkpoint), step.weights_checksum)
        for step in run.steps
        if step.checkpoint is not None and step.checkpoint in there
    ]


def _check_kept(
    run: RunLog,
    settings: ClusterSettings,
    needed: Sequence[Step],
    bases: Sequence[Base],
    last: int,
) -> None:
    """RunError if trajectories of the `needed` steps were deleted, with what is left to do."""
    named, damaged = deleted(run, settings, needed)
    if not damaged:
        return
    later = [base.version for base in bases if max(damaged) <= base.version < last]
    every = f"Without trajectories of step {span(damaged)} "
    hint = (
        f"{every}steps {min(later) + 1} to {last} can be replayed: --steps {min(later) + 1}:{last}."
        if later
        else f"{every}a replay can only begin at a checkpoint of version {max(damaged)} or later, "
        "and there is none."
    )
    raise RunError(f"run {run.run} cannot be replayed: retention deleted {named}", hint=hint)
