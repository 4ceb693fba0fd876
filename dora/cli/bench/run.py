"""One measured run: started, followed by its ledger until enough steps are committed, ended.

When `run_steps` returns or raises, no process of the run is left. A process that dies ends the run
with an error instead of being restarted: otherwise the measurement would include the repair.
"""

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from dora.broker.local import running_broker, start_broker
from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.cli.options import ConfigSource, with_broker
from dora.cli.run.processes import child_specs
from dora.cli.run.supervisor import ChildSpec, Supervisor
from dora.config import Config
from dora.errors import DeadlineError
from dora.schemas.records import Step


def figures_table(title: str, heads: Sequence[str]) -> Table:
    """An empty table: names in the first column, figures in the others."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table


def spread(summary: dict[str, Any], name: str, form: str) -> str:
    """A mean with its range, if there is one."""
    if summary[name] is None:
        return "-"
    low, high = (form.format(value) for value in summary["spread"][name])
    text = form.format(summary[name])
    return text if low == high else f"{text} ({low}-{high})"


def staleness(summary: dict[str, Any]) -> str:
    """Mean and largest staleness."""
    return f"{summary['staleness_mean']:.2f} / {summary['staleness_max']}"


def violations(summary: dict[str, Any]) -> Text:
    """Violations of the rules, and apart from them versions mixed by design."""
    text = Text(str(summary["violations"]))
    text.stylize("bold red" if summary["violations"] else "green")
    if summary.get("mixed_version"):
        text.append(f" + {summary['mixed_version']} mixed by design", style="yellow")
    return text


Report = Callable[[str], None]
Cores = Mapping[str, frozenset[int]]
"""Processors by the name of a process; `rollout` stands for every worker."""

_POLL_SECONDS = 0.5
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Followed:
    """What was seen from outside: how long the measured steps took, and the share of all of this
    machine's processors that was in use meanwhile, by whomever."""

    wall_seconds: float
    processor_share: float


def find_cluster(config: Config, broker_directory: Path, report: Report) -> Config:
    """The configuration with a cluster: the one given, or the local broker, started if need be."""
    if config.kafka.bootstrap_servers is not None:
        return config
    broker = running_broker(broker_directory)
    if broker is None:
        report(f"starting a local Kafka broker in {broker_directory}")
        broker = start_broker(broker_directory)
    return with_broker(config, broker.bootstrap_servers)


def run_steps(
    config: Config,
    source: ConfigSource,
    settings: ClusterSettings,
    *,
    warmup: int,
    steps: int,
    report: Report,
    cores: Cores | None = None,
    ends_by_itself: bool = False,
) -> Followed:
    """Start the run's processes and end them once `warmup + steps` steps are committed, or with
    `ends_by_itself` when they have ended.

    SupervisionError if a process dies, DeadlineError if no step is committed for
    `trainer.batch_timeout_seconds`.
    """
    TopicAdmin(settings).create(topic_plan(config))
    specs = [_pinned(spec, cores or {}) for spec in child_specs(config, source)]
    supervisor = Supervisor(
        specs, config.run_directory / "logs", max_restarts=0, on_event=lambda text: None
    )
    topics = RunTopics(config.run.name)
    with closing(LogReader(settings, client_id=f"{config.run.name}.bench")) as reader:
        reader.assign({(topics.steps, 0): BEGINNING})
        try:
            supervisor.start()
            return _follow(
                config, supervisor, reader, warmup, warmup + steps, report, ends_by_itself
            )
        finally:
            supervisor.stop(_STOP_SECONDS)


def run_name(schedule: str) -> str:
    """A name of its own for a run of this schedule."""
    return f"bench-{re.sub('[^a-z0-9]+', '-', schedule)}-{uuid.uuid4().hex[:8]}"


def _follow(
    config: Config,
    supervisor: Supervisor,
    reader: LogReader,
    warmup: int,
    target: int,
    report: Report,
    ends_by_itself: bool,
) -> Followed:
    patience = config.trainer.batch_timeout_seconds + config.rollout.load_timeout_seconds
    done, heard, began, share = 0, time.monotonic(), time.monotonic(), 0.0
    psutil.cpu_percent()
    while True:
        supervisor.poll()
        for message in reader.poll(timeout=_POLL_SECONDS):
            heard = time.monotonic()
            if not isinstance(message.value, Step) or message.value.kind != "step":
                continue
            done = message.value.version_out
            report(f"step {done} of {target}")
            if done == warmup:
                psutil.cpu_percent()  # the share is counted from here on
                began = time.monotonic()
            if done == target:
                share = psutil.cpu_percent() / 100
        over = all(view.state == "done" for view in supervisor.views())
        if done >= target and (over or not ends_by_itself):
            return Followed(heard - began, share)
        if time.monotonic() - heard > patience:
            raise DeadlineError(
                f"run {config.run.name} committed no step for {patience:g} s",
                hint=f"See the logs in {config.run_directory / 'logs'}.",
            )


def _pinned(spec: ChildSpec, cores: Cores) -> ChildSpec:
    role = spec.name if spec.name in ("coordinator", "trainer") else "rollout"
    return replace(spec, cores=cores[role]) if role in cores else spec
