"""Training samples and how a batch of them is cut into micro-batches.

Invariant: a micro-batch carries a weight per token that already holds the denominator of the whole
optimizer batch. Samples that cannot contribute a gradient are left out of the micro-batches but
stay in the denominators, so leaving them out changes nothing but the time it takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dora.config_training import LossSection
from dora.consumers.advantages import group_advantages
from dora.errors import RecordError
from dora.schemas.records import Trajectory, unpack_logprobs, unpack_tokens

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready for training."""

    trajectory_id: str
    version: int
    token_ids: npt.NDArray[np.int32]
    """[n]: prompt, response, and what the environment added."""
    positions: Ints
    """[m]: indices in `token_ids` of the tokens that the policy generated."""
    behaviour: Floats
    """[m]: recorded log-probabilities (nats) of those tokens."""
    reward: float
    advantage: float
    truncated: bool
    """Cut at the response limit (finish reason `length`)."""

    @property
    def generated(self) -> int:
        """Number of generated tokens, m."""
        return len(self.positions)


def sample_of(trajectory: Trajectory, advantage: float) -> Sample:
    """The training sample of a scored trajectory.

    Raises RecordError if the trajectory has no reward, or a generated token has nothing before it
    that it could be predicted from.
    """
    if trajectory.reward is None:
        raise RecordError(f"trajectory {trajectory.trajectory_id} has no reward")
    mask = np.frombuffer(trajectory.mask, dtype=np.uint8)
    positions = np.flatnonzero(mask).astype(np.int64)
    if len(positions) and positions[0] == 0:
        raise RecordError(
            f"trajectory {trajectory.trajectory_id} starts with a generated token",
            hint="A response needs at least one prompt token before it.",
        )
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        version=trajectory.policy_version,
        token_ids=unpack_tokens(trajectory.token_ids),
        positions=positions,
        behaviour=unpack_logprobs(trajectory.logprobs)[positions],
        reward=trajectory.reward,
        advantage=advantage,
        truncated=trajectory.finish_reason == "length",
    )


def group_samples(trajectories: Sequence[Trajectory], settings: LossSection) -> list[Sample]:
    """The samples of one complete group, in the order given, with their advantages."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if len(rewards) != len(trajectories):
        missing = next(t.trajectory_id for t in trajectories if t.reward is None)
        raise RecordError(f"trajectory {missing} has no reward")
    advantages = group_advantages(rewards, divide_by_std=settings.advantage_std)
    return [sample_of(t, float(a)) for t, a in zip(trajectories, advantages, strict=True)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward and backward pass; N is the number of their generated tokens."""

    samples: tuple[int, ...]
    """[rows]: index in the optimizer batch of each row's sample."""
    token_ids: Ints
    """[rows, width], padded on the right with 0. Causal attention keeps padding on the right from
    every real token, so no mask is needed."""
    columns: Ints
    """[c]: sorted columns whose logits predict a generated token of any row."""
    rows: Ints
    """[N]: row of each generated token."""
    column_index: Ints
    """[N]: index into `columns` of the position that predicts it."""
    targets: Ints
    """[N]: the tokens."""
    behaviour: Floats
    """[N]: recorded log-probabilities."""
    advantages: Floats
    """[N]."""
    weights: Floats
    """[N]: normalisation weights."""


def contributes(sample: Sample, settings: LossSection) -> bool:
    """Whether the sample can have a gradient at all."""
    if sample.generated == 0 or (settings.mask_overlong and sample.truncated):
        return False
    return sample.advantage != 0.0 or settings.kl_coefficient > 0


def token_weights(
    samples: Sequence[Sample], settings: LossSection, constant_length: int
) -> list[float]:
    """Weight of each generated token of each sample (equal within a sample).

    - `token`: 1 / all tokens of the batch (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence`: 1 / (sequences * tokens of the sequence) (GRPO, arXiv 2402.03300, eq. 3).
    - `constant`: 1 / (sequences * constant_length) (Dr. GRPO, arXiv 2503.20783, section 3.2; with
      T_max as the constant also LongCat-Flash-Thinking, arXiv 2509.18883).

    Under `mask_overlong` (DAPO, section 3.4) trajectories that were cut have weight 0 and do not
    count in the denominators.
    """
    counted = [not (settings.mask_overlong and s.truncated) for s in samples]
    sequences = max(sum(counted), 1)
    tokens = max(sum(s.generated for s, c in zip(samples, counted, strict=True) if c), 1)
    weights = []
    for sample, count in zip(samples, counted, strict=True):
        if not count or not sample.generated:
            weights.append(0.0)
        elif settings.normalization == "token":
            weights.append(1.0 / tokens)
        elif settings.normalization == "sequence":
            weights.append(1.0 / (sequences * sample.generated))
        else:
            weights.append(1.0 / (sequences * constant_length))
    return weights


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped into micro-batches of at most `budget` tokens, padding included.

    Longest first, ties by index: deterministic, and rows of a micro-batch are of similar length.
    A sequence longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        width = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def assemble(
    samples: Sequence[Sample] | Mapping[int, Sample],
    indices: Sequence[int],
    weights: Sequence[float] | Mapping[int, float],
) -> MicroBatch:
    """The micro-batch whose rows are the samples at `indices`; both others are looked up there."""
    chosen = [samples[i] for i in indices]
    width = max(len(s.token_ids) for s in chosen)
    token_ids = np.zeros((len(chosen), width), dtype=np.int64)
    for row, sample in enumerate(chosen):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
    counts = [s.generated for s in chosen]
    positions = np.concatenate([s.positions for s in chosen])
    rows = np.repeat(np.arange(len(chosen), dtype=np.int64), counts)
    columns, column_index = np.unique(positions - 1, return_inverse=True)
    return MicroBatch(
        samples=tuple(indices),
        token_ids=token_ids,
        columns=columns.astype(np.int64),
        rows=rows,
        column_index=column_index.astype(np.int64),
        targets=token_ids[rows, positions],
        behaviour=np.concatenate([s.behaviour for s in chosen]).astype(np.float32),
        advantages=np.repeat(_floats([s.advantage for s in chosen]), counts),
        weights=np.repeat(_floats([weights[i] for i in indices]), counts),
    )


def _floats(values: list[float]) -> npt.NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def micro_batches(
    samples: Sequence[Sample],
    budget: int,
    weights: Sequence[float] | None = None,
    indices: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Cut `samples` (or those at `indices`) into micro-batches of at most `budget` tokens.

    Samples without generated tokens are left out. Without `weights`, all weights are 1 (scoring).
    """
    candidates = range(len(samples)) if indices is None else indices
    chosen = [i for i in candidates if samples[i].generated]
    weights = [1.0] * len(samples) if weights is None else weights
    packed = pack([len(samples[i].token_ids) for i in chosen], budget)
    return [assemble(samples, [chosen[i] for i in batch], weights) for batch in packed]


def split_groups(groups: Sequence[T], updates: int) -> list[list[T]]:
    """The groups of each of a step's optimizer updates: equal parts, in order."""
    size, rest = divmod(len(groups), updates)
    if rest or not size:
        raise ValueError(f"{len(groups)} groups do not divide into {updates} updates")
    return [list(groups[u * size : (u + 1) * size]) for u in range(updates)]
