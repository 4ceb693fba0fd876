"""`dora import --serve`: exported trajectories in place of coordinator and workers."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dora.bus.settings import cluster_settings
from dora.cli.options import ConfigSource, local_broker, print_line, with_broker
from dora.cli.process_log import log_to_stderr
from dora.config.loading import KafkaOverrides, load_config
from dora.producers.tasks.import_files import find_files


def serve_files(
    paths: Sequence[Path],
    config_path: Path,
    sets: tuple[str, ...],
    wait: float,
    overrides: KafkaOverrides,
    broker_directory: Path,
    as_json: bool,
) -> None:
    """Make the topics of the configured run, and feed its trainer from the files. Raises as
    `FileRecording` and `ReplayServer` do."""
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.cli.coordinator import stop_on_signals
    from dora.producers.replay.exported import FileRecording
    from dora.producers.replay.serving import ReplayServer

    log_to_stderr()
    config = load_config(config_path, sets=sets, kafka=overrides)
    if config.kafka.bootstrap_servers is None:
        config = with_broker(config, local_broker(broker_directory))
    settings = cluster_settings(config.kafka)
    recording = FileRecording(find_files(paths), config)
    with TopicAdmin(settings) as admin:
        new = admin.create(topic_plan(config), exist_ok=True)
    source = ConfigSource(config_path, sets, broker_directory)
    command = ["dora", "train", *source.arguments(config)]
    stream = sys.stderr if as_json else sys.stdout
    made = f"made the topics of {recording.name}; " if new else ""
    click.echo(
        f"{made}start its trainer beside this command:\n  {shlex.join(command)}", file=stream
    )
    stream.flush()
    server = ReplayServer(recording, config, settings, speed=math.inf, wait=wait)
    report = server.serve(stop_on_signals())
    if as_json:
        print_line(json.dumps(report.to_json() | {"left_out": recording.left_out}, indent=2))
        return
    print_line(f"{report.outcome}: {report.run} is at version {report.version}")
    print_line(
        f"served {report.groups:,} of {report.recorded_groups:,} groups with "
        f"{report.trajectories:,} trajectories in {report.seconds:.1f} s from files of run "
        f"{report.source}"
    )
    if recording.left_out:
        print_line(
            f"{recording.left_out:,} groups were left out: they, or a prompt before them, are not "
            "whole in the files"
        )
    print_line(f"an export has no chunks: `dora audit {report.run} --no-chunks` checks the rest")
