"""vLLM as a rollout engine, in this process and driven by the caller's thread.

Invariant: what is reported as a log-probability is that of the distribution sampled from
(`logprobs_mode="processed_logprobs"`), and all of a request's tokens come from one set of weights:
these change only while nothing runs, with the prefix, multimodal and encoder caches emptied after.

vLLM is imported when the first engine is made, not before: the import takes many seconds. The code
needs nothing but `import vllm`; the platform is the one that vLLM detects.
"""

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dora.errors import DoraError, PolicyError, WeightsError
from dora.producers.engines.base import (
    Delta,
    Engine,
    FinishReason,
    Request,
    check_directory,
    complete,
    refusal,
    resumed_seed,
)
from dora.producers.engines.vllm_setup import (
    engine_arguments,
    import_vllm,
    pack_tied_heads,
    register_in_process,
)

log = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 3
_SCORE_ID = "dora-score"


class VllmEngine(Engine):
    """One vLLM `LLMEngine` with the full weights of one version.

    Making it imports vLLM; the first `restart` or `load` starts it with a Hugging Face model
    directory. `dtype` and `max_model_len` as in vLLM. `seed` seeds the engine's own random state,
    used by requests without a seed: workers need different ones. `kv_cache_gib` and `threads` apply
    on CPUs only, `gpu_memory_utilization` elsewhere only. `options` are further fields of vLLM's
    `EngineArgs` and win over what is set here. vLLM's messages of at least `log_level` go to the
    process's own log.

    Raises `PolicyError` where vLLM is missing; `load` and `restart` raise it where vLLM cannot run
    the model.
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
        self._arguments |= options or {}
        self._llm: Any = None
        self._directory = Path()
        self._requests: set[str] = set()
        self._told: list[Delta] = []
        self._failures = 0
        self._starts = 0

    def load(self, directory: Path, version: int) -> None:
        """Apply weights in place; see `Engine.load`."""
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
        """Build a fresh engine; running requests are dropped. See `Engine.restart`."""
        self._requests.clear()
        self._told.clear()
        self._start(directory, version)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """Log-probabilities of a given sequence; see `Engine.score`."""
        if self._requests:
            raise DoraError(f"cannot score while {len(self._requests)} requests run")
        tokens = list(token_ids)
        if len(tokens) < 2:
            return []
        llm = self._ready()
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            seed=0,
        )
        try:
            with self._execution():
                llm.add_request(_SCORE_ID, {"prompt_token_ids": tokens}, params)
                while llm.has_unfinished_requests():
                    for output in llm.step():
                        if output.finished:
                            # A position may hold the most likely token too: take the given one.
                            positions = output.prompt_logprobs[1:]
                            pairs = zip(positions, tokens[1:], strict=True)
                            return [float(position[token].logprob) for position, token in pairs]
        except Exception as error:
            llm.abort_request([_SCORE_ID])
            raise DoraError(
                f"vLLM could not score {len(tokens)} tokens: {type(error).__name__}: {error}"
            ) from error
        raise DoraError("vLLM ended a scoring request without log-probabilities")

    def add(self, request: Request) -> None:
        """Take a request; see `Engine.add`."""
        name = request.request_id
        if name in self._requests:
            raise DoraError(f"request {name} runs already")
        llm = self._ready()
        reason = refusal(request, self.vocabulary, self.max_model_len)
        if reason is not None:
            self._told.append(Delta(name, finish_reason="error", error=reason))
            return
        ended = complete(request)
        if ended is not None:
            self._told.append(Delta(name, finish_reason=ended))
            return
        try:
            prompt = {"prompt_token_ids": [*request.prompt, *request.prefix]}
            llm.add_request(name, prompt, _parameters(request))
        except Exception as error:  # noqa: BLE001 - what vLLM refuses concerns this request only
            message = f"vLLM refused the request: {type(error).__name__}: {error}"
            self._told.append(Delta(name, finish_reason="error", error=message))
            return
        self._requests.add(name)

    def abort(self, request_id: str) -> None:
        """Drop a request; see `Engine.abort`."""
        if request_id in self._requests:
            self._requests.remove(request_id)
            self._llm.abort_request([request_id])
        self._told = [delta for delta in self._told if delta.request_id != request_id]

    def step(self) -> list[Delta]:
        """One iteration of vLLM; see `Engine.step`.

        Where vLLM itself fails, every running request ends with an error and a fresh engine takes
        over with the same weights; the third failure in a row is raised.
        """
        deltas, self._told = self._told, []
        if not self._requests:
            return deltas
        try:
            with self._execution():
                outputs = self._llm.step()
        except Exception as error:  # noqa: BLE001 - the engine's state is unknown after any of them
            deltas.extend(self._recover(error))
            return deltas
        self._failures = 0
        broken = []
        for output in outputs:
            name = output.request_id
            if name not in self._requests:
                continue
            delta = _delta(name, output.outputs[0], bool(output.finished))
            if delta.finish_reason is not None:
                self._requests.remove(name)
                if not output.finished:
                    broken.append(name)
            elif not delta.token_ids:
                continue
            deltas.append(delta)
        if broken:
            self._llm.abort_request(broken)
        return deltas

    @property
    def running(self) -> int:
        """Requests taken and not yet reported as finished."""
        return len(self._requests) + len(self._told)

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        llm, self._llm = self._llm, None
        self._requests.clear()
        self._told.clear()
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

    def _ready(self) -> Any:
        if self._llm is None or self.version is None:
            raise DoraError(
                "the engine has no valid weights",
                hint="It was never started, or its last update failed: restart it.",
            )
        return self._llm

    def _start(self, directory: Path, version: int) -> None:
        if (lacking := check_directory(directory)) is not None:
            raise WeightsError(f"weights of version {version}: {lacking}")
        self.close()
        from vllm import LLMEngine

        # Requests without a seed must not repeat after a restart what they drew before it.
        seed = resumed_seed(self._seed, self._starts) & 0x7FFFFFFF
        arguments = engine_arguments({"model": str(directory), "seed": seed, **self._arguments})
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

    def _recover(self, error: Exception) -> list[Delta]:
        self._failures += 1
        names = sorted(self._requests)
        message = f"vLLM failed: {type(error).__name__}: {error}"
        log.error("%s; %d requests end, the engine starts again", message, len(names))
        directory, version = self._directory, self.version
        if self._failures >= _FAILURES_IN_A_ROW or version is None:
            self.close()
            raise DoraError(
                f"{message} ({self._failures} times in a row)",
                hint="The worker's log holds vLLM's own messages.",
            ) from error
        self.restart(directory, version)
        return [Delta(name, finish_reason="error", error=message) for name in names]

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


def _parameters(request: Request) -> Any:
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


def _delta(name: str, completion: Any, finished: bool) -> Delta:
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
