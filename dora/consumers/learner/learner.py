"""What trainer, publication and recovery need of a learner, and which one a configuration means.

The emulated learner is created without importing torch or DeepSpeed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dora.config import Config
from dora.consumers.learner.batches import Sample
from dora.errors import PolicyError
from dora.weights.models import model_directory

if TYPE_CHECKING:
    from dora.consumers.learner.ranks import Leader
    from dora.log.trained_records import Place

Floats = npt.NDArray[np.float32]


def diverged(step: int, what: str) -> PolicyError:
    """The error of a step that gives `what` is no number: started again, it would do so again."""
    return PolicyError(
        f"training diverged in step {step}: {what}; nothing of this step is published",
        hint="Lower trainer.optimizer.learning_rate or trainer.optimizer.gradient_clip, or set "
        "trainer.loss.clip_dual and trainer.loss.importance_cap, and start the same command again: "
        "it goes on from the step before with the new values.",
    )


class Learner(Protocol):
    """One policy in training. A step is one `update`, or the same groups in the same order through
    `begin`, `add`, ..., `finish`: with `trainer.streamed` both give the same weights, bit for bit
    where training is deterministic."""

    updates: int
    """Optimizer updates that the steps so far had room for; the learning rate depends on it."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the policy knows."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""

    @property
    def adapter_settings(self) -> Mapping[str, Any] | None:
        """Configuration of the adapter that is trained; None where all weights are."""

    def update(
        self,
        groups: Sequence[Sequence[Sample]],
        version: int,
        probes: Sequence[Sample] = (),
        places: "Sequence[Sequence[Place]]" = (),
    ) -> dict[str, float]:
        """Train on one step's groups, in this order, at policy version `version`; returns the
        step's metrics. `probes` are further samples of the current version, for the comparison of
        engine and trainer; `places` says where each sample lies in the trajectories topic."""

    def begin(self, version: int) -> None:
        """Begin a streamed step at `version`. One that was begun and not finished is dropped, which
        is a PolicyError once it has changed the weights (or has gradients, under ZeRO)."""

    def add(self, group: Sequence[Sample]) -> None:
        """Compute on one group of the step that was begun."""

    def finish(self) -> dict[str, float]:
        """End the streamed step with the groups added; returns the step's metrics."""

    def sequence_logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Plain log-probabilities [n - 1] of each token after the first."""

    def export_state(self) -> dict[str, Any]:
        """The policy's tensors by name."""

    def weights_checksum(self) -> str:
        """Checksum of the weights."""

    def configure(self, config: Config) -> None:
        """Train the next step with the values that `config` has for keys that may change between
        two starts (`dora.config.changes`); the others are as at the start."""

    def save_checkpoint(self, directory: Path) -> None:
        """Write everything needed to go on training to `directory`, which must exist."""

    def load_checkpoint(self, directory: Path, *, updates: int | None = None) -> None:
        """Restore what `save_checkpoint` wrote; with `updates` the count of optimizer updates, on
        which the learning rate depends, goes on from that instead."""


def starting_model(config: Config) -> Path:
    """The directory of the starting policy, checked where the learner computes with it; raises
    PolicyError as `model_directory` does."""
    if config.trainer.engine == "emulated":
        return Path(config.policy.model)
    return model_directory(config.policy.model)


def create_learner(
    config: Config,
    model_dir: Path,
    *,
    progress: Callable[[], None] = lambda: None,
    ranks: "Leader | None" = None,
) -> Learner:
    """The learner of `trainer.engine`, starting from the policy in `model_dir`.

    `progress` is called during long steps, for heartbeats. Raises PolicyError if the policy is
    unusable.
    """
    if config.trainer.engine == "emulated":
        from dora.consumers.learner.emulated_learner import EmulatedLearner

        return EmulatedLearner(config, progress=progress)

    from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner

    return DeepSpeedLearner(model_dir, config, progress=progress, ranks=ranks)
