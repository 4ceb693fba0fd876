"""A policy version as a LoRA adapter: two files in the layout of peft."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dora.errors import WeightsError
from dora.weights.tensors import write_file

if TYPE_CHECKING:
    import torch

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""What peft puts before the base model's own names."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of the two matrices: [rank, inputs] and [outputs, rank]."""

Shapes = Mapping[str, tuple[int, ...]]


def write_adapter(directory: Path, state: "Mapping[str, torch.Tensor]") -> None:
    """Write an adapter's tensors as one file; raises as `tensors.write_file` does."""
    write_file(directory / ADAPTER_FILE, state)


def write_adapter_config(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write what peft and vLLM want to know about an adapter; equal settings give equal bytes."""
    (directory / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file, from its header; WeightsError if it cannot be read."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def model_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes |= tensor_shapes(path)
    return shapes


def check_adapter(directory: Path, base: Shapes, rank: int) -> None:
    """WeightsError, with the reason, unless `directory` holds an adapter of `rank` for a model
    whose tensors have the shapes `base`: an engine would cut or skip what does not fit.

    Layers that the base model's files call by another name are not compared: the canary covers
    them.
    """
    path = directory / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    found = settings.get("r") if isinstance(settings, dict) else None
    if found != rank:
        raise WeightsError(f"{path} has rank {found}, the run trains rank {rank} (policy.lora)")
    shapes = tensor_shapes(directory / ADAPTER_FILE)
    if not shapes:
        raise WeightsError(f"{directory / ADAPTER_FILE} holds no tensors")
    for name, shape in shapes.items():
        end = DOWN if name.endswith(DOWN) else UP
        partner = name.removesuffix(end) + (UP if end == DOWN else DOWN)
        if not name.endswith(end) or partner not in shapes:
            raise WeightsError(f"{directory / ADAPTER_FILE}: {name} is no half of a pair")
        module = name.removeprefix(PREFIX).removesuffix(end)
        expected = _expected(base.get(f"{module}.weight"), end, rank, shape)
        if shape != expected:
            raise WeightsError(
                f"{directory / ADAPTER_FILE}: {name} has shape {list(shape)}, the base model and "
                f"rank {rank} need {list(expected)}"
            )


def _expected(
    weight: tuple[int, ...] | None, end: str, rank: int, found: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of one matrix: [rank, inputs] or [outputs, rank]."""
    free = found[1 if end == DOWN else 0] if len(found) == 2 else 0
    if weight is not None and len(weight) == 2 and free not in weight:
        free = weight[1 if end == DOWN else 0]
    return (rank, free) if end == DOWN else (free, rank)
