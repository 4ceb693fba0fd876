"""Rollout engines turn prompts and weights into tokens.

Nothing heavy is imported here: vLLM is imported when an engine of that kind is made.
"""

import time
import zlib
from collections.abc import Callable
from typing import Any

from dora.config import Config
from dora.producers.engines.base import Delta, Engine, Request
from dora.producers.engines.emulated import EmulatedEngine, emulated_spec
from dora.weights.models import model_directory

__all__ = ["Delta", "Engine", "Request", "create_engine"]


def create_engine(
    config: Config,
    worker: str = "",
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """Make the engine that `rollout.engine` names; it has no weights before its first `restart`.

    `worker` makes the engine's own random state, which requests without a seed use, different from
    that of other workers. `clock` and `sleep` are for the emulated engine. Raises `PolicyError`
    where vLLM is needed and missing, or the base model of adapters.
    """
    rollout = config.rollout
    if rollout.engine == "emulated":
        return EmulatedEngine(
            emulated_spec(config, worker),
            capacity=rollout.capacity,
            max_model_len=config.max_model_len,
            seed=config.run.seed,
            report_every=rollout.chunk_tokens,
            waits=False,
            hosts_many=config.policy.lora is not None,
            clock=clock,
            sleep=sleep,
        )
    arguments: dict[str, Any] = {
        "capacity": rollout.capacity,
        "max_model_len": config.max_model_len,
        "dtype": config.policy.dtype,
        "seed": zlib.crc32(f"{config.run.seed}:{worker}".encode()),
        "enforce_eager": rollout.enforce_eager,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "kv_cache_gib": rollout.kv_cache_gib,
        "threads": rollout.threads,
        "trust_remote_code": config.policy.trust_remote_code,
        "options": dict(rollout.engine_options),
    }
    lora = config.policy.lora
    if lora is None:
        from dora.producers.engines.vllm import VllmEngine

        return VllmEngine(**arguments)
    from dora.producers.engines.vllm_lora import VllmAdapterEngine

    return VllmAdapterEngine(
        model_directory(config.policy.model),
        rank=lora.rank,
        adapters=rollout.adapters or config.window.ring,
        **arguments,
    )
