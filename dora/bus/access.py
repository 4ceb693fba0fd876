"""Which rights each role of a run needs in Kafka, and as which principal a client connects.

`docs/security.md`, the script that grants the rights, the check at a role's start and the tests
that show that no right is missing or superfluous all come from `ROLES`. Every name is literal: a
role of one run has no rights in another.

Operations and resources are Kafka's own (KIP-11, KIP-98). Read, Write, Delete and Alter imply
Describe.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dora.bus.topic_plan import SUFFIXES

Operation = Literal["Read", "Write", "Create", "Delete", "Alter", "Describe", "IdempotentWrite"]
Resource = Literal["Topic", "Group", "TransactionalId", "Cluster"]

CLUSTER = "kafka-cluster"
"""The name of the one resource of kind Cluster."""

_IMPLYING: tuple[Operation, ...] = ("Read", "Write", "Delete", "Alter")
_OPTIONS: dict[Resource, str] = {
    "Topic": "--topic",
    "Group": "--group",
    "TransactionalId": "--transactional-id",
}


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One operation on one resource."""

    resource: Resource
    name: str
    operation: Operation

    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} {self.name}"

    @property
    def target(self) -> str:
        """The resource as options of kafka-acls.sh."""
        option = _OPTIONS.get(self.resource)
        return "--cluster" if option is None else f"{option} {self.name}"

    @property
    def options(self) -> str:
        """The right as options of kafka-acls.sh."""
        return f"--operation {self.operation} {self.target}"


@dataclass(frozen=True, slots=True)
class Need:
    """One operation on resources of one kind (names without `<run>.`), and the reason for it."""

    operation: Operation
    resource: Resource
    names: tuple[str, ...]
    why: str

    @property
    def of_all_topics(self) -> bool:
        """Whether it is on every topic of the run."""
        return self.names == SUFFIXES


@dataclass(frozen=True, slots=True)
class Role:
    """A part of a run that may have a principal of its own."""

    name: str
    who: str
    needs: tuple[Need, ...]

    def rights(self, run: str) -> list[Right]:
        """The rights it needs in `run`, sorted, without those that others imply."""
        found = {
            Right(need.resource, f"{run}.{name}", need.operation)
            for need in self.needs
            for name in need.names
        }
        return sorted(
            right
            for right in found
            if right.operation != "Describe"
            or not any(Right(right.resource, right.name, each) in found for each in _IMPLYING)
        )


def _topics(operation: Operation, names: str, why: str) -> Need:
    return Need(operation, "Topic", SUFFIXES if names == "*" else tuple(names.split()), why)


_SHAPE = _topics("Describe", "*", "checks that every topic is there with its partitions")

ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            "creator",
            "dora topics create; dora run and dora replay --serve, which create topics themselves",
            (
                _topics("Create", "*", "creates them"),
                _topics("Describe", "*", "waits until they can be used"),
            ),
        ),
        Role(
            "coordinator",
            "dora coordinator",
            (
                Need("Write", "TransactionalId", ("coordinator",), "fences an older coordinator"),
                _SHAPE,
                _topics("Write", "dispatch", "admits groups and commands workers"),
                _topics("Write", "workers", "reports its status"),
                _topics("Write", "trajectories", "gives up what failed too often"),
                _topics(
                    "Read",
                    "steps policies dispatch trajectories workers",
                    "rebuilds and follows the state of the run",
                ),
                _topics("Read", "chunks handovers", "resumes trajectories elsewhere"),
            ),
        ),
        Role(
            "rollout",
            "dora rollout",
            (
                _SHAPE,
                _topics("Read", "dispatch policies", "takes commands and versions"),
                _topics("Read", "steps", "checks that its configuration is the run's"),
                _topics("Read", "workers", "checks that no other worker has its name"),
                _topics("Write", "chunks trajectories handovers", "writes what it generates"),
                _topics("Write", "workers", "reports its status"),
                _topics("Write", "dead-letters", "sets aside what it cannot read or score"),
            ),
        ),
        Role(
            "trainer",
            "dora train, with all its ranks",
            (
                Need("Write", "TransactionalId", ("trainer",), "fences an older trainer"),
                Need("Read", "Group", ("trainer",), "commits offsets, for lag tools"),
                _SHAPE,
                _topics("Read", "steps policies", "reads the ledger and the versions"),
                _topics("Read", "dispatch trajectories", "takes what it trains on"),
                _topics("Read", "workers", "keeps the weights that are in use"),
                _topics("Write", "steps policies", "commits steps and announces versions"),
                _topics("Write", "workers", "reports its status"),
                _topics("Write", "dead-letters", "sets aside what it cannot read"),
            ),
        ),
        Role(
            "reader",
            "dora status, tail, audit, inspect, report, rescore, replay --step",
            (
                _SHAPE,
                _topics(
                    "Read",
                    "steps policies dispatch trajectories chunks workers dead-letters",
                    "reads the run; writes nothing",
                ),
            ),
        ),
        Role(
            "exporter",
            "dora export",
            (
                _SHAPE,
                _topics("Read", "steps policies dispatch trajectories", "reads closed versions"),
                _topics(
                    "Read", "dead-letters", "finds what it set aside (not with --no-dead-letters)"
                ),
                _topics(
                    "Write",
                    "dead-letters",
                    "sets aside what does not belong there (not with --no-dead-letters)",
                ),
            ),
        ),
        Role(
            "replay",
            "dora replay SOURCE --serve --as RUN, on RUN (creator too; on SOURCE a reader)",
            (
                Need(
                    "Write", "TransactionalId", ("coordinator",), "fences another serving process"
                ),
                _SHAPE,
                _topics(
                    "Read", "steps dispatch trajectories chunks workers", "goes on where it ended"
                ),
                _topics("Write", "dispatch trajectories chunks workers", "serves the recording"),
            ),
        ),
        Role(
            "deleter",
            "dora topics delete",
            (
                _topics("Delete", "*", "deletes them"),
                Need("Delete", "Group", ("trainer",), "deletes the trainer's offsets"),
            ),
        ),
    )
}

ROLES_OF_A_RUN = ("creator", "coordinator", "rollout", "trainer", "reader", "exporter")
"""Those that every run has; the others are for occasions."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A right, the role that needs it, and the principal that has the role."""

    role: str
    principal: str
    right: Right


def default_principal(role: str) -> str:
    """Principal of a role where none is given."""
    return f"User:dora-{role}"


def grants(run: str, principals: Mapping[str, str]) -> list[Grant]:
    """What the principals of the roles need in `run`, role by role."""
    return [
        Grant(role, principal, right)
        for role, principal in principals.items()
        for right in ROLES[role].rights(run)
    ]


def script(given: Iterable[Grant], bootstrap: str) -> str:
    """kafka-acls.sh lines that grant it all: one for each role, operation and kind of resource."""
    lines = [
        "#!/bin/sh",
        "# Rights of a run's roles. As a user that may alter ACLs:",
        "#   BOOTSTRAP=host:port COMMAND_CONFIG=admin.properties sh THIS_FILE",
        "set -eu",
        f'BOOTSTRAP="${{BOOTSTRAP:-{bootstrap}}}"',
        "acls() {",
        '  kafka-acls.sh --bootstrap-server "$BOOTSTRAP" \\',
        '    ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} --add "$@"',
        "}",
    ]
    calls: dict[tuple[str, str, Resource, Operation], list[str]] = {}
    for grant in given:
        right = grant.right
        call = (grant.role, grant.principal, right.resource, right.operation)
        calls.setdefault(call, []).append(right.target)
    section = ""
    for (role, principal, _, operation), targets in calls.items():
        if role != section:
            lines.append(f"# {role}: {ROLES[role].who}")
            section = role
        who = f"--allow-principal {shlex.quote(principal)}"
        lines.append(f"acls {who} --operation {operation} {' '.join(targets)}")
    return "\n".join(lines) + "\n"


def principal_of(properties: Mapping[str, str]) -> str:
    """The principal that a cluster sees, as far as the client's own properties tell.

    A cluster may map names to others (`ssl.principal.mapping.rules`, a principal builder).
    """
    protocol = properties.get("security.protocol", "plaintext").lower()
    if protocol.startswith("sasl"):
        mechanism = properties.get("sasl.mechanism") or properties.get("sasl.mechanisms") or ""
        match mechanism.upper():
            case "OAUTHBEARER":
                client = properties.get("sasl.oauthbearer.client.id")
                return "the subject of the OAuth token" + (f" of client {client}" if client else "")
            case "GSSAPI" | "":
                name = properties.get("sasl.kerberos.principal", "kafkaclient")
                return f"User:{name}"
        return f"User:{properties.get('sasl.username', '?')}"
    if protocol == "ssl":
        for key in ("ssl.certificate.location", "ssl.keystore.location"):
            if key in properties:
                return f"the subject of the certificate in {properties[key]}"
        if "ssl.certificate.pem" in properties:
            return "the subject of the certificate in ssl.certificate.pem"
    return "User:ANONYMOUS"
