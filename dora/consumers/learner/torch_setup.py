"""Setting torch and DeepSpeed up for training: threads, determinism, process group, settings.

This is done before the first tensor is made. In deterministic mode the same inputs give the same
bits: fixed seed, one thread count, deterministic kernels.
"""

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dora.config import Config
from dora.consumers.learner.ranks import Ranks

log = logging.getLogger(__name__)


def device() -> torch.device:
    """The device of this rank: its GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def prepare(config: Config, ranks: Ranks | None = None) -> ModuleType:
    """Set up this process for training and return the deepspeed module.

    With `ranks` this process is one of several; otherwise it is the only one, and no port is
    opened.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(config.trainer.threads)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(config.run.seed)
    _find_ninja()
    deepspeed = _import_deepspeed()
    _join(deepspeed, "gloo" if on_cpu else "nccl", ranks)
    return deepspeed


def _find_ninja() -> None:
    """DeepSpeed compiles an operator at first use and looks for ninja on the PATH, where it is not
    when a virtual environment is used without being activated."""
    if shutil.which("ninja") is None:
        beside = Path(sys.executable).parent
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"


def _import_deepspeed() -> ModuleType:
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    return deepspeed  # type: ignore[no-any-return]


def _join(deepspeed: ModuleType, backend: str, ranks: Ranks | None) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    local = ranks is None or os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    if local and backend == "gloo" and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # gloo will do: marking the shared-memory collectives unavailable saves compiling them with g++
    # at the first start.
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # an engine in the same process may have made the group of one already
    if not torch.distributed.is_initialized():
        if ranks is None:
            store: torch.distributed.Store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            torch.distributed.init_process_group(
                backend,
                store=ranks.store,
                rank=ranks.rank,
                world_size=ranks.world,
                timeout=timedelta(seconds=ranks.timeout),
            )
    deepspeed.init_distributed(dist_backend=backend, verbose=False, dist_init_required=False)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration: what dora sets, with `trainer.deepspeed` over it."""
    given = config.trainer.deepspeed
    world = torch.distributed.get_world_size()
    base: dict[str, Any] = {
        # Micro-batches differ in number from step to step: the learner marks the last one itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if config.policy.dtype == "bfloat16":
        base["bf16"] = {"enabled": True}
    if config.policy.dtype == "float16":
        base["fp16"] = {"enabled": True}
    settings = _merge(base, given)
    if config.policy.dtype == "bfloat16":
        _accumulate_in_float32(settings)
    # without a value DeepSpeed clips to 1, also what the learner has clipped to more
    clip = config.trainer.optimizer.gradient_clip
    settings["gradient_clipping"] = 0.0 if is_plain(settings) else clip
    return settings


def _accumulate_in_float32(settings: dict[str, Any]) -> None:
    """Have gradients added up in float32 unless the settings say in what: bfloat16 has 8 bits, so
    of many micro-batches later ones get lost. DeepSpeed can do so from ZeRO stage 1 on."""
    types, zero = settings.setdefault("data_types", {}), settings["zero_optimization"]
    if types.setdefault("grad_accum_dtype", "fp32") == "fp32" and zero.get("stage", 0) == 0:
        zero["stage"] = 1
        log.info(
            "policy.dtype = bfloat16: ZeRO stage 1 instead of 0, where DeepSpeed cannot add up "
            "gradients in float32"
        )


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed keeps parameters and gradients as they are (ZeRO 0, float32), so that the
    learner can clip them itself, in one pass that also gives their norm."""
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    return stage == 0 and "bf16" not in settings and "fp16" not in settings
