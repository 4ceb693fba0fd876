"""A learner's checkpoint: DeepSpeed's files, and the count that its schedule goes by.

Invariant: what is loaded was written by as many ranks at the same ZeRO stage, whole. Frozen weights
(the base model under an adapter) never change and are no part of it.
"""

import json
import pickle
from pathlib import Path
from typing import Any

from dora.errors import PolicyError, WeightsError

_TAG = "state"
_COUNTS = "learner.json"


def save(engine: Any, directory: Path, updates: int, world: int, stage: int) -> None:
    """Write this rank's part to `directory`; all ranks call it, rank 0 writes the count."""
    engine.save_checkpoint(
        str(directory), tag=_TAG, save_latest=False, exclude_frozen_parameters=_frozen(engine)
    )
    if engine.global_rank == 0:
        counts = {"updates": updates, "world": world, "zero_stage": stage}
        (directory / _COUNTS).write_text(json.dumps(counts) + "\n")


def load(engine: Any, directory: Path, world: int, stage: int) -> int:
    """Restore what `save` wrote; returns the number of updates.

    Raises WeightsError if it is missing or cut, PolicyError if it was written with another ZeRO
    stage or number of ranks.
    """
    try:
        counts = json.loads((directory / _COUNTS).read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"checkpoint {directory} cannot be read: {error}") from error
    now = {"world": world, "zero_stage": stage}
    if any(counts.get(key) != value for key, value in now.items()):
        raise PolicyError(
            f"checkpoint {directory} was written with {counts.get('world')} ranks and ZeRO "
            f"stage {counts.get('zero_stage')}, not with {world} and {stage}",
            hint="Start the trainer as before, or remove the checkpoints: the steps are then "
            "redone from the log.",
        )
    try:
        loaded, _ = engine.load_checkpoint(
            str(directory),
            tag=_TAG,
            load_module_strict=not _frozen(engine),
            load_lr_scheduler_states=False,
        )
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise WeightsError(f"checkpoint {directory} is damaged: {error}") from error
    if loaded is None:
        raise WeightsError(f"checkpoint {directory} is not complete")
    return int(counts["updates"])


def _frozen(engine: Any) -> bool:
    return any(not parameter.requires_grad for parameter in engine.module.parameters())
