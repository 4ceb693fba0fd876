"""What goes into vLLM for a request, and what comes out of it.

Invariant: a request asks for the log-probability of each token in the distribution sampled from and
for nothing that changes it, and only its own stop tokens and limits end it.
"""

import math
from collections.abc import Sequence
from typing import Any

from dora.producers.engines.base import Delta, FinishReason, Request, resumed_seed


def scoring_parameters() -> Any:
    """vLLM's parameters for scoring a given sequence."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        seed=0,
    )


def scores_of(output: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of `tokens[1:]` in a finished scoring request."""
    # A position may hold the most likely token too: take the given one.
    positions = output.prompt_logprobs[1:]
    return [float(p[t].logprob) for p, t in zip(positions, tokens[1:], strict=True)]


def sampling_parameters(request: Request) -> Any:
    """vLLM's parameters for generating a request's response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    seed = sampling.seed
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens - len(request.prefix),
        # Only the request's own stop tokens count, whatever the model's configuration says.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=None if seed is None else resumed_seed(seed, len(request.prefix)),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def delta_of(name: str, completion: Any, finished: bool) -> Delta:
    """What one step of vLLM added to a request; an error where the model yields no numbers."""
    tokens = tuple(completion.token_ids)
    logprobs = tuple(
        position[token].logprob
        for position, token in zip(completion.logprobs or (), tokens, strict=True)
    )
    if not all(map(math.isfinite, logprobs)):
        message = "the model yields log-probabilities that are not finite (NaN or infinite)"
        return Delta(name, finish_reason="error", error=message)
    if not finished:
        return Delta(name, tokens, logprobs)
    reason = str(completion.finish_reason)
    if reason in ("stop", "length"):
        ended: FinishReason = "stop" if reason == "stop" else "length"
        return Delta(name, tokens, logprobs, ended)
    return Delta(name, finish_reason="error", error=f"vLLM ended the request: {reason}")
