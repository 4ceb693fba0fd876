"""The runs of a cluster, each by the ends of its ledger and of its statuses."""

import fnmatch
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dora.bus.reader import LogReader, Message
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.errors import ConfigError, DeadlineError, RunError, TopicError
from dora.log.presence import ProcessView, recent_statuses
from dora.schemas.records import RunStarted, Status, Step

READ_SECONDS = 10.0
_READERS = 16


State = Literal["empty", "running", "stopped", "complete", "unreadable"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run at a glance. `state` is `running` while a process reports, `complete` after the last
    step that was asked for, `empty` before the first record, `unreadable` where `problem` says why;
    else `stopped`."""

    run: str
    state: State
    version: int
    steps: int | None
    """Steps that were asked for; None if no trainer's status is kept."""
    started_ms: int | None
    last_ms: int | None
    """When the newest of the records that were read was written, Unix time in milliseconds."""
    processes: int
    """Processes that report."""
    problem: str = ""


def list_runs(
    settings: ClusterSettings,
    pattern: str = "*",
    *,
    heartbeat_timeout: float,
    load_timeout: float,
) -> list[RunSummary]:
    """The runs of the cluster whose name fits the shell pattern, the newest last; those without a
    readable first record first.

    A run that cannot be read is `unreadable`. BusError if Kafka does not answer in time.
    """

    def summary(name: str) -> RunSummary:
        missing = sorted({RunTopics(name).steps, RunTopics(name).workers} - set(topics[name]))
        if missing:
            return _unreadable(name, f"there is no topic {missing[0]}")
        try:
            with LogReader(settings, client_id="dora-list") as reader:
                return _summary(reader, name, heartbeat_timeout, load_timeout)
        except (TopicError, ConfigError, DeadlineError) as error:
            return _unreadable(name, error.message)

    with TopicAdmin(settings) as admin:
        topics = {name: admin.existing(name) for name in fnmatch.filter(admin.list_runs(), pattern)}
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(summary, topics))
    return sorted(found, key=lambda run: (run.started_ms or 0, run.run))


def _unreadable(run: str, problem: str) -> RunSummary:
    return RunSummary(run, "unreadable", -1, None, None, None, 0, problem)


def newest_run(settings: ClusterSettings) -> str:
    """The run that was begun last; RunError if the cluster has none."""
    runs = list_runs(settings, heartbeat_timeout=30.0, load_timeout=600.0)
    if not runs:
        raise RunError(
            "the cluster has no run", hint="Begin one with `dora run`, or name another with -b."
        )
    return runs[-1].run


def _summary(
    reader: LogReader, run: str, heartbeat_timeout: float, load_timeout: float
) -> RunSummary:
    topics, now = RunTopics(run), time.time_ns() // 1_000_000
    ledger = (topics.steps, 0)
    entries = [m.value for m in reader.read_back(ledger, _has_step, READ_SECONDS)]
    started = _first(entries)
    if started is None and entries:
        reader.assign({ledger: reader.start_offsets([ledger])[ledger]})
        started = _first([m.value for m in reader.poll(1, READ_SECONDS)])
    reader.assign(recent_statuses(reader, topics))
    statuses = {
        m.value.process: m.value
        for m in reader.read_to_end(READ_SECONDS)
        if isinstance(m.value, Status)
    }
    views = [
        ProcessView.of(s, now, heartbeat_timeout=heartbeat_timeout, load_timeout=load_timeout)
        for s in statuses.values()
    ]
    steps = [entry for entry in entries if isinstance(entry, Step)]
    version = max([s.version_out for s in steps] + [-1 if started is None else 0])
    asked = [s.metrics["steps_target"] for s in statuses.values() if "steps_target" in s.metrics]
    target = int(asked[-1]) if asked else None
    alive = sum(view.alive for view in views)
    times = [s.created_ms for s in steps] + [s.created_ms for s in statuses.values()]
    state: State
    if alive:
        state = "running"
    elif target is not None and version >= target:
        state = "complete"
    else:
        state = "empty" if started is None else "stopped"
    return RunSummary(
        run=run,
        state=state,
        version=version,
        steps=target,
        started_ms=None if started is None else started.created_ms,
        last_ms=max(times, default=None if started is None else started.created_ms),
        processes=alive,
    )


def _has_step(messages: Sequence[Message]) -> bool:
    return any(isinstance(m.value, Step) for m in messages)


def _first(values: Sequence[object]) -> RunStarted | None:
    return next((value for value in values if isinstance(value, RunStarted)), None)
