"""Tensors of a policy in which nothing computes: as files, and their checksum, without torch.

Invariant: checksum and file are those that `dora.weights.tensors` gives the same tensors.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save_file


def plain_checksum(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """sha256 over all tensors in order of their names: name, dtype, shape, bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}\0{tensor.dtype.name}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def write_plain(directory: Path, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write `state` as `model.safetensors`; OSError for what the disk refuses."""
    save_file(dict(state), directory / "model.safetensors", metadata={"format": "pt"})
