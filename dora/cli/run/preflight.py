"""Everything that can be checked before a run starts (`dora run --dry-run`).

Nothing is started, made or written, and one problem does not hide another.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dora.cli.run.prepare import needs_preparation
from dora.config import Config
from dora.errors import DoraError, PolicyError, RunError, TaskError

if TYPE_CHECKING:
    from dora.producers.tasks.base import Task

Outcome = Literal["ok", "plan", "problem"]

CHECKS = {
    "hooks": "`policy.prepare`, `task.render` and `task.verifier` can be imported",
    "model": "the model's directory is whole, its tokenizer loads and belongs to it, and prompt "
    "and response fit its positions (vLLM)",
    "stop tokens": "shows which tokens end a response",
    "prompts": "every row of the data can be read, rendered and encoded, and is short enough; "
    "there are as many held-out prompts as `evaluation.prompts`; shows the first",
    "verifier": "scores of real rows: the reference twice, an empty response; each a finite number",
    "libraries": "what the engines and the task need is installed",
    "metrics": "what `metrics.wandb` and `metrics.mlflow` need is installed",
    "traces.endpoint": "what traces need is installed",
    "run directory": "can be written",
    "kafka": "the cluster answers",
    "schema registry": "answers, where one is set",
    "topics": "those that are there have the right shape, limits and retention",
    "processes": "shows which would be started",
}
"""What is looked at, by subject, besides all that reading the configuration checks (types, ranges,
keys that fit together, DeepSpeed's own keys)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `ok`, `plan` (what would be done), or `problem`."""

    subject: str
    outcome: Outcome
    detail: str


def preflight(config: Config, broker_directory: Path) -> list[Check]:
    """All findings, in the order in which `dora run` would meet them."""
    checks: list[Check] = []
    for subject, check in (
        ("hooks", _hooks),
        ("model", _model),
        ("prompts", _prompts),
        ("libraries", _libraries),
        ("traces.endpoint", _watching),
        ("run directory", _run_directory),
    ):
        checks += _guarded(subject, check, config)
    checks += _guarded("kafka", lambda each: _kafka(each, broker_directory), config)
    checks.append(Check("processes", "plan", f"start {', '.join(process_names(config))}"))
    return checks


def check_machine(config: Config) -> None:
    """RunError with what this machine lacks, as far as it is seen without loading anything: before
    a run makes its topics."""
    found = [
        check
        for subject, look in (
            ("libraries", _libraries),
            ("traces.endpoint", _watching),
            ("run directory", _run_directory),
        )
        for check in _guarded(subject, look, config)
        if check.outcome == "problem"
    ]
    if found:
        raise RunError("; ".join(f"{check.subject}: {check.detail}" for check in found))


def process_names(config: Config) -> list[str]:
    """The processes of a run on one machine; one with several workers is named by its first."""
    rollout = config.rollout
    workers = [f"w{number}" for number in range(0, rollout.workers, rollout.workers_per_process)]
    return ["coordinator", "trainer", *workers]


def _guarded(
    subject: str, check: Callable[[Config], Iterator[Check]], config: Config
) -> list[Check]:
    found: list[Check] = []
    try:
        for each in check(config):
            found.append(each)
    except DoraError as error:
        found.append(Check(subject, "problem", str(error)))
    return found


def _hooks(config: Config) -> Iterator[Check]:
    from dora.producers.tasks.hooks import load_hook

    hooks = (
        ("policy.prepare", config.policy.prepare),
        ("task.render", config.task.render),
        ("task.verifier", config.task.verifier),
    )
    for setting, reference in hooks:
        if reference is None:
            continue
        try:
            load_hook(reference, config.home, setting)
        except DoraError as error:
            yield Check(setting, "problem", str(error))
        else:
            yield Check(setting, "ok", reference)


def _model(config: Config) -> Iterator[Check]:
    from dora.producers.tasks.tokenization import load_tokenizer, stop_token_ids
    from dora.weights.models import (
        check_length,
        check_model_directory,
        emulated_vocabulary,
        looks_like_path,
    )

    model = Path(config.policy.model)
    if config.trainer.engine == "emulated" and config.task.kind == "synthetic":
        size = emulated_vocabulary(config.policy.model)
        yield Check("model", "ok", f"none: a vocabulary of {size} tokens")
        return
    if needs_preparation(config):
        yield Check("model", "plan", f"make {model} with {config.policy.prepare}")
        return
    if not model.exists():
        if looks_like_path(config.policy.model):
            raise PolicyError(f"policy.model: there is no directory {model.absolute()}")
        yield Check("model", "plan", f"get {model} from Hugging Face unless it is cached")
        return
    check_model_directory(model)
    tokenizer = load_tokenizer(config.policy, config.task.template_date)
    if config.rollout.engine == "vllm":
        check_length(config)
    yield Check("model", "ok", f"{model}, tokenizer {tokenizer.name}")
    stops = [
        f"{token} {tokenizer.decode([token], special_tokens=True)!r}"
        for token in stop_token_ids(config, tokenizer)
    ]
    yield Check("stop tokens", "ok", ", ".join(stops))


class _Words:
    """Replaces the tokenizer of a model that is not made yet: a word is a token."""

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(range(len(re.findall(r"\S+", text))))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(str(message["content"]) for message in messages)


def _prompts(config: Config) -> Iterator[Check]:
    from dora.producers.tasks.base import TextTokenizer
    from dora.producers.tasks.kinds import create_task
    from dora.producers.tasks.tokenization import tokenizer_of

    here = Path(config.policy.model).exists() or config.task.kind == "synthetic"
    tokenizer: TextTokenizer = tokenizer_of(config) if here else _Words()
    task = create_task(config, tokenizer)
    prompt = task.prompt(0, "train")
    if config.evaluation.prompts:
        task.prompt(0, "eval")
    text = " ".join(prompt.text.split())
    yield Check("prompts", "ok", f"{task.name}; the first: {text[:80]!r}")
    yield from _guarded("verifier", lambda each: _verifier(each, task), config)


def _verifier(config: Config, task: "Task") -> Iterator[Check]:
    """Scores of real rows. The emulated engine makes no text that a verifier could judge, and one
    that cannot be loaded was named before."""
    from dora.producers.tasks.hooks import load_hook
    from dora.producers.worker.verifier_trial import summary, try_verifier

    if config.rollout.engine == "emulated":
        return
    if config.task.verifier is not None:
        try:
            load_hook(config.task.verifier, config.home, "task.verifier")
        except TaskError:
            return
    yield Check("verifier", "ok", summary(try_verifier(config, task)))


def _libraries(config: Config) -> Iterator[Check]:
    wanted = ["torch", "deepspeed"] if config.trainer.engine == "deepspeed" else []
    if config.task.kind != "synthetic":
        wanted.append("transformers")
    if config.rollout.engine == "vllm":
        wanted.append("vllm")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        yield Check(
            "libraries",
            "problem",
            f"not installed: {', '.join(missing)}; `dora doctor` says how to get them",
        )
    else:
        yield Check("libraries", "ok", ", ".join(wanted) or "none needed")


def _watching(config: Config) -> Iterator[Check]:
    """Configured trackers and traces that need packages of their own."""
    from dora.telemetry.trackers import missing

    for package in ("wandb", "mlflow"):
        if getattr(config.metrics, package) and importlib.util.find_spec(package) is None:
            yield Check(f"metrics.{package}", "problem", str(missing(package)))
    if config.traces.endpoint is not None:
        import dora.telemetry.span_export  # noqa: F401 - which says what it lacks


def _run_directory(config: Config) -> Iterator[Check]:
    directory = config.run_directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Check("run directory", "problem", f"cannot write to {existing}")
    elif existing == directory:
        yield Check("run directory", "ok", f"{directory} is there; the run would go on")
    else:
        yield Check("run directory", "plan", f"make {directory}")


def _kafka(config: Config, broker_directory: Path) -> Iterator[Check]:
    from dora.broker.local import running_broker
    from dora.bus.settings import cluster_settings
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.cli.options import with_broker

    if config.kafka.bootstrap_servers is None:
        broker = running_broker(broker_directory)
        if broker is None:
            yield Check("kafka", "plan", f"start a local broker in {broker_directory}")
            yield Check("topics", "plan", f"create the topics of {config.run.name}")
            return
        config = with_broker(config, broker.bootstrap_servers)
    settings = cluster_settings(config.kafka)
    admin = TopicAdmin(settings)
    admin.ping()
    yield Check("kafka", "ok", f"{config.kafka.bootstrap_servers} answers")
    if settings.registry is not None:
        settings.registry.ping()
        yield Check("schema registry", "ok", f"{settings.registry.url} answers")
    if admin.describe(config.run.name):
        admin.verify(topic_plan(config))
        yield Check("topics", "ok", f"the topics of {config.run.name} are there")
    else:
        yield Check("topics", "plan", f"create the topics of {config.run.name}")
