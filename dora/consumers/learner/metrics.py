"""Metrics of a training step, as sums that add up over micro-batches and ranks.

Invariant: every mean is a sum over tokens divided by their number, so it does not depend on how the
batch was cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dora.consumers.learner.batches import MicroBatch, Sample
from dora.consumers.learner.losses import LossParts


@dataclass(slots=True)
class LearningSums:
    """Sums over the tokens that went through forward and backward passes."""

    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    surprise: float = 0.0
    tokens: float = 0.0
    norms: list[float] = field(default_factory=list)

    def add(self, parts: LossParts, logprobs: torch.Tensor) -> float:
        """Add one micro-batch, without its loss, which is returned."""
        sums = torch.stack(
            [parts.loss.detach().float(), parts.clipped.float(), parts.kl, -logprobs.sum()]
        ).tolist()
        self.clipped += sums[1]
        self.kl += sums[2]
        self.surprise += sums[3]
        self.tokens += len(logprobs)
        return float(sums[0])

    def pack(self) -> list[float]:
        """The sums, for adding up over ranks; norms are equal on all ranks already."""
        return [self.loss, self.clipped, self.kl, self.surprise, self.tokens]

    def unpack(self, values: Sequence[float]) -> None:
        """Set what `pack` gave."""
        self.loss, self.clipped, self.kl, self.surprise, self.tokens = values

    def metrics(self, with_kl: bool) -> dict[str, float]:
        """`loss` and `grad_norm` (before clipping) are means over the updates taken, 0 without one.
        `entropy` is the mean of -log p of the sampled tokens, an estimate of the policy's."""
        updates, tokens = max(len(self.norms), 1), max(self.tokens, 1.0)
        result = {
            "loss": self.loss / updates,
            "grad_norm": sum(self.norms) / updates,
            "clip_fraction": self.clipped / tokens,
            "entropy": self.surprise / tokens,
            "trained_tokens": self.tokens,
            "optimizer_updates": float(len(self.norms)),
        }
        if with_kl:
            result["reference_kl"] = self.kl / tokens
        return result


@dataclass(slots=True)
class Mismatch:
    """Differences between the trainer's and the engine's log-probabilities of the same tokens."""

    own_sum: float = 0.0
    own_kl: float = 0.0
    own_max: float = 0.0
    own_tokens: float = 0.0
    older_sum: float = 0.0
    older_tokens: float = 0.0

    def add_own(self, differences: npt.NDArray[np.float32]) -> None:
        """Tokens scored under the weights that generated them: trainer - engine, in nats."""
        if not len(differences):
            return
        wide = differences.astype(np.float64)
        self.own_sum += float(np.abs(wide).sum())
        self.own_kl += float((np.exp(np.minimum(wide, 20.0)) - wide - 1.0).sum())
        self.own_max = max(self.own_max, float(np.abs(wide).max()))
        self.own_tokens += len(wide)

    def add_older(self, differences: npt.NDArray[np.float32]) -> None:
        """Tokens of older versions: the difference includes what training changed since."""
        self.older_sum += float(np.abs(differences.astype(np.float64)).sum())
        self.older_tokens += len(differences)

    def pack(self) -> list[float]:
        """The sums, for adding up over ranks (`own_max` is no sum)."""
        return [
            self.own_sum,
            self.own_kl,
            self.own_tokens,
            self.older_sum,
            self.older_tokens,
        ]

    def unpack(self, values: Sequence[float]) -> None:
        """Set what `pack` gave."""
        (
            self.own_sum,
            self.own_kl,
            self.own_tokens,
            self.older_sum,
            self.older_tokens,
        ) = values

    def metrics(self) -> dict[str, float]:
        """Mean and largest absolute difference (nats) and the k3 estimate of KL(engine || trainer)
        over tokens scored under their own version; `logprob_drift_mean` over older ones."""
        result = {}
        if self.own_tokens:
            result["logprob_mismatch_mean"] = self.own_sum / self.own_tokens
            result["logprob_mismatch_max"] = self.own_max
            result["logprob_mismatch_kl"] = self.own_kl / self.own_tokens
        if self.older_tokens:
            result["logprob_drift_mean"] = self.older_sum / self.older_tokens
        return result


def drift_of(
    batch: MicroBatch,
    logprobs: torch.Tensor,
    samples: Mapping[int, Sample],
    version: int,
    mismatch: Mismatch,
) -> None:
    """Add the differences (trainer now - engine then) of a micro-batch's older samples, those of
    several versions left out."""
    chosen = [samples[i] for i in batch.samples]
    older = np.array([s.version != version and not s.mixed for s in chosen])[batch.rows]
    differences = logprobs.float().cpu().numpy() - batch.behaviour
    mismatch.add_older(differences[older])
