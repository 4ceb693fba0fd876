"""Forward and backward passes over micro-batches, the optimizer's step after them, and the sums
that a step's metrics are made of.

Passes add to gradients and change nothing else. Weights change in `MicroBatchRunner.step` alone,
and not if the gradient is infinite or no number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dora.config import Config
from dora.consumers.learner.batches import (
    MicroBatch,
    Sample,
    assemble,
    contributes,
    denominator,
    ends_part,
    learning_rate,
    micro_batches,
    unit_weights,
)
from dora.consumers.learner.learner import diverged
from dora.consumers.learner.losses import LossParts, TokenTerms, policy_loss
from dora.consumers.learner.model import PolicyModel, model_inputs
from dora.errors import PolicyError


@dataclass(slots=True)
class LearningSums:
    """Sums over the tokens that went through forward and backward passes, so that no mean depends
    on how the batch was cut."""

    OVER_RANKS: ClassVar = ("loss", "clipped", "kl", "surprise", "tokens")
    """What ranks add up; the norms are equal on all of them already."""

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

    OVER_RANKS: ClassVar = ("own_sum", "own_kl", "own_tokens", "older_sum", "older_tokens")
    """What ranks add up; of `own_max` they take the largest."""

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


class MicroBatchRunner:
    """Runs micro-batches through `engine`, DeepSpeed's, on `device`.

    The starting policy, for the KL penalty, is `reference` or the `base` weights in the policy's
    own model. `plain`: DeepSpeed keeps parameters and gradients as they are. `progress` is called
    after each pass.
    """

    def __init__(
        self,
        engine: Any,
        config: Config,
        device: torch.device,
        *,
        reference: PolicyModel | None,
        base: dict[str, torch.Tensor] | None,
        stage: int,
        plain: bool,
        packed: bool,
        progress: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._loss = config.trainer.loss
        self._device = device
        self._reference = reference
        self._base = base
        self._stage = stage
        self._plain = plain
        self.packed = packed
        """Whether micro-batches are packed."""
        self._progress = progress
        self._world = torch.distributed.get_world_size()

    def configure(
        self,
        config: Config,
        reference: PolicyModel | None,
        base: dict[str, torch.Tensor] | None,
    ) -> None:
        """Go on with the loss, the optimizer and the starting policy of `config`."""
        self._config, self._loss = config, config.trainer.loss
        self._reference, self._base = reference, base

    def set_learning_rate(self, update: int) -> float:
        """Set the rate of the run's `update`-th optimizer update; returns it."""
        trainer = self._config.trainer
        total = trainer.steps * trainer.updates_per_step
        rate = learning_rate(trainer.optimizer, update, total)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def score(
        self, batch: MicroBatch, weights: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Log-probabilities [N] under the current policy, or other `weights`; no gradient."""
        module = self._engine if self._stage == 3 else self._engine.module

        def with_weights(**inputs: object) -> torch.Tensor:
            return torch.func.functional_call(module, weights, (), inputs)

        with torch.no_grad():
            scores = self._forward(module if weights is None else with_weights, batch)
        self._progress()
        return scores

    def learn(
        self, batch: MicroBatch, proximal: torch.Tensor | None, *, last: bool
    ) -> tuple[LossParts, torch.Tensor]:
        """Add the gradient of a micro-batch, the `last` one before `step` or not; returns its loss
        and its log-probabilities [N]. `proximal` are those at the step's start; None: the same."""
        self._engine.set_gradient_accumulation_boundary(last)
        logprobs = self._forward(self._engine, batch)
        parts = policy_loss(logprobs, self._terms(batch, logprobs, proximal), self._loss)
        # DeepSpeed averages over ranks; the weights already hold the whole batch's denominator.
        self._engine.backward(parts.loss * self._world if self._world > 1 else parts.loss)
        self._progress()
        return parts, logprobs.detach()

    def step(self, update: int, divisor: int = 1) -> float:
        """Take the optimizer's step along the gradient that was added up, divided by `divisor` (1
        under ZeRO-3 and float16); returns its norm before clipping.

        Raises PolicyError, naming the run's `update`, if the norm is infinite or no number.
        """
        if divisor != 1:
            self._divide(divisor)
        norm = self._clip() if self._plain else 0.0
        self._check_finite(norm, update)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        if divisor != 1 and self._scales:
            self._engine.optimizer.override_loss_scale(1.0)
        if not self._plain:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
            self._check_finite(norm, update)
        return norm

    @property
    def _scales(self) -> bool:
        return hasattr(self._engine.optimizer, "override_loss_scale")

    @property
    def partitioned(self) -> bool:
        """Whether gradients lie in ZeRO's buffers: the last pass before `step` has to be marked as
        such, and they cannot be dropped."""
        return bool(self._stage)

    def zero_grad(self) -> None:
        """Forget the gradient added up since the last `step`, where it is not partitioned."""
        self._engine.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights that training changes, for `score`."""
        named = self._engine.module.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def _forward(self, module: Callable[..., torch.Tensor], batch: MicroBatch) -> torch.Tensor:
        sampling = self._config.rollout
        return module(
            **model_inputs(batch, self._device),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def _terms(
        self, batch: MicroBatch, logprobs: torch.Tensor, proximal: torch.Tensor | None
    ) -> TokenTerms:
        reference = None
        if self._loss.kl_coefficient == 0:
            pass  # there may be one, for other steps
        elif self._base is not None:
            reference = self.score(batch, self._base)
        elif self._reference is not None:
            with torch.no_grad():
                reference = self._forward(self._reference, batch)
        if self._loss.importance_cap is not None and proximal is None:
            proximal = logprobs.detach()
        as_tensor = torch.from_numpy
        return TokenTerms(
            behaviour=as_tensor(batch.behaviour).to(self._device),
            advantages=as_tensor(batch.advantages).to(self._device),
            weights=as_tensor(batch.weights).to(self._device),
            sequences=as_tensor(batch.rows).to(self._device),
            proximal=proximal,
            reference=reference,
        )

    def _divide(self, divisor: int) -> None:
        if self._scales:
            # ZeRO keeps gradients in buffers of its own, and divides them by the loss scale before
            # it takes their norm and clips them.
            self._engine.optimizer.override_loss_scale(float(divisor))
            return
        if self._stage:  # BF16_Optimizer has no loss scale
            gradients = self._engine.optimizer.get_grads_for_norm(for_clipping=True)
        else:
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, float(divisor))

    def _check_finite(self, norm: float, update: int) -> None:
        """Stop before weights that are no numbers are published. float16 scales its loss and skips
        such updates itself."""
        if not math.isfinite(norm) and self._config.policy.dtype != "float16":
            step = update // self._config.trainer.updates_per_step + 1
            raise diverged(step, f"the gradient of optimizer update {update} is {norm}")

    def _clip(self) -> float:
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        limit = self._config.trainer.optimizer.gradient_clip
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


class StreamedStep:
    """A training step at `version` over groups that come one by one; its first optimizer update is
    the run's `update`-th. `observe` is called with each group while the weights are those of the
    step's start.

    The weights after it depend on the weights before it and on the groups in their order alone, not
    on when they came: micro-batches hold samples of one group, and where optimizer batches end
    follows from the groups so far. The gradient is that of the same groups in one batch, up to
    rounding: the denominator of the normalisation is known last, so gradients are added up without
    it and divided by it before they are clipped.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        config: Config,
        *,
        version: int,
        update: int,
        mismatch: Mismatch,
        observe: Callable[[Sequence[Sample]], None],
    ) -> None:
        self._runner = runner
        self._config = config
        self._loss = config.trainer.loss
        self._constant_length = self._loss.constant_length or config.rollout.max_new_tokens
        self.version = version
        self._update = update
        self._mismatch = mismatch
        self._observe = observe
        self._rate = runner.set_learning_rate(update)
        self._sums = LearningSums()
        self._part = 0
        self._open: list[Sample] = []  # of the optimizer batch that is not complete
        self._part_loss = 0.0
        self._shortest: Sample | None = None  # of those with a gradient in the open batch
        self._groups = 0
        self._start: dict[str, torch.Tensor] | None = None
        self.samples: list[Sample] = []

    @property
    def droppable(self) -> bool:
        """Whether the weights are those of the step's start, and its gradient can be dropped."""
        partitioned = self._runner.partitioned and self._shortest is not None
        return not self._sums.norms and not partitioned

    def add(self, group: Sequence[Sample]) -> None:
        """Add the gradient of a group, and update where its optimizer batch is complete."""
        if self._part == 0:
            self._observe(group)
        weights = unit_weights(group, self._loss, self._constant_length)
        chosen = [i for i, sample in enumerate(group) if contributes(sample, self._loss)]
        budget = self._config.trainer.max_tokens_per_micro_batch
        for batch in micro_batches(group, budget, weights, chosen, packed=self._runner.packed):
            # The proximal policy is that of the step's start.
            proximal = None if self._start is None else self._runner.score(batch, self._start)
            parts, logprobs = self._runner.learn(batch, proximal, last=False)
            self._part_loss += self._sums.add(parts, logprobs)
            if self._part == 0:
                drift_of(batch, logprobs, dict(enumerate(group)), self.version, self._mismatch)
        held = [] if self._shortest is None else [self._shortest]
        passed = [*held, *(group[i] for i in chosen)]
        self._shortest = min(passed, key=lambda s: len(s.token_ids), default=None)
        self.samples += group
        self._open += group
        self._groups += 1
        sizes = self._config.window
        tokens = sum(sample.generated for sample in self.samples)
        if ends_part(
            self._part,
            self._config.trainer.updates_per_step,
            (self._groups, sizes.groups_per_step),
            (tokens, sizes.tokens_per_step),
        ):
            self._end_part()

    def finish(self) -> dict[str, float]:
        """Make the last optimizer update; returns the step's metrics."""
        if not self.samples:
            raise PolicyError("a streamed step ends without a group")
        if self._open:
            self._end_part()
        metrics = {"learning_rate": self._rate}
        metrics |= self._sums.metrics(self._loss.kl_coefficient > 0)
        return metrics | self._mismatch.metrics()

    def _end_part(self) -> None:
        more = self._part + 1 < self._config.trainer.updates_per_step
        if more and self._start is None and self._loss.importance_cap is not None:
            self._start = self._runner.weights()
        if self._shortest is not None:
            if self._runner.partitioned:
                # Which pass is the last one is known only now: one more, without weight.
                idle = assemble([self._shortest], [0], [0.0], packed=self._runner.packed)
                self._runner.learn(idle, None, last=True)
            divisor = denominator(self._open, self._loss)
            self._rate = self._runner.set_learning_rate(self._update + self._part)
            self._sums.norms.append(self._runner.step(self._update + self._part, divisor))
            self._sums.loss += self._part_loss / divisor
        self._part += 1
        self._open = []
        self._part_loss = 0.0
        self._shortest = None
