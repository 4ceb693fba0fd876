"""LoRA adapters made by hand, and the models that they amount to."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dora.config import Config
from dora.consumers.learner.model import add_adapter, published_name
from dora.weights.adapters import write_adapter, write_adapter_config

RANK, ALPHA = 4, 8.0


def lora_config(base: Path, **lora: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "adapters", "seed": 3},
            "policy": {"model": str(base), "lora": {"rank": RANK, "alpha": ALPHA, **lora}},
            "task": {"kind": "reasoning-gym", "name": "x"},
            "trainer": {"steps": 8},
        }
    )


def make_adapter(directory: Path, base: Path, seed: int, **lora: object) -> Path:
    """Write an adapter of `base` with random values, far from zero, and return its directory."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = add_adapter(model, lora_config(base, **lora))
    generator = torch.Generator().manual_seed(seed)
    state = {
        published_name(name): torch.randn(p.shape, generator=generator) * 0.1
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    directory.mkdir(parents=True)
    write_adapter(directory, state)
    write_adapter_config(directory, settings)
    return directory


def merged(base: Path, adapter: Path) -> PreTrainedModel:
    """The base model with W + alpha / rank * B A in place of each adapted W (LoRA, section 4.1)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    settings = json.loads((adapter / "adapter_config.json").read_text())
    state = load_file(adapter / "adapter_model.safetensors")
    for name, down in state.items():
        if not name.endswith(".lora_A.weight"):
            continue
        up = state[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weight = model.get_parameter(f"{module}.weight")
        weight.data += settings["lora_alpha"] / settings["r"] * up @ down
    return model


def merged_logprobs(base: Path, adapter: Path, tokens: list[int], start: int = 1) -> list[float]:
    """Log-probabilities of `tokens[start:]` under the base model with the adapter."""
    with torch.no_grad():
        scores = merged(base, adapter)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(scores[i - 1, tokens[i]]) for i in range(start, len(tokens))]
