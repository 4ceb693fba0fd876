"""Whether a process may take part in the run that the topics hold.

A process that starts on another cluster, on topics that were made anew, with another configuration
or with other inputs than the run was started with, ends before it writes anything and before it
takes over from a running one.
"""

import json
from collections.abc import Sequence

from dora.bus.reader import BEGINNING, LogReader, Message
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.config import Config
from dora.core.identity import differences
from dora.errors import RunError
from dora.log.inputs import check_inputs
from dora.schemas.records import Policy, RunStarted

READ_SECONDS = 60.0


def check_continues(
    started: RunStarted, config: Config, cluster_id: str, topic_ids: dict[str, str]
) -> None:
    """RunError, with the differences, unless `config` on this cluster continues the run."""
    run = started.run
    changed = differences(json.loads(started.identity), json.loads(json.dumps(config.identity())))
    if changed:
        raise RunError(
            f"run {run} was started with another configuration: " + "; ".join(changed),
            hint="Restore the recorded values, or give run.name another value.",
        )
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
    ledger's first record. A run that has not begun takes any configuration.

    With `inputs`, for processes that need prompts or scores, also the files and functions that the
    configuration names must be those of the newest policy record (`dora.log.inputs`). Unreadable
    records are left to the processes that need them.
    """
    run = config.run.name
    topics = RunTopics(run)
    started = recorded_start(run, settings)
    if started is None:
        return
    with TopicAdmin(settings) as admin:
        check_continues(started, config, admin.cluster_id(), admin.topic_ids(run))
    if inputs:
        with LogReader(settings, client_id="continuation") as reader:
            newest = _policies(reader.read_back((topics.policies, 0), _has_policy, READ_SECONDS))
        check_inputs(run, newest[-1].inputs if newest else started.inputs, config)


def _policies(messages: Sequence[Message]) -> list[Policy]:
    return [message.value for message in messages if isinstance(message.value, Policy)]


def _has_policy(messages: Sequence[Message]) -> bool:
    return bool(_policies(messages))
