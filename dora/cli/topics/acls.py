"""`dora topics acls`: the least rights that each role of a run needs, shown, scripted or granted.

Without `--apply` no cluster is asked and nothing changes; with it rights are added,
never taken away.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import ValidationError

from dora.bus.access import ROLES, ROLES_OF_A_RUN, Grant, default_principal, grants, script
from dora.bus.acls import AclAdmin
from dora.bus.settings import cluster_settings
from dora.cli.console import columns
from dora.cli.options import Command, cluster_options, local_broker, print_line
from dora.config import RunSection
from dora.config.loading import KafkaOverrides, load_kafka_section
from dora.errors import UsageError

_COLUMNS = ("role", "principal", "operation", "resource", "names", "what for")


@click.command(cls=Command)
@click.argument("run")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(sorted(ROLES)),
    help="Only this role; may be repeated. By default those of a run: " + ", ".join(ROLES_OF_A_RUN),
)
@click.option(
    "--principal",
    "principals",
    multiple=True,
    metavar="[ROLE=]PRINCIPAL",
    help="The user of the role, or without ROLE= of all roles, as `User:NAME`; may be repeated. By "
    "default User:dora-ROLE.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "script", "json"]),
    default="table",
    show_default=True,
    help="A table, a shell script of kafka-acls.sh lines, or JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--apply", is_flag=True, help="Grant the rights; needs Alter on the cluster.")
@cluster_options
def acls(
    run: str,
    roles: tuple[str, ...],
    principals: tuple[str, ...],
    form: str,
    as_json: bool,
    apply: bool,
    overrides: KafkaOverrides,
    broker_directory: Path,
) -> None:
    """Show the least rights that the roles of RUN need, or grant them.

    They name this run's topics, transactional ids and group literally, so no role can touch
    another run. Rights are only added: remove them with kafka-acls.sh --remove.
    """
    try:
        RunSection(name=run)
    except ValidationError:
        raise UsageError(
            f"{run!r} is no run.name",
            hint="lower-case letters, digits, - and _ after a first letter or digit",
        ) from None
    given = grants(run, _principals(roles or ROLES_OF_A_RUN, principals))
    section = load_kafka_section(kafka=overrides)
    if apply:
        address = section.bootstrap_servers or local_broker(broker_directory)
        section = section.model_copy(update={"bootstrap_servers": address})
        with AclAdmin(cluster_settings(section)) as admin:
            admin.grant(given)
    if as_json or form == "json":
        print_line(json.dumps({"run": run, "applied": apply, "rights": _objects(given)}))
    elif form == "script":
        click.echo(script(given, section.bootstrap_servers or "localhost:9092"), nl=False)
    else:
        _print_table(run, given)
        if apply:
            print_line(f"granted {len(given)} rights at {section.bootstrap_servers}")


def _principals(roles: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Principal of each role in `roles`; UsageError for what names none of them."""
    found = {role: default_principal(role) for role in roles}
    for text in given:
        role, separator, principal = text.partition("=")
        if separator and role in ROLES:
            if role not in found:
                raise UsageError(
                    f"--principal {text}: the role {role} is not among those shown",
                    hint=f"add --role {role}",
                )
            found[role] = principal
        elif ":" in role:
            found = dict.fromkeys(found, text)  # a certificate's name may hold an equals sign
        else:
            raise UsageError(
                f"--principal {text}: {role} is no role", hint=f"roles: {', '.join(ROLES)}"
            )
    for role, principal in found.items():
        kind, separator, name = principal.partition(":")
        if not (kind and separator and name):
            raise UsageError(
                f"the principal {principal or 'that is empty'} of {role} is not of the form "
                "TYPE:NAME",
                hint="for example --principal trainer=User:alice, or User:CN=trainer",
            )
    return found


def _objects(given: Sequence[Grant]) -> list[dict[str, str]]:
    return [
        {
            "role": grant.role,
            "principal": grant.principal,
            "operation": grant.right.operation,
            "resource": grant.right.resource,
            "name": grant.right.name,
            "pattern": "literal",
        }
        for grant in given
    ]


def _print_table(run: str, given: Sequence[Grant]) -> None:
    principals = {grant.role: grant.principal for grant in given}
    rows = [
        (
            role,
            principal,
            need.operation,
            need.resource,
            "*" if need.of_all_topics else ", ".join(need.names),
            need.why,
        )
        for role, principal in principals.items()
        for need in ROLES[role].needs
    ]
    print_line(f"Names begin with `{run}.`, and * stands for all topics of the run.")
    print_line(columns([_COLUMNS, *rows]))
