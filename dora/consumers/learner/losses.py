"""Log-probabilities of generated tokens, and the policy-gradient loss as sums over tokens.

The loss of an optimizer batch is the sum of its micro-batches' losses. Everything that normalises
is a weight per token (`batches.py`), computed over the whole batch, so how the batch is cut into
micro-batches changes no gradient beyond rounding.

docs/losses.md has the formulas, their sources, and how TRL and verl differ.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dora.config.trainer import LossSection

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before the exponential, so that one absurd token cannot produce an
infinity (and 0 * inf = NaN) in a sum."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What the loss needs to know about N generated tokens of a micro-batch, all of shape [N]."""

    behaviour: torch.Tensor
    """Recorded log-probabilities (engine)."""
    advantages: torch.Tensor
    """Advantage of the token's trajectory."""
    weights: torch.Tensor
    """Normalisation weight; the weights of a whole optimizer batch carry its denominator."""
    sequences: torch.Tensor
    """int64: index of the token's trajectory, 0 .. number of sequences - 1."""
    proximal: torch.Tensor | None = None
    """The trainer's log-probabilities at the start of the step; with `importance_cap` only."""
    reference: torch.Tensor | None = None
    """Log-probabilities of the starting policy; with `kl_coefficient` > 0 only."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """The loss of a micro-batch: `loss` has a gradient, the rest is for metrics."""

    loss: torch.Tensor
    """Scalar: contribution to the batch's loss."""
    clipped: torch.Tensor
    """Scalar: number of tokens whose ratio was clipped."""
    kl: torch.Tensor
    """Scalar: sum over tokens of the k3 estimate to the reference; 0 without one."""


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 per element: non-negative estimate of KL(p || q) for tokens sampled from p,
    with d = log q - log p."""
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded.exp() - bounded - 1.0


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _over_sequences(values: torch.Tensor, sequences: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """Sum or mean over each sequence's tokens, handed back to each of its tokens: [N] -> [N]."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    sums = values.new_zeros(count).index_add(0, sequences, values)
    if mean:
        sums = sums / torch.bincount(sequences, minlength=count).clamp(min=1)
    return sums[sequences]


def policy_loss(logprobs: torch.Tensor, terms: TokenTerms, settings: LossSection) -> LossParts:
    """Loss of N tokens with the trainer's `logprobs` [N] (nats, with gradient).

    Raises ValueError if `importance_cap` or `kl_coefficient` is set and `terms` lacks what it
    needs.
    """
    advantages = terms.advantages
    old, weight = terms.behaviour, torch.ones_like(logprobs)
    if settings.importance_cap is not None:
        if terms.proximal is None:
            raise ValueError("importance_cap needs the proximal log-probabilities")
        old, drift = terms.proximal, terms.proximal - terms.behaviour
        if settings.importance_level != "token":
            means = settings.importance_level == "sequence_mean"
            drift = _over_sequences(drift, terms.sequences, mean=means)
        weight = _ratio(drift).clamp(max=settings.importance_cap)
    log_ratio = logprobs - old
    if settings.kind == "gspo":
        log_ratio = _over_sequences(log_ratio, terms.sequences, mean=True)
    ratio = _ratio(log_ratio)
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    bounded = ratio.clamp(low, high)
    if settings.kind == "cispo":
        objective = bounded.detach() * advantages * logprobs
        clipped = (bounded != ratio) & (advantages != 0)
    else:
        plain, pessimistic = ratio * advantages, bounded * advantages
        objective = torch.minimum(plain, pessimistic)
        clipped = pessimistic < plain
        if settings.clip_dual is not None:
            bound = settings.clip_dual * advantages
            cut = (advantages < 0) & (objective < bound)
            objective = torch.where(cut, bound, objective)
            clipped = clipped | cut
    token_loss = -weight * objective
    kl = logprobs.new_zeros(())
    if settings.kl_coefficient:
        if terms.reference is None:
            raise ValueError("kl_coefficient needs the reference log-probabilities")
        penalty = k3(terms.reference - logprobs)
        token_loss = token_loss + settings.kl_coefficient * penalty
        kl = penalty.detach().sum()
    return LossParts(loss=(terms.weights * token_loss).sum(), clipped=clipped.detach().sum(), kl=kl)


class _ChosenLogprobs(torch.autograd.Function):
    """log_softmax(logits)[targets] for logits [N, V] and targets [N], in the memory of `logits`,
    which are overwritten in both passes: no second tensor of their size ever exists."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        index = targets.unsqueeze(-1)
        chosen = logits.gather(-1, index).squeeze(-1)
        largest = logits.amax(dim=-1, keepdim=True)
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(exponentials, total, index)
        return chosen - (largest + total.log()).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        exponentials, total, index = ctx.saved_tensors
        outer = gradients[0].unsqueeze(-1)
        found = exponentials.mul_(-outer / total)
        return found.scatter_add_(-1, index, outer), None


TRUNCATION_COPIES = 6
"""Memory that top-k, top-p and entropies need, in tensors of the size of the logits in float32:
sorted values, their indices, probabilities, masks (measured on the CPU)."""


def truncation_mask(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Boolean [N, V]: True where a token is cut from logits [N, V] (temperature applied already).

    `top_k` 0 and `top_p` 1 are off. Ties with the k-th largest logit are kept. Top-p keeps the
    smallest set of most probable tokens whose mass reaches `top_p`, at least one.
    """
    cut = torch.zeros_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        cut = logits < smallest
    if top_p < 1.0:
        ascending, order = logits.masked_fill(cut, -torch.inf).sort(dim=-1)
        below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        below[:, -1] = False
        cut = cut | torch.zeros_like(cut).scatter(-1, order, below)
    return cut


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> torch.Tensor:
    """Log-probabilities [N] (nats, float32) of `targets` [N] given `logits` [N, V], under the
    distribution that workers sample from: temperature, then top-k, then top-p, renormalised.
    Overwrites `logits`, and its backward pass can be run once.

    The set of tokens that the engine kept is not in the log, and the trainer's policy is a few
    updates ahead, so its own set may lack the sampled token: the ratio would be zero. The trainer
    therefore keeps its own set joined with the sampled token, and the ratio compares two truncated
    distributions. (Comparing with the full vocabulary makes every ratio too small by the mass that
    was cut. Keeping the sampling mask, as in DeepSeek-V3.2, arXiv 2512.02556, section 3.1, is exact
    and needs the sets in the log.) Without truncation, the default, the result is exact.
    """
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled.div_(temperature)
    if top_k or top_p < 1.0:
        cut = truncation_mask(scaled.detach(), top_p, top_k)
        scaled = scaled.masked_fill_(cut.scatter_(-1, targets.unsqueeze(-1), False), -torch.inf)
    return _ChosenLogprobs.apply(scaled, targets)


def token_entropies(
    logits: torch.Tensor, *, temperature: float, top_p: float, top_k: int
) -> torch.Tensor:
    """Entropies [N] (nats) of the distributions that logits [N, V] sample from, truncation
    included."""
    scaled = logits.float() / temperature
    if top_k or top_p < 1.0:
        scaled = scaled.masked_fill(truncation_mask(scaled, top_p, top_k), -torch.inf)
    logprobs = scaled.log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(dim=-1)
