"""`dora topics`: create, describe and delete the topics of a run, and the rights on them.

Nothing is deleted without `--yes`; without it the command says what would be.
"""

import json

import click

from dora.bus.settings import cluster_settings
from dora.bus.topics import TopicAdmin, TopicInfo, topic_plan
from dora.cli.console import columns
from dora.cli.options import Command, config_argument, json_option, kafka_options, print_line
from dora.cli.topics.acls import acls
from dora.cli.topics.plan import plan
from dora.config import Config, KafkaSection

_COLUMNS = ("topic", "id", "partitions", "records", "bytes at most", "kept")


@click.group()
def topics() -> None:
    """Create, describe and delete a run's topics, and grant rights on them.

    A run has eight topics with a fixed number of partitions. `dora run` creates them itself; on a
    managed cluster create them once as a user with that right, and run as one without it.
    """


topics.add_command(plan)
topics.add_command(acls)


@topics.command(cls=Command)
@config_argument
@click.option("--dry-run", is_flag=True, help="Only print what would be created.")
@click.option(
    "--exist-ok", is_flag=True, help="Leave those that exist as they are, and check that they fit."
)
@json_option
def create(config: Config, dry_run: bool, exist_ok: bool, as_json: bool) -> None:
    """Create the topics of the run that CONFIG describes, and register its schemas.

    Fails, creating nothing, if one of them exists.
    """
    plan = topic_plan(config)
    if not dry_run:
        settings = cluster_settings(config.kafka)
        with TopicAdmin(settings) as admin:
            refused = bool(admin.existing(config.run.name)) and not exist_ok
            if settings.registry is not None and not refused:
                settings.registry.prepare()
            made = admin.create(plan, exist_ok=exist_ok)
        plan = [spec for spec in plan if spec.name in made]
    if as_json:
        described = [
            {
                "name": spec.name,
                "partitions": spec.partitions,
                "replication_factor": spec.replication_factor,
                "config": spec.configs,
            }
            for spec in plan
        ]
        print_line(
            json.dumps({"run": config.run.name, "created": not dry_run, "topics": described})
        )
        return
    verb = "would create" if dry_run else "created"
    if not plan:
        print_line("all of them exist")
    for spec in plan:
        print_line(f"{verb} {spec.name} with {_count(spec.partitions, 'partition')}")


@topics.command(cls=Command)
@click.argument("run", required=False)
@kafka_options
@json_option
def describe(run: str | None, kafka: KafkaSection, as_json: bool) -> None:
    """Show the topics of RUN: ids, partitions, records, configuration.

    Without RUN the runs of the cluster are listed. Records are counted as offsets from the first
    one kept to the end, transaction markers and aborted records included.
    """
    with TopicAdmin(cluster_settings(kafka)) as admin:
        if run is None:
            runs = admin.list_runs()
            if as_json:
                print_line(json.dumps({"runs": runs}))
            for name in () if as_json else runs:
                print_line(name)
            return
        found = admin.describe(run)
        if not found:
            raise admin.unknown_run(run)
        cluster = admin.cluster_id()
    if as_json:
        print_line(
            json.dumps({"run": run, "cluster_id": cluster, "topics": [_object(t) for t in found]})
        )
        return
    print_line(columns([_COLUMNS, *map(_row, found)]))


@topics.command(cls=Command)
@click.argument("run")
@click.option("--yes", is_flag=True, help="Really delete them; there is no way back.")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@kafka_options
@json_option
@click.pass_context
def delete(
    context: click.Context,
    run: str,
    yes: bool,
    dry_run: bool,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Delete the topics of RUN, and with them everything that it recorded.

    Without --yes nothing is deleted: the topics are printed, and the exit code is 1 (0 with
    --dry-run). Stop the run's processes first.
    """
    with TopicAdmin(cluster_settings(kafka)) as admin:
        found = admin.describe(run)
        if not found:
            raise admin.unknown_run(run)
        deleted = yes and not dry_run
        if deleted:
            admin.delete(run)
    if as_json:
        print_line(
            json.dumps({"run": run, "deleted": deleted, "topics": [_object(t) for t in found]})
        )
    else:
        verb = "deleted" if deleted else "would delete"
        for topic in found:
            print_line(f"{verb} {topic.name} with {_count(topic.records, 'record')}")
    if not deleted and not dry_run:
        click.echo("Nothing was deleted: say --yes to delete them for good.", err=True)
        context.exit(1)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _object(topic: TopicInfo) -> dict[str, object]:
    return {
        "name": topic.name,
        "id": topic.topic_id,
        "partitions": topic.partitions,
        "records": topic.records,
        "begin_offsets": [topic.begin_offsets[p] for p in sorted(topic.begin_offsets)],
        "end_offsets": [topic.end_offsets[p] for p in sorted(topic.end_offsets)],
        "config": topic.configs,
    }


def _row(topic: TopicInfo) -> tuple[str, ...]:
    return (
        topic.name,
        topic.topic_id,
        str(topic.partitions),
        f"{topic.records:,}",
        f"{int(topic.configs['max.message.bytes']):,}" if topic.configs else "?",
        _kept(topic.configs),
    )


def _kept(configs: dict[str, str]) -> str:
    if not configs:
        return "?"
    if configs["cleanup.policy"] == "compact":
        return "latest per key"
    milliseconds = int(configs["retention.ms"])
    return "for ever" if milliseconds < 0 else f"{milliseconds / 3_600_000:g} h"
