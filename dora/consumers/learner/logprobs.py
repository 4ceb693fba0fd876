"""Log-probabilities of given tokens under the distribution that rollout workers sample from.

Invariant: the trainer's log-probability of a token is computed for the same distribution as the
recorded one: temperature first, then top-k, then top-p, then renormalised, in this order, as the
engine does it.

Truncation needs one choice. The set of tokens that the engine kept is not in the log, and the
trainer's policy is a few updates ahead, so its own set may lack the sampled token; its ratio would
be zero and its gradient undefined. Here the trainer keeps its own top-k / top-p set, always joined
with the sampled token, and renormalises over it. The ratio then compares two truncated
distributions. (Comparing the truncated log-probability with one over the full vocabulary, as many
systems do, makes every ratio too small by the mass that was cut; keeping the sampling mask, as in
DeepSeek-V3.2, arXiv 2512.02556, section 3.1, is exact and would need the sets in the log.) Without
truncation, the default, nothing of this matters and the result is exact.
"""

import torch


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
    """Log-probabilities [N] (nats, float32) of `targets` [N] given `logits` [N, V]."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    index = targets.unsqueeze(-1)
    if top_k or top_p < 1.0:
        cut = truncation_mask(scaled.detach(), top_p, top_k).scatter(-1, index, False)
        scaled = scaled.masked_fill(cut, -torch.inf)
    chosen = scaled.gather(-1, index).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)
