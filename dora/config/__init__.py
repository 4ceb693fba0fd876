"""The configuration of a run: one TOML file, every key typed, documented and checked.

What contradicts itself is refused while it is read, before any process starts, with the name of the
key. The docstring under each field is its documentation (`docs/configuration.md` is generated from
them).
"""

import re
from pathlib import Path
from typing import Any

from pydantic import model_validator

from dora.config.kafka import KafkaSection
from dora.config.observability import LineageSection, MetricsSection, TracesSection
from dora.config.policy import PolicySection
from dora.config.rollout import RolloutSection
from dora.config.run import EvaluationSection, RunSection, WeightsSection
from dora.config.section import Section
from dora.config.task import TaskSection
from dora.config.trainer import RecoverySection, TrainerSection, check_streaming
from dora.config.window import ScheduleSection, WindowSection
from dora.core.window import Window

__all__ = [
    "Config",
    "KafkaSection",
    "PolicySection",
    "RunSection",
    "TaskSection",
    "WindowSection",
    "window_of",
]

BYTES_PER_TOKEN = 16
"""What a token of a trajectory record takes at most: id, log-probability, mask and its text."""
_UNIDENTIFYING = (
    "verifier_timeout_seconds",
    "verifier_processes",
    "synthetic_prompts",
    "synthetic_prompt_tokens",
)


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
        if self.window.group_size == 1 and self.trainer.engine == "deepspeed":
            raise ValueError(
                "window.group_size = 1 teaches nothing: an advantage is a reward less the mean of "
                "its group, so it is 0 for each; take 2 or more, 8 is usual"
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
        if self.trainer.engine == "emulated" and not emulated:
            raise ValueError(
                "trainer.engine = emulated publishes no weights that rollout.engine = "
                f"{self.rollout.engine} could load: set rollout.engine = emulated as well, or "
                "trainer.engine = deepspeed"
            )
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
        if self.task.template_date == TaskSection.model_fields["template_date"].default:
            del identity["task"]["template_date"]
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


def window_of(config: Config) -> Window:
    """The window of a run, its budget of tokens included."""
    section = config.window
    return Window(section.max_staleness, section.groups_per_step, section.tokens_per_step)
