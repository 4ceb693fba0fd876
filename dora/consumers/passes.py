"""Forward and backward passes of a policy over micro-batches, and the optimizer's step after them.

Invariant: passes add to gradients and change nothing else; weights change in `step` alone, and not
where the gradient is no number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dora.config import Config
from dora.consumers.batches import MicroBatch
from dora.consumers.losses import LossParts, TokenTerms, policy_loss
from dora.consumers.model import PolicyModel, model_inputs
from dora.consumers.schedule import learning_rate
from dora.errors import PolicyError


class Passes:
    """Passes through `engine`, DeepSpeed's, on `device`.

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
        self._progress = progress
        self._world = torch.distributed.get_world_size()

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
        if divisor != 1 and self._stage:
            self._engine.optimizer.override_loss_scale(1.0)
        if not self._plain:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
            self._check_finite(norm, update)
        return norm

    @property
    def partitioned(self) -> bool:
        """Whether gradients lie in ZeRO's buffers: the last pass before `step` has to be marked as
        such, and they cannot be dropped."""
        return bool(self._stage)

    def drop(self) -> None:
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
        if self._base is not None:
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
        if self._stage:
            # ZeRO keeps gradients in buffers of its own, and divides them by the loss scale before
            # it takes their norm and clips them.
            self._engine.optimizer.override_loss_scale(float(divisor))
            return
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, float(divisor))

    def _check_finite(self, norm: float, update: int) -> None:
        """Stop before weights that are no numbers are published. float16 scales its loss and skips
        such updates itself."""
        if not math.isfinite(norm) and self._config.policy.dtype != "float16":
            raise PolicyError(
                f"the gradient of optimizer update {update} is {norm}; nothing of this step "
                "is published",
                hint="Training diverged, or the model overflows. Lower "
                "trainer.optimizer.learning_rate, or set trainer.loss.clip_dual and "
                "trainer.loss.importance_cap; changed values need a new run.name.",
            )

    def _clip(self) -> float:
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        limit = self._config.trainer.optimizer.gradient_clip
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


def in_order(
    passes: Passes, batches: Sequence[MicroBatch], proximal: Sequence[torch.Tensor] | None
) -> Iterator[tuple[MicroBatch, LossParts, torch.Tensor]]:
    """Learn from all micro-batches of an optimizer update; yields each with its loss and
    log-probabilities."""
    for index, batch in enumerate(batches):
        old = None if proximal is None else proximal[index]
        yield batch, *passes.learn(batch, old, last=index == len(batches) - 1)
