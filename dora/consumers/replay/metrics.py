"""Which metrics of a step are the same when it is trained again, and how a replay compares them.

Every metric that a trainer records is in exactly one of the tables here. What is compared depends
on the logged batch, the weights and the optimizer's state alone, so a difference means that one of
these, or the program, has changed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OF_THE_BATCH = (
    "trajectories",
    "tokens",
    "reward_mean",
    "success_rate",
    "response_length_mean",
    "response_length_max",
    "truncated_fraction",
    "signal_fraction",
    "staleness_mean",
    "staleness_max",
    "mixed_version_share",
)
"""A function of the logged trajectories, the step's version and the loss's settings alone."""

OF_THE_TRAINING = (
    "learning_rate",
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "reference_kl",
    "logprob_drift_mean",
    "trained_tokens",
    "optimizer_updates",
)
"""A function of the batch, the weights before the step, the optimizer's state and the count of its
updates."""

NOT_COMPARED = {
    "logprob_mismatch_mean": "which weights of earlier versions the trainer still had depends on "
    "when it was started, and where it had none it took samples that happened to have arrived",
    "logprob_mismatch_max": "as logprob_mismatch_mean",
    "logprob_mismatch_kl": "as logprob_mismatch_mean",
    "idle_seconds": "a time",
    "train_seconds": "a time",
    "publish_seconds": "a time",
    "step_seconds": "a time",
    "wall_seconds": "a time",
    "streamed_seconds": "a time",
    "live_versions": "what was being generated meanwhile",
    "duplicates_ignored": "what else had arrived",
    "unscored_fraction": "what else had arrived",
    "held_out_version": "which evaluation was complete by then",
    "held_out_success_rate": "as held_out_version",
    "held_out_reward_mean": "as held_out_version",
    "redo_difference_max": "about a recovery, not about the step",
}
"""What a replay does not compare, and why."""

COMPARED = (*OF_THE_BATCH, *OF_THE_TRAINING)
"""In the order in which a cause comes before its effects."""

SIDE_BY_SIDE = (
    "learning_rate",
    "reward_mean",
    "loss",
    "grad_norm",
    "reference_kl",
    "entropy",
    "clip_fraction",
    "logprob_drift_mean",
)
"""What people are shown of a step; programs get everything that is compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Weights of a version that are not those that were announced."""

    version: int
    announced: str
    redone: str


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a replay left the record: the step (0: the starting model, or a checkpoint's version),
    the metric or `weights`, and both values."""

    step: int
    what: str
    recorded: float | str
    replayed: float | str
    largest: float | None = None
    """Of weights: the largest difference relative to the largest weight of its tensor; None where
    the announced weights are not stored any more."""
    tensor: str | None = None

    def __str__(self) -> str:
        if self.what != "weights":
            return f"step {self.step}: {self.what} was {self.recorded!r}, is {self.replayed!r}"
        whose = f"step {self.step}: the weights"
        text = f"{whose} had checksum {self.recorded}, have {self.replayed}"
        if self.largest is None:
            return text + "; by how much they differ is not known: the recorded ones are not stored"
        if self.tensor is None:
            return text + "; the values are equal"
        where = f"largest weight of its tensor, in {self.tensor}"
        return text + f"; the largest difference is {self.largest:.2g} of the {where}"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step as recorded and as replayed. `asked` is false for one that was redone only to get to
    those that were asked for. Metrics are those of COMPARED. `seconds` is its training alone."""

    step: int
    asked: bool
    trajectories: int
    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    recorded_checksum: str
    checksum: str
    seconds: float

    @property
    def differing(self) -> list[str]:
        """Names of the metrics that differ, causes first, and `weights` last."""
        both = [name for name in COMPARED if name in self.recorded and name in self.replayed]
        names = [name for name in both if not same(self.recorded[name], self.replayed[name])]
        return names + ["weights"] * (self.recorded_checksum != self.checksum)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step": self.step,
            "asked": self.asked,
            "trajectories": self.trajectories,
            "differing": self.differing,
            "recorded": dict(self.recorded),
            "replayed": dict(self.replayed),
            "recorded_checksum": self.recorded_checksum,
            "checksum": self.checksum,
            "train_seconds": self.seconds,
        }


def same(left: float, right: float) -> bool:
    """Whether two metrics are the same number; no number is the same as no number."""
    return left == right or (math.isnan(left) and math.isnan(right))


def compared(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `metrics` that are compared, causes first."""
    return {name: float(metrics[name]) for name in COMPARED if name in metrics}
