"""Packed micro-batches give what padded ones do, and no sequence sees another."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dora.consumers.learner.batches import Sample, micro_batches
from dora.consumers.learner.model import PolicyModel, model_inputs, packs
from dora.errors import PolicyError
from tests.unit.test_logit_chunks import VOCABULARY, qwen

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def sample(tokens: Sequence[int], prompt: int = 1) -> Sample:
    count = len(tokens) - prompt
    return Sample(
        "x", 0, np.array(tokens, np.int32), np.arange(prompt, len(tokens)),
        np.zeros(count, np.float32), 0.0, 1.0, False,
    )  # fmt: skip


def scores(policy: PolicyModel, samples: Sequence[Sample], budget: int, *, packed: bool) -> Any:
    """Log-probabilities by sample, and the gradient of their weighted sum."""
    result: dict[int, torch.Tensor] = {}
    total = torch.zeros(())
    for batch in micro_batches(samples, budget, packed=packed):
        found = policy(**model_inputs(batch, torch.device("cpu")), **SAMPLING)
        total = total + (found * torch.from_numpy(batch.rows + 1.0).float()).sum()
        for row, index in enumerate(batch.samples):
            result[index] = found[torch.from_numpy(batch.rows == row)].detach()
    return result, total


POLICIES = {name: PolicyModel(qwen(), 256.0) for name in ("sdpa", "eager")}
for _name, _policy in POLICIES.items():
    _policy.model.set_attn_implementation(_name)  # type: ignore[operator]


@pytest.mark.parametrize("attention", POLICIES)
@given(
    st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12), min_size=1, max_size=6
    ),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_packed_is_padded_and_a_changed_sequence_changes_no_other(
    attention: str, tokens: list[list[int]], data: st.DataObject
) -> None:
    policy = POLICIES[attention]
    with torch.no_grad():
        samples = [sample(each) for each in tokens]
        padded, _ = scores(policy, samples, 1000, packed=False)
        packed, _ = scores(policy, samples, 1000, packed=True)
        for index, expected in padded.items():
            assert torch.allclose(packed[index], expected, atol=1e-5)
        changed = data.draw(st.integers(0, len(tokens) - 1))
        other = [(t + 1) % VOCABULARY for t in tokens[changed]]
        samples[changed] = sample(other)
        again, _ = scores(policy, samples, 1000, packed=True)
        for index in padded.keys() - {changed}:
            assert torch.allclose(again[index], packed[index], atol=1e-6)


def test_gradients_of_packed_and_padded_are_equal() -> None:
    policy = POLICIES["sdpa"]
    random = np.random.default_rng(0)
    samples = [sample(random.integers(0, VOCABULARY, n).tolist(), 2) for n in (9, 3, 14, 6)]
    gradients = []
    for packed in (False, True):
        _, total = scores(policy, samples, 1000, packed=packed)
        gradients.append(torch.autograd.grad(total, list(policy.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def test_a_packed_micro_batch_holds_no_padding_and_fits_the_budget() -> None:
    samples = [sample(range(n)) for n in (2, 9, 4, 5, 3)]
    batches = micro_batches(samples, 14, packed=True)
    assert [batch.token_ids.shape for batch in batches] == [(1, 14), (1, 9)]
    first = batches[0]
    assert first.position_ids is not None
    assert first.position_ids.tolist() == [[*range(9), *range(5)]]
    assert first.targets.tolist() == [*range(1, 9), *range(1, 5)]
    assert first.token_ids[0, first.places + 1].tolist() == first.targets.tolist()


class Blind(nn.Module):
    """A model whose tokens see all tokens before them, whatever the positions say."""

    def __init__(self) -> None:
        super().__init__()
        self.model = qwen()
        self.config, self.device, self.dtype = self.model.config, torch.device("cpu"), torch.float32

    def forward(self, tokens: torch.Tensor, position_ids: Any = None, **options: Any) -> Any:
        return self.model(tokens, **options)


def test_auto_pads_on_a_cpu_and_a_model_that_mixes_sequences_is_refused() -> None:
    assert packs(qwen(), True) and not packs(qwen(), "auto") and not packs(qwen(), False)
    with pytest.raises(PolicyError, match="Blind does not keep packed sequences apart"):
        packs(Blind(), True)
