"""The section `rollout`: workers, their engine, and the distribution they sample from."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dora.config.emulation import EmulatedSection
from dora.config.section import Positive, Seconds, Section


class RolloutSection(Section):
    """Rollout workers and the distribution they sample from."""

    workers: Positive = 1
    """Workers that `dora run` starts on this machine, each in a process of its own unless
    workers_per_process is larger than 1."""
    workers_per_process: Positive = 1
    """emulated: workers that share a process, so that many fit on one machine."""
    engine: Literal["vllm", "emulated"] = "vllm"
    """What generates: vLLM, or a latency model without a language model."""
    capacity: Positive = 128
    """Trajectories that one worker generates at once."""
    max_new_tokens: Positive = 512
    """Longest response in tokens; a longer one is cut with finish reason `length`."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature; recorded log-probabilities are those of the distribution sampled.
    vLLM samples with 0.01 where less is asked for."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus truncation; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Top-k truncation; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; by default the tokenizer's end-of-sequence token and those that
    the model's config.json and generation_config.json name."""
    seeded: bool = True
    """Give each trajectory its own seed, so that sampling repeats (costs up to 20 % of speed)."""
    chunk_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    """Tokens per chunk record; fewer lose less in a crash, more cost less."""
    max_model_len: Positive | None = None
    """Longest sequence of the engine; by default prompt and response limits added."""
    enforce_eager: bool = True
    """Run the model without compiled graphs; turn off on GPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the device's memory that vLLM takes."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """CPU only: memory for the key-value cache, in GiB."""
    threads: Positive = 1
    """CPU only: threads of the engine."""
    adapters: Positive | None = None
    """policy.lora: adapters that one engine holds at once; by default one for each live version
    and one to spare."""
    engine_options: dict[str, Any] = {}
    """Further arguments of vLLM's EngineArgs, passed through."""
    heartbeat_seconds: Seconds = 1.0
    """Seconds between a worker's heartbeats."""
    heartbeat_timeout_seconds: Seconds = 30.0
    """A worker that is silent for longer is given up, and others go on with its trajectories."""
    load_timeout_seconds: Seconds = 900.0
    """The same for a worker that starts its engine or loads weights."""
    stall_timeout_seconds: Seconds = 300.0
    """A trajectory without a new token for longer is taken from its engine and tried again."""
    hang_timeout_seconds: Seconds = 600.0
    """A worker whose engine does not return for longer ends itself, so that it can be restarted."""
    max_attempts: Positive = 5
    """Attempts at one trajectory before its group is set aside."""
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.02
    """Largest difference in nats between the engine's and the trainer's canary log-probabilities
    (0.02 suits float32; bfloat16 needs about 0.3)."""
    emulated: EmulatedSection = EmulatedSection()
    """Parameters of the emulated engine."""

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> "RolloutSection":
        if self.heartbeat_timeout_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                "rollout.heartbeat_timeout_seconds must be at least 3 times heartbeat_seconds"
            )
        return self
