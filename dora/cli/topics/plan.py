"""`dora topics plan`: what a run's topics take, before there are any.

It asks no cluster and creates nothing.
"""

import json

import click

from dora.bus.topics import topic_plan
from dora.cli.console import columns
from dora.cli.options import Command, config_argument, json_option, print_line
from dora.config import Config
from dora.core.sizing import Flow, Load, flows, kept_seconds, lanes_needed

_COLUMNS = ("topic", "partitions", "records/s", "MB/s", "kept", "GB")


@click.command(cls=Command)
@config_argument(broker=False)
@click.option(
    "--tokens-per-second", type=click.FloatRange(min=0, min_open=True), required=True, metavar="N",
    help="Tokens that all workers together generate per second.",
)  # fmt: skip
@click.option(
    "--response-tokens", type=click.FloatRange(min=1), metavar="N",
    help="Mean length of responses; by default rollout.max_new_tokens.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", type=click.FloatRange(min=0), metavar="N",
    help="Mean length of prompts; by default task.max_prompt_tokens.",
)  # fmt: skip
@click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True), default=24.0, show_default=True,
    metavar="N", help="Duration of the run.",
)  # fmt: skip
@click.option(
    "--brokers", type=click.IntRange(min=1), metavar="N",
    help="Brokers of the cluster; by default kafka.replication_factor.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Rollout workers; by default rollout.workers.",
)  # fmt: skip
@json_option
def plan(
    config: Config,
    tokens_per_second: float,
    response_tokens: float | None,
    prompt_tokens: float | None,
    hours: float,
    brokers: int | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Compute the sizes of the topics of the run that CONFIG describes.

    Sizes are those of the records sent, before compression, and on disk with all replicas. No
    cluster is needed.
    """
    replicas, retention = config.kafka.replication_factor, config.kafka.retention_hours
    load = Load(
        tokens_per_second=tokens_per_second,
        response_tokens=response_tokens or config.rollout.max_new_tokens,
        prompt_tokens=config.task.max_prompt_tokens if prompt_tokens is None else prompt_tokens,
        chunk_tokens=config.rollout.chunk_tokens,
        group_size=config.window.group_size,
        groups_per_step=config.window.groups_per_step,
        processes=(workers or config.rollout.workers) + 2,
        heartbeat_seconds=config.rollout.heartbeat_seconds,
    )
    kept_for = None if retention is None else retention * 3600.0
    sent, rows = flows(load), []
    for spec in topic_plan(config):
        suffix = spec.name.rpartition(".")[2]
        flow = sent.get(suffix, Flow(0.0, 0.0))
        seconds = kept_seconds(suffix, hours * 3600.0, kept_for)
        rows.append((spec, flow, seconds, replicas * flow.size * seconds))
    total = sum(size for *_, size in rows)
    lanes = lanes_needed(load, brokers or replicas)
    if as_json:
        topics = [
            {
                "name": spec.name,
                "partitions": spec.partitions,
                "records_per_second": flow.records,
                "bytes_per_second": flow.size,
                "kept_seconds": seconds,
                "disk_bytes": size,
            }
            for spec, flow, seconds, size in rows
        ]
        print_line(json.dumps({"topics": topics, "disk_bytes": total, "lanes_needed": lanes}))
        return
    table: list[tuple[str, ...]] = [_COLUMNS]
    for spec, flow, seconds, size in rows:
        known = (f"{flow.records:,.1f}", f"{flow.size / 1e6:,.3f}", f"{seconds / 3600:,.4g} h")
        shown = (*known, f"{size / 1e9:,.2f}") if flow.size else ("rare", "", "", "")
        table.append((spec.name, str(spec.partitions), *shown))
    print_line(columns(table, numbers=True))
    copies = "" if replicas == 1 else f" with {replicas} replicas"
    print_line(f"\n{total / 1e9:,.2f} GB on disk{copies}, before compression")
    print_line(f"lanes: {lanes} needed, kafka.lanes = {config.kafka.lanes}")
