"""`dora train`: the trainer."""

import click

from dora.cli.coordinator import stop_on_signals
from dora.cli.options import config_argument
from dora.cli.process_log import log_to_stderr
from dora.config import Config


@click.command()
@config_argument
def train(config: Config) -> None:
    """Run the trainer of the run that CONFIG describes.

    It picks batches of finished groups, trains on them, publishes the new version and commits the
    step. Started again, it goes on where the ledger ends. It ends after trainer.steps.
    """
    from dora.bus.settings import cluster_settings
    from dora.consumers.trainer import Trainer

    log_to_stderr()
    Trainer(config, cluster_settings(config.kafka)).run(stop_on_signals())
