"""The LoRA adapter in a policy model (LoRA, arXiv 2106.09685; peft's layers).

Invariant: the adapter alone is trained and published, the base model's weights never change; and
its starting values depend on the run's seed and the model alone, so that whoever starts again
makes the same ones. At the start the upper matrices are zero: version 0 is the base model.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dora.config import Config
from dora.errors import PolicyError, first_line
from dora.weights.adapters import DOWN, PREFIX, UP

_ADAPTER = "default"
_UPPER = f".lora_B.{_ADAPTER}.weight"


def add_adapter(model: nn.Module, config: Config) -> dict[str, Any]:
    """Put the adapter of `policy.lora` into a Hugging Face model, in place; the rest is frozen.

    Returns the adapter's configuration as peft writes it, without paths of this machine. Raises
    PolicyError where `target_modules` names no layer of the model, or one that is not linear.
    """
    import peft

    section = config.policy.lora
    assert section is not None
    every = section.target_modules == "all-linear"
    alpha = int(section.alpha) if section.alpha.is_integer() else section.alpha
    settings = peft.LoraConfig(
        r=section.rank,
        lora_alpha=alpha,
        target_modules="all-linear" if every else list(section.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(config.policy.model),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        try:
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"policy.lora.target_modules: {first_line(error)}",
                hint=f"Linear layers of this model: {', '.join(_linear_layers(model))}.",
            ) from error
    odd = [n for n, p in model.named_parameters() if p.requires_grad and not _is_matrix(n)]
    if odd:
        raise PolicyError(
            f"policy.lora.target_modules: {odd[0]} belongs to a layer that is not linear",
            hint=f"Linear layers of this model: {', '.join(_linear_layers(model))}.",
        )
    written = {k: v for k, v in settings.to_dict().items() if v is not None}
    written["target_modules"] = _targets(model)
    written["inference_mode"] = True
    return written


def _targets(model: nn.Module) -> list[str]:
    """Names of the adapted layers, as short as they are unambiguous."""
    names = [name for name, _ in model.named_modules()]
    adapted = sorted(n.removesuffix(".lora_A") for n in names if n.endswith(".lora_A"))
    short = sorted({name.rpartition(".")[2] for name in adapted})
    matched = sum(name.rpartition(".")[2] in short for name in names)
    return short if matched == len(adapted) else adapted


def base_name(model: str) -> str:
    """Name of the base model as an adapter's configuration has it: the Hugging Face name, or the
    last part of a directory, whose place on this machine is nobody else's business."""
    path = Path(model)
    return path.name if path.is_absolute() or path.exists() else model


def _is_matrix(name: str) -> bool:
    return name.endswith((f".lora_A.{_ADAPTER}.weight", _UPPER))


def _linear_layers(model: nn.Module) -> list[str]:
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return sorted(names - {_ADAPTER, "base_layer"})


def published_name(parameter: str) -> str:
    """Name under which peft and vLLM store an adapter's parameter."""
    stem = parameter.removesuffix(f".{_ADAPTER}.weight")
    end = UP if stem.endswith(".lora_B") else DOWN
    return f"{PREFIX}{stem.removesuffix('.lora_B').removesuffix('.lora_A')}{end}"


def without_adapter(module: nn.Module) -> dict[str, torch.Tensor]:
    """Values of parameters of `module` with which it computes what its base model does."""
    return {
        name: torch.zeros_like(parameter)
        for name, parameter in module.named_parameters()
        if name.endswith(_UPPER)
    }
