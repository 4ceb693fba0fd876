"""Tensors of a policy as files, and their checksum.

Equal tensors give equal checksums wherever and in whatever files they are stored. The files of a
version are safetensors: reading them runs no code. torch, which takes seconds to import, is loaded
by the first call that needs it; the `plain` functions do the same for numpy arrays without it.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from dora.errors import WeightsError

if TYPE_CHECKING:
    import torch

MAX_SHARD = "2GB"


def weights_checksum(state: "Mapping[str, torch.Tensor]") -> str:
    """sha256 over all tensors in order of their names: name, dtype, shape, bytes."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plain_checksum(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """What `weights_checksum` gives for tensors that equal these arrays."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}\0{tensor.dtype.name}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def write_tensors(directory: Path, state: "Mapping[str, torch.Tensor]") -> None:
    """Write `state` as `model.safetensors`, or as shards of 2 GB with an index.

    The layout is that of `save_pretrained`, so anything that loads a Hugging Face model loads it.
    Raises OSError for what the disk refuses.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    split = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD,
    )
    for filename, names in split.filename_to_tensors.items():
        write_file(directory / filename, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_plain(directory: Path, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write `state` as `model.safetensors`; OSError for what the disk refuses."""
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(dict(state), path, metadata={"format": "pt"})


def write_file(path: Path, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Write one safetensors file; OSError for what the disk refuses, WeightsError else."""
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise _storage_failure(error, path) from error


def _storage_failure(error: SafetensorError, path: Path) -> OSError | WeightsError:
    """safetensors names the system's error in its text alone."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return WeightsError(f"cannot write {path}: {error}")
    code = int(number.group(1))
    return OSError(code, os.strerror(code), str(path))


def read_tensors(directory: Path) -> "dict[str, torch.Tensor]":
    """All tensors of the `*.safetensors` files in `directory`, on the CPU."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        state.update(load_file(path))
    return state
