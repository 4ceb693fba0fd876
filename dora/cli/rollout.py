"""`dora rollout`: one rollout worker."""

import os
import socket

import click

from dora.cli.coordinator import stop_on_signals
from dora.cli.options import Command, config_argument
from dora.cli.process_log import log_to_stderr
from dora.config import Config


@click.command(cls=Command)
@click.option(
    "--worker-id",
    default=None,
    metavar="ID",
    help="Name of this worker; unique in the run, and the same after a restart. "
    "By default made of host name and process id.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Emulated workers that this process hosts; their names count on from ID "
    "(w4 with 4 workers: w4 to w7). By default rollout.workers_per_process.",
)
@config_argument
def rollout(config: Config, worker_id: str | None, workers: int | None) -> None:
    """Run a rollout worker of the run that CONFIG describes, or several emulated ones.

    Each hosts one engine, generates what the coordinator orders, and ends on its command.
    """
    from dora.bus.acls import check_rights
    from dora.bus.settings import cluster_settings
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.log.continuation import check_recorded
    from dora.producers.worker.process import run_workers
    from dora.telemetry import observed

    log_to_stderr()
    settings = cluster_settings(config.kafka)
    check_rights("rollout", config.run.name, settings)
    check_recorded(config, settings, inputs=True)
    TopicAdmin(settings).verify(topic_plan(config))
    name = worker_id or f"{socket.gethostname()}-{os.getpid()}"
    count = workers or config.rollout.workers_per_process
    with observed(config, "rollout", name):
        run_workers(config, settings, name, stop_on_signals(), count=count)
