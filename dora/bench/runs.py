"""One measured run: its processes are started, its ledger is followed until enough steps are
committed, and the processes are ended.

When `run_steps` returns or raises, no process of the run is left. A process that dies ends the run
with an error and is not started again: a repaired run would measure the repair.
"""

import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import psutil

from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.config import Config
from dora.core.audit.report import AuditReport
from dora.errors import DeadlineError
from dora.schemas.records import Step

Report = Callable[[str], None]
"""Gets a line for people."""
Cores = Mapping[str, frozenset[int]]
"""Processors by the name of a process; `rollout` stands for every worker."""

_POLL_SECONDS = 0.5
_STOP_SECONDS = 20.0


class ProcessState(Protocol):
    """A process of the run at one moment."""

    @property
    def state(self) -> str:
        """`done` once its work is finished."""


class Processes(Protocol):
    """The processes of one run."""

    def start(self) -> None:
        """Start all of them."""

    def poll(self) -> None:
        """Notice ends; SupervisionError if a process died."""

    def views(self) -> Sequence[ProcessState]:
        """All of them now."""

    def stop(self, grace: float) -> None:
        """End them; those that do not end within `grace` seconds are killed."""


class Launcher(Protocol):
    """How runs are started on this machine. A run's configuration is a file and what is changed in
    it (`sets`)."""

    def load(self, path: Path, sets: Sequence[str]) -> Config:
        """The configuration; ConfigError if it is impossible."""

    def find_cluster(self, config: Config, report: Report) -> Config:
        """The configuration with a cluster: the given one, or the local broker, started if none
        runs."""

    def prepare(self, config: Config, path: Path, sets: Sequence[str], report: Report) -> None:
        """Make the starting policy if it is missing, before any clock runs."""

    def processes(
        self, config: Config, path: Path, sets: Sequence[str], cores: Cores | None = None
    ) -> Processes:
        """The processes of the run, not started yet; none of them is restarted when it dies."""


def run_steps(
    config: Config,
    processes: Processes,
    settings: ClusterSettings,
    *,
    warmup: int,
    steps: int,
    report: Report,
    ends_by_itself: bool = False,
) -> float:
    """Start the run's processes and end them once `warmup + steps` steps are committed, or with
    `ends_by_itself` when they have ended. Returns the share of this machine's processors that any
    process used during the measured steps.

    SupervisionError if a process dies, DeadlineError if no step is committed for
    `trainer.batch_timeout_seconds`.
    """
    TopicAdmin(settings).create(topic_plan(config))
    topics = RunTopics(config.run.name)
    with closing(LogReader(settings, client_id=f"{config.run.name}.bench")) as reader:
        reader.assign({(topics.steps, 0): BEGINNING})
        try:
            processes.start()
            return _follow(
                config, processes, reader, warmup, warmup + steps, report, ends_by_itself
            )
        finally:
            processes.stop(_STOP_SECONDS)


def violations_of(audit: AuditReport, *, partial: bool) -> tuple[int, int]:
    """How often the run broke a rule, and how many trajectories have several versions by design:
    `partial` rollouts do."""
    broken = dict(audit.violations)
    mixed = broken.pop("mixed_version") if partial else 0
    return sum(broken.values()), mixed


def remove_run(config: Config, settings: ClusterSettings) -> None:
    """Delete topics and files of a finished run."""
    with TopicAdmin(settings) as admin:
        admin.delete(config.run.name)
    shutil.rmtree(config.run_directory)


def run_name(schedule: str) -> str:
    """A name of its own for a run of this schedule."""
    return f"bench-{re.sub('[^a-z0-9]+', '-', schedule)}-{uuid.uuid4().hex[:8]}"


def _follow(
    config: Config,
    processes: Processes,
    reader: LogReader,
    warmup: int,
    target: int,
    report: Report,
    ends_by_itself: bool,
) -> float:
    limit = config.trainer.batch_timeout_seconds + config.rollout.load_timeout_seconds
    done, last, share = 0, time.monotonic(), 0.0
    psutil.cpu_percent()
    while True:
        processes.poll()
        for message in reader.poll(timeout=_POLL_SECONDS):
            last = time.monotonic()
            if not isinstance(message.value, Step) or message.value.kind != "step":
                continue
            done = message.value.version_out
            report(f"step {done} of {target}")
            if done == warmup:
                psutil.cpu_percent()  # the share is counted from here on
            if done == target:
                share = psutil.cpu_percent() / 100
        over = all(view.state == "done" for view in processes.views())
        if done >= target and (over or not ends_by_itself):
            return share
        if time.monotonic() - last > limit:
            raise DeadlineError(
                f"run {config.run.name} committed no step for {limit:g} s",
                hint=f"See the logs in {config.run_directory / 'logs'}.",
            )
