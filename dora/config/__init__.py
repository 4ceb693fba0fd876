"""The configuration of a run: one TOML file, every key typed, documented and checked.

Contradictions are refused while the file is read, before any process starts, with the name of the
key. The docstring under each field is its documentation: `make docs` makes `docs/configuration.md`
of them.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, model_validator

from dora.config.observability import LineageSection, MetricsSection, TracesSection
from dora.config.registry import RegistrySection
from dora.config.rollout import RolloutSection
from dora.config.schedule import ScheduleSection
from dora.config.section import Hook, Positive, Seconds, Section
from dora.config.trainer import (
    EvaluationSection,
    LoraSection,
    RecoverySection,
    TrainerSection,
    WeightsSection,
    check_streaming,
)

BYTES_PER_TOKEN = 16
"""What a token of a trajectory record takes at most: id, log-probability, mask and its text."""
_UNIDENTIFYING = (
    "verifier_timeout_seconds",
    "verifier_processes",
    "synthetic_prompts",
    "synthetic_prompt_tokens",
)


class RunSection(Section):
    """Identity of the run and where its files go."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,99}$")]
    """Prefixes the run's topics and names its directory: lower-case letters, digits, - and _."""
    directory: Path = Path("runs")
    """Directory in which `<name>/` holds logs, weights, checkpoints and the summary."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the prompt stream, the sampling and the trainer."""
    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Restarts of processes that died, in all, before `dora run` gives up."""
    accept_changed: tuple[str, ...] = ()
    """Inputs of the run (`task.path`, `task.verifier`, `policy.tokenizer` ...) that may differ from
    those in the ledger, which then records the new ones. Set by `--accept-changed`."""


class KafkaSection(Section):
    """The Kafka cluster and the shape of the run's topics."""

    bootstrap_servers: str | None = None
    """`host:port,...` of a cluster; without it `dora run` uses the local broker."""
    properties: dict[str, SecretStr] = {}
    """Any librdkafka property, passed to every client (TLS, SASL, OAuth)."""
    registry: RegistrySection | None = None
    """A schema registry; without it records are in Avro's single-object encoding."""
    lanes: Positive = 1
    """Partitions of each version's slot in the chunks and trajectories topics."""
    dispatch_partitions: Annotated[int, Field(ge=2)] = 9
    """Partitions of the dispatch topic: one for admissions, the rest shared by workers by hash."""
    replication_factor: Positive = 1
    """Replicas of every topic; 3 on a real cluster."""
    retention_hours: Annotated[float, Field(gt=0)] | None = None
    """How long trajectories and chunks are kept; without it for ever."""
    max_message_bytes: Annotated[int, Field(ge=1_024)] = 8 * 2**20
    """Largest record in bytes; the topics are created with it."""
    connect_timeout_seconds: Seconds = 10.0
    """How long to wait for the first answer of the cluster."""
    request_timeout_seconds: Seconds = 120.0
    """How long an unanswered request or delivery is retried before the process gives up."""
    transaction_timeout_seconds: Seconds = 60.0
    """After this time the broker aborts the transaction of a silent coordinator or trainer."""


class PolicySection(Section):
    """The language model that is trained."""

    model: str
    """Directory with config.json and *.safetensors, or a Hugging Face model name; `emulated` where
    rollout and trainer are (a vocabulary of 32,000 tokens and no directory)."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer; by default the model's own."""
    prepare: Hook | None = None
    """`module:function` that makes the model directory if it is missing; called with the
    directory and this configuration. The module is looked for beside the configuration file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that workers load and the trainer publishes."""
    trust_remote_code: bool = False
    """Lets Hugging Face models run code of their own; off unless you trust the model."""
    lora: LoraSection | None = None
    """Train a low-rank adapter instead of all weights: each policy version is an adapter of the
    model, and one engine hosts all live versions at once."""


class TaskSection(Section):
    """Prompts and how answers are scored."""

    kind: Literal["reasoning-gym", "jsonl", "synthetic"]
    """Where prompts come from: a task of the reasoning-gym library, a JSONL file, or for emulated
    engines `synthetic`: token ids without a text, which need no tokenizer."""
    name: str | None = None
    """reasoning-gym: name of the task, such as `spell_backward`."""
    parameters: dict[str, Any] = {}
    """reasoning-gym: parameters of the task, passed through."""
    path: Path | None = None
    """jsonl: the file, one JSON object a line; relative to the configuration file."""
    prompt_field: str = "prompt"
    """jsonl: field with the prompt: a string, or a list of chat messages."""
    answer_field: str = "answer"
    """jsonl: field with the reference answer, handed to the verifier."""
    shuffle: bool = True
    """jsonl: go through the file in a new seeded order each epoch."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts kept apart for evaluation (chosen by hash of the text, stable)."""
    chat_template: bool = False
    """Put prompts through the tokenizer's chat template."""
    render: Hook | None = None
    """`module:function(item: dict) -> str`: makes the prompt text of an item."""
    verifier: Hook | None = None
    """`module:function(response: str, item: dict) -> float | dict[str, float]`: the reward; a dict
    holds named parts with the total under `reward`. By default reasoning-gym's own scorer.
    `dora.producers.tasks.verifiers:math` is math-verify."""
    verifier_timeout_seconds: Seconds = 10.0
    """A verifier that takes longer is stopped and its group set aside."""
    verifier_processes: Positive = 1
    """Processes per worker that run the verifier beside the generation."""
    success_threshold: float = 1.0
    """A trajectory with at least this reward counts as a success."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are refused when the data set is read."""
    synthetic_prompts: Positive = 1024
    """synthetic: number of different prompts, gone through again and again."""
    synthetic_prompt_tokens: Positive = 256
    """synthetic: length of each prompt in tokens."""

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> "TaskSection":
        if self.kind == "reasoning-gym" and self.name is None:
            raise ValueError("task.name is needed: the reasoning-gym task, such as spell_backward")
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path is needed: the JSONL file with the prompts")
        if self.kind == "jsonl" and self.verifier is None:
            raise ValueError("task.verifier is needed: module:function that scores a response")
        return self


class WindowSection(Section):
    """The asynchrony window (staleness bound) and the sizes that it is made of."""

    max_staleness: Annotated[int, Field(ge=0, le=64)] = 1
    """K: a group of version v is trained at version n only if n - v <= K; 0 is synchronous."""
    groups_per_step: Positive = 32
    """B: groups in one training step."""
    group_size: Positive = 8
    """G: trajectories of one prompt, compared with one another."""
    tokens_per_step: Positive | None = None
    """Budget of generated tokens of one training step: it takes groups until the budget is
    reached, and at most groups_per_step; needs max_staleness of at least 1. With it at most
    max_staleness * groups_per_step + 1 groups are in flight, so choose groups_per_step about twice
    as large as what usually makes the budget. Without it each step takes groups_per_step."""

    @property
    def ring(self) -> int:
        """Slots of the version-partitioned topics: one for each live version and one to spare."""
        return self.max_staleness + 2


class Config(Section):
    """One run."""

    run: RunSection
    """Identity."""
    policy: PolicySection
    """Model."""
    task: TaskSection
    """Prompts and rewards."""
    trainer: TrainerSection
    """Training."""
    window: WindowSection = WindowSection()
    """Window."""
    schedule: ScheduleSection = ScheduleSection()
    """Schedule."""
    rollout: RolloutSection = RolloutSection()
    """Generation."""
    kafka: KafkaSection = KafkaSection()
    """Cluster."""
    recovery: RecoverySection = RecoverySection()
    """Recovery."""
    weights: WeightsSection = WeightsSection()
    """Weight store."""
    evaluation: EvaluationSection = EvaluationSection()
    """Evaluation."""
    metrics: MetricsSection = MetricsSection()
    """Metrics."""
    traces: TracesSection = TracesSection()
    """Traces."""
    lineage: LineageSection = LineageSection()
    """Lineage."""
    home: Path = Path(".")
    """Directory that hooks and relative data paths are looked for in; set to the configuration
    file's own when it is read."""

    @model_validator(mode="after")
    def _sections_fit_together(self) -> "Config":
        if self.window.groups_per_step % self.trainer.updates_per_step:
            raise ValueError(
                f"window.groups_per_step ({self.window.groups_per_step}) must be divisible by "
                f"trainer.updates_per_step ({self.trainer.updates_per_step})"
            )
        if self.window.tokens_per_step is not None and self.window.max_staleness == 0:
            raise ValueError(
                "window.tokens_per_step needs window.max_staleness of at least 1: without "
                "staleness a step has to train every group that was started, whatever its tokens"
            )
        if self.window.group_size == 1 and self.trainer.loss.drop_no_signal:
            raise ValueError(
                "trainer.loss.drop_no_signal with window.group_size = 1 sets every group aside"
            )
        if self.rollout.capacity < self.window.group_size:
            raise ValueError(
                f"rollout.capacity ({self.rollout.capacity}) must hold one group "
                f"(window.group_size = {self.window.group_size})"
            )
        longest = self.task.max_prompt_tokens + self.rollout.max_new_tokens
        if self.rollout.max_model_len is not None and self.rollout.max_model_len < longest:
            raise ValueError(
                f"rollout.max_model_len ({self.rollout.max_model_len}) is shorter than "
                f"task.max_prompt_tokens + rollout.max_new_tokens ({longest})"
            )
        self._schedule_fits()
        needed = BYTES_PER_TOKEN * self.max_model_len
        if self.kafka.max_message_bytes < needed:
            raise ValueError(
                f"kafka.max_message_bytes ({self.kafka.max_message_bytes}) is too small for "
                f"trajectories of {self.max_model_len} tokens: at least {needed}"
            )
        return self

    def _schedule_fits(self) -> None:
        kind, staleness = self.schedule.kind, self.window.max_staleness
        if kind == "sync" and staleness != 0:
            raise ValueError(
                f"schedule.kind = sync needs window.max_staleness = 0, not {staleness}"
            )
        if kind == "one-step-off" and staleness != 1:
            raise ValueError(
                f"schedule.kind = one-step-off needs window.max_staleness = 1, not {staleness}"
            )
        if self.schedule.colocated and kind not in ("sync", "partial"):
            raise ValueError(f"schedule.colocated is for sync and partial, not for {kind}")
        if kind == "partial" and self.policy.lora is not None:
            raise ValueError("schedule.kind = partial trains all weights: remove policy.lora")
        adapters = self.rollout.adapters
        if self.policy.lora is not None and adapters is not None and adapters < staleness + 1:
            raise ValueError(
                f"rollout.adapters ({adapters}) must hold every live version "
                f"(window.max_staleness + 1 = {staleness + 1})"
            )
        emulated = self.rollout.engine == "emulated"
        if self.task.kind == "synthetic" and not emulated:
            raise ValueError("task.kind = synthetic is for rollout.engine = emulated")
        if self.rollout.workers_per_process > 1 and not emulated:
            raise ValueError("rollout.workers_per_process is for rollout.engine = emulated")
        cache = self.rollout.emulated.kv_cache_tokens
        if emulated and cache is not None and cache < self.max_model_len:
            raise ValueError(
                f"rollout.emulated.kv_cache_tokens ({cache}) cannot hold one sequence of "
                f"{self.max_model_len} tokens"
            )
        prompts = self.window.group_size * self.task.max_prompt_tokens
        if emulated and cache is not None and prompts > cache:
            raise ValueError(
                f"rollout.emulated.kv_cache_tokens ({cache}) cannot hold the prompts of one group "
                f"(window.group_size x task.max_prompt_tokens = {prompts})"
            )
        if self.trainer.streamed:
            check_streaming(self.trainer, self.policy.dtype, self.schedule.colocated)

    @property
    def run_directory(self) -> Path:
        """Directory of the run's files."""
        return self.run.directory / self.run.name

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the engine must hold."""
        return self.rollout.max_model_len or (
            self.task.max_prompt_tokens + self.rollout.max_new_tokens
        )

    def identity(self) -> dict[str, Any]:
        """What makes this run this run: everything that shapes its data and its updates.

        Two configurations with equal identity may continue one another. Where things run
        (addresses, directories, threads, timeouts) and how long (`trainer.steps`) is left out, and
        so is what a run does not use: older runs did not record it.
        """
        data = self.model_dump(mode="json")
        identity: dict[str, Any] = {
            "run": {"name": self.run.name, "seed": self.run.seed},
            "policy": {k: data["policy"][k] for k in ("model", "dtype")},
            "task": {k: v for k, v in data["task"].items() if k not in _UNIDENTIFYING},
            "window": {k: v for k, v in data["window"].items() if v is not None},
            "rollout": {
                k: data["rollout"][k]
                for k in ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids")
            },
            "trainer": {k: data["trainer"][k] for k in ("updates_per_step", "loss", "optimizer")},
            "kafka": {k: data["kafka"][k] for k in ("lanes", "dispatch_partitions")},
            "evaluation": data["evaluation"],
        }
        if self.policy.lora is not None:
            identity["policy"]["lora"] = data["policy"]["lora"]
        if self.schedule.kind != "dora":
            identity["schedule"] = {"kind": self.schedule.kind}
        if self.trainer.streamed:
            identity["trainer"]["streamed"] = True
        if self.trainer.engine != "deepspeed":
            identity["trainer"]["engine"] = self.trainer.engine
        if self.task.kind == "synthetic":
            for key in ("synthetic_prompts", "synthetic_prompt_tokens"):
                identity["task"][key] = data["task"][key]
        return identity

    def recorded(self) -> dict[str, Any]:
        """The whole configuration as the ledger keeps it, so that a run can be replayed without its
        file. How Kafka is reached (addresses, properties, registry) and credentials in a URL are
        left out."""
        data = self.model_dump(mode="json")
        for key in ("bootstrap_servers", "properties", "registry"):
            data["kafka"].pop(key)
        for section, key in (("weights", "store"), ("traces", "endpoint")):
            url = data[section][key]
            if url is not None and "@" in url:
                data[section][key] = re.sub(r"(?<=://)[^/]*@", "", url)
        return data
