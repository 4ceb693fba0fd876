"""A training step over groups that come one by one.

Invariant: the weights after it depend on the weights before it and on the groups in their order
alone, not on when they came: micro-batches hold samples of one group, and where a step's optimizer
batches end follows from the groups so far. The gradient is that of the same groups in one batch, up
to rounding: the denominator of the normalisation is known last, so gradients are added up without
it and divided by it before they are clipped.
"""

from collections.abc import Callable, Sequence

import torch

from dora.config import Config
from dora.consumers.batches import (
    Sample,
    assemble,
    contributes,
    denominator,
    ends_part,
    micro_batches,
    unit_weights,
)
from dora.consumers.metrics import LearningSums, Mismatch, drift_of
from dora.consumers.passes import Passes
from dora.errors import PolicyError

Observe = Callable[[Sequence[Sample]], None]


class Accumulation:
    """One streamed step at `version`, whose first optimizer update is the run's `update`-th.

    `observe` is called with each group while the weights are those of the step's start.
    """

    def __init__(
        self,
        passes: Passes,
        config: Config,
        *,
        version: int,
        update: int,
        mismatch: Mismatch,
        observe: Observe,
    ) -> None:
        self._passes = passes
        self._config = config
        self._loss = config.trainer.loss
        self._constant_length = self._loss.constant_length or config.rollout.max_new_tokens
        self.version = version
        self._update = update
        self._mismatch = mismatch
        self._observe = observe
        self._rate = passes.set_learning_rate(update)
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
        partitioned = self._passes.partitioned and self._shortest is not None
        return not self._sums.norms and not partitioned

    def add(self, group: Sequence[Sample]) -> None:
        """Add the gradient of a group, and update where its optimizer batch is complete."""
        if self._part == 0:
            self._observe(group)
        weights = unit_weights(group, self._loss, self._constant_length)
        chosen = [i for i, sample in enumerate(group) if contributes(sample, self._loss)]
        budget = self._config.trainer.max_tokens_per_micro_batch
        for batch in micro_batches(group, budget, weights, chosen):
            # The proximal policy is that of the step's start.
            proximal = None if self._start is None else self._passes.score(batch, self._start)
            parts, logprobs = self._passes.learn(batch, proximal, last=False)
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
            self._start = self._passes.weights()
        if self._shortest is not None:
            if self._passes.partitioned:
                # Which pass is the last one is known only now: one more, without weight.
                idle = assemble([self._shortest], [0], [0.0])
                self._passes.learn(idle, None, last=True)
            divisor = denominator(self._open, self._loss)
            self._rate = self._passes.set_learning_rate(self._update + self._part)
            self._sums.norms.append(self._passes.step(self._update + self._part, divisor))
            self._sums.loss += self._part_loss / divisor
        self._part += 1
        self._open = []
        self._part_loss = 0.0
        self._shortest = None
