"""Logits by chunks give the log-probabilities and gradients of all logits at once."""

from typing import Any

import pytest
import torch
from torch import nn

from dora.config import Config
from dora.consumers.learner.model import PolicyModel, add_adapter

VOCABULARY, TOKENS = 40, 30
INPUTS = {
    "token_ids": torch.arange(TOKENS)[None] * 7 % VOCABULARY,
    "places": torch.arange(TOKENS - 1),
    "targets": torch.arange(1, TOKENS) * 7 % VOCABULARY,
}
ONE_TOKEN = 4 * VOCABULARY / 2**20
"""logits_mib that one token's logits take."""


def qwen(tied: bool = False) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )


def with_adapter(model: nn.Module) -> nn.Module:
    settings: dict[str, Any] = {
        "run": {"name": "chunks"},
        "policy": {"model": "x", "lora": {"rank": 4, "target_modules": ["lm_head", "q_proj"]}},
        "task": {"kind": "reasoning-gym", "name": "x"},
        "trainer": {"steps": 1},
    }
    add_adapter(model, Config.model_validate(settings))
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def cohere() -> nn.Module:
    """Scales its logits after the output head."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(1)
    return CohereForCausalLM(
        CohereConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def plain(model: Any, temperature: float, top_k: int) -> torch.Tensor:
    logits = model(INPUTS["token_ids"]).logits[0, :-1].float() / temperature
    index = INPUTS["targets"][:, None]
    if top_k:
        cut = logits < logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(cut.scatter(-1, index, False), -torch.inf)
    return logits.log_softmax(-1).gather(-1, index)[:, 0]


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("kind", ["untied", "tied", "lora", "scaled"])
def test_chunks_give_the_values_and_gradients_of_the_whole(kind: str, top_k: int) -> None:
    model = cohere() if kind == "scaled" else qwen(tied=kind == "tied")
    if kind == "lora":
        model = with_adapter(model)
    policy = PolicyModel(model, logits_mib=7 * ONE_TOKEN)
    trained = [p for p in model.parameters() if p.requires_grad]
    outer = torch.linspace(-1.0, 1.0, TOKENS - 1)
    results = []
    for found in (
        policy(**INPUTS, temperature=0.7, top_p=1.0, top_k=top_k),
        plain(model, 0.7, top_k),
    ):
        results.append((found.detach(), torch.autograd.grad((found * outer).sum(), trained)))
    (values, gradients), (expected, expected_gradients) = results
    assert torch.allclose(values, expected, atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def test_no_more_logits_exist_at_once_than_the_budget() -> None:
    policy = PolicyModel(qwen(), logits_mib=7 * ONE_TOKEN)
    widest: list[int] = []
    head: Any = policy.model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, inputs, output: widest.append(output.shape[0]))
    policy(**INPUTS, temperature=1.0, top_p=1.0, top_k=0).sum().backward()
    assert max(widest) <= 7 and len(widest) == 2 * 5  # forward, and once more
    assert sum(widest) == 2 * (TOKENS - 1)
