"""Whether a process may take part in the run that the topics hold.

A process that starts on another cluster, on topics that were made anew, with another value of a key
that may not change (`dora.config.changes`) or with other inputs than the run was started with, ends
before it writes anything and before it takes over from a running one.
"""

import socket
import time
from collections.abc import Sequence

import psutil

from dora.bus.reader import BEGINNING, LogReader, Message
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.config import Config
from dora.config.changes import rule_of
from dora.errors import RunError, UncommittedError
from dora.log.inputs import check_inputs
from dora.log.presence import ProcessView, recent_statuses
from dora.log.recorded_config import fixed_differences
from dora.schemas.records import Policy, RunStarted, Status

READ_SECONDS = 60.0


def check_configuration(started: RunStarted, config: Config, newest: int) -> None:
    """RunError, with each key and why it cannot change, unless `config` may continue the run, whose
    newest version is `newest`."""
    run, changed = started.run, fixed_differences(started, config)
    if not changed:
        return
    told = "; ".join(f"{key}: {values}" for key, values in changed.items())
    text = f"run {run} was started with another configuration: {told}"
    if newest < 1:
        raise UncommittedError(text, hint=begin_anew(run))
    why = dict.fromkeys(rule_of(key).why for key in changed)
    raise RunError(
        f"{text}. What stays as it was, and why: " + "; ".join(why),
        hint="Restore the recorded values. To train on from the last step with these: "
        f"`dora run CONFIG --from {run}@{newest} --as NEWRUN`.",
    )


def begin_anew(run: str) -> str:
    """What to do where no step is committed."""
    return (
        "No step is committed yet: `dora run CONFIG` begins anew while no process of the run is at "
        f"work, and so do `dora topics delete {run} --yes` and `dora topics create CONFIG`."
    )


def check_continues(
    started: RunStarted, config: Config, cluster_id: str, topic_ids: dict[str, str], newest: int
) -> None:
    """RunError, with the differences, unless `config` on this cluster continues the run, whose
    newest version is `newest`."""
    run = started.run
    check_configuration(started, config, newest)
    if started.cluster_id != cluster_id:
        raise RunError(
            f"run {run} was started on Kafka cluster {started.cluster_id}, this is {cluster_id}",
            hint="Give the recorded cluster with kafka.bootstrap_servers; offsets of another one "
            "mean nothing.",
        )
    replaced = sorted(
        name for name, topic_id in started.topic_ids.items() if topic_ids.get(name) != topic_id
    )
    if replaced:
        raise RunError(
            f"{', '.join(replaced)}: deleted and created anew since run {run} was started",
            hint="What the ledger refers to is gone. Give run.name another value.",
        )


def recorded_start(run: str, settings: ClusterSettings) -> RunStarted | None:
    """The ledger's first record; None where the run has not begun, or cannot be read."""
    with LogReader(settings, client_id="continuation") as reader:
        reader.assign({(RunTopics(run).steps, 0): BEGINNING})
        first = next(iter(reader.read_to_end(READ_SECONDS)), None)
    return first.value if first is not None and isinstance(first.value, RunStarted) else None


def check_recorded(config: Config, settings: ClusterSettings, *, inputs: bool = False) -> None:
    """RunError, with the differences, unless `config` on this cluster continues the run of the
    ledger's first record; UncommittedError where that run has committed no step. A run that has not
    begun takes any configuration.

    With `inputs`, for processes that need prompts or scores, also the files and functions that the
    configuration names must be those of the newest policy record (`dora.log.inputs`). Unreadable
    records are left to the processes that need them.
    """
    run = config.run.name
    with TopicAdmin(settings) as admin:
        if RunTopics(run).steps not in admin.existing(run):
            return  # what needs it says so, and whether it may only not be seen
    started = recorded_start(run, settings)
    if started is None:
        return
    policy = _newest_policy(run, settings)
    newest = 0 if policy is None else policy.version
    with TopicAdmin(settings) as admin:
        check_continues(started, config, admin.cluster_id(), admin.topic_ids(run), newest)
    if inputs:
        try:
            check_inputs(run, started.inputs if policy is None else policy.inputs, config)
        except RunError as error:
            if newest > 0:
                raise
            raise UncommittedError(error.message, hint=begin_anew(run)) from error


def newest_version(run: str, settings: ClusterSettings) -> int:
    """The newest version that the run announced; 0 before its first step."""
    policy = _newest_policy(run, settings)
    return 0 if policy is None else policy.version


def check_idle(config: Config, settings: ClusterSettings) -> None:
    """RunError, naming it, if a process of the run still reports."""
    topics, host = RunTopics(config.run.name), socket.gethostname()
    statuses: dict[str, Status] = {}
    with LogReader(settings, client_id="continuation") as reader:
        reader.assign(recent_statuses(reader, topics))
        for message in reader.read_to_end(READ_SECONDS):
            if isinstance(message.value, Status):
                statuses[message.value.process] = message.value
    for status in statuses.values():
        view = ProcessView.of(
            status,
            time.time_ns() // 1_000_000,
            heartbeat_timeout=config.rollout.heartbeat_timeout_seconds,
            load_timeout=config.rollout.load_timeout_seconds,
        )
        if view.alive and not (view.host == host and not psutil.pid_exists(view.pid)):
            raise RunError(
                f"{view.process} of run {config.run.name} ({view.place}) is at work: it reported "
                f"{view.age_seconds:.0f} s ago",
                hint="Stop the run's processes first, or give run.name another value.",
            )


def _newest_policy(run: str, settings: ClusterSettings) -> Policy | None:
    with LogReader(settings, client_id="continuation") as reader:
        found = reader.read_back((RunTopics(run).policies, 0), _has_policy, READ_SECONDS)
    return next(
        (message.value for message in reversed(found) if isinstance(message.value, Policy)), None
    )


def _has_policy(messages: Sequence[Message]) -> bool:
    return any(isinstance(message.value, Policy) for message in messages)
