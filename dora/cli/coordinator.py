"""`dora coordinator`: the one process that decides what starts where."""

import signal
import threading

import click

from dora.cli.options import Command, config_argument
from dora.cli.process_log import log_to_stderr
from dora.config import Config


@click.command(cls=Command)
@config_argument
def coordinator(config: Config) -> None:
    """Run the coordinator of the run that CONFIG describes.

    It rebuilds its state from the log, takes over from an older coordinator, and ends when the run
    is complete.
    """
    from dora.bus.acls import check_rights
    from dora.bus.settings import cluster_settings
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.log.continuation import check_recorded
    from dora.producers.coordinator.coordinator import Coordinator
    from dora.telemetry import observed

    log_to_stderr()
    settings = cluster_settings(config.kafka)
    check_rights("coordinator", config.run.name, settings)
    check_recorded(config, settings)
    TopicAdmin(settings).verify(topic_plan(config))
    stop = stop_on_signals()
    with observed(config, "coordinator", "coordinator"):
        Coordinator(config, settings).run(stop)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set, so that a process ends between two turns."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
