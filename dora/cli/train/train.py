"""`dora train`: the trainer."""

import os

import click

from dora.cli.coordinator import stop_on_signals
from dora.cli.options import config_argument, config_source
from dora.cli.process_log import log_to_stderr
from dora.config import Config
from dora.errors import ExitCode


@click.command()
@click.option(
    "--fail-incomplete",
    is_flag=True,
    help=f"End with exit code {ExitCode.INCOMPLETE} instead of 0 when asked to end before "
    "trainer.steps are committed: for supervisors that take 0 for done, such as a Kubernetes Job.",
)
@config_argument
def train(config: Config, fail_incomplete: bool) -> None:
    """Run the trainer of the run that CONFIG describes.

    It picks batches of finished groups, trains on them, publishes the new version and commits the
    step. Started again, it goes on where the ledger ends. It ends after trainer.steps.

    With trainer.ranks it starts that many processes on this machine, which share the training. A
    launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT may start them
    instead.
    """
    from dora.cli.train.rank_launch import follow_launcher, run_ranks

    log_to_stderr()
    follow_launcher()
    context = click.get_current_context()
    if config.trainer.ranks > 1 and "RANK" not in os.environ:
        options = ("--fail-incomplete",) if fail_incomplete else ()
        source, supervised = config_source(), bool(context.obj)
        context.exit(run_ranks(config, source, options, supervised=supervised))

    from dora.bus.settings import cluster_settings
    from dora.consumers.learner.ranks import Member, joined
    from dora.consumers.trainer.trainer import Trainer
    from dora.log.continuation import check_recorded
    from dora.telemetry.start import observed

    settings = cluster_settings(config.kafka)
    # Before the trainer takes over from a running one: what is refused must end nothing.
    check_recorded(config, settings, inputs=True)
    stop = stop_on_signals()  # looked at by rank 0 only, which the others follow
    with joined(config) as ranks:
        if isinstance(ranks, Member):
            # with torch, which a trainer that only waits does without
            from dora.consumers.learner.rank_follower import RankFollower

            complete = RankFollower(config, settings, ranks).run()
        else:
            with observed(config, "trainer", "trainer", settings):
                trainer = Trainer(config, settings, ranks)
                trainer.run(stop)
            complete = trainer.complete
            if ranks is not None:
                ranks.complete = complete
    if fail_incomplete and not complete:
        context.exit(ExitCode.INCOMPLETE)
