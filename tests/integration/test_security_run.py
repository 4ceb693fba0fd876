"""On a secured cluster every role has a principal of its own with the rights that
`dora topics acls` gave it, which are enough and not one too many; and no secret is told."""

import json

import pytest
from confluent_kafka import Consumer, TopicPartition

from dora.bus.access import ROLES, ROLES_OF_A_RUN, Right, default_principal, grants
from dora.bus.acls import AclAdmin
from tests.secured_broker import DEADLINE, names
from tests.secured_run import (
    CANARY,
    PARTITIONS,
    PROCESSES,
    RUN,
    TOPICS,
    Secured,
    damage,
    export_command,
    without,
)
from tests.small_run import refused
from tests.waiting import until


def test_the_run_is_whole(secured_run: Secured) -> None:
    audit = json.loads((secured_run.directory / "audit.out").read_text())
    assert audit["steps"] == 2
    assert not any(audit["violations"].values())
    assert audit["groups_set_aside"] > 0


@pytest.mark.parametrize("role", ROLES_OF_A_RUN)
def test_a_role_uses_every_right_that_it_is_given(secured_run: Secured, role: str) -> None:
    used = {
        (decision.operation, decision.resource, decision.name)
        for decision in secured_run.decisions
        if decision.principal == default_principal(role) and decision.allowed
    }
    # a trajectory moves only where load is balanced between workers
    rare = {("WRITE", "Topic", TOPICS.handovers)} if role == "rollout" else set()
    assert names(ROLES[role].rights(RUN)) - used - rare == set()


@pytest.mark.parametrize("role", ROLES_OF_A_RUN)
def test_a_role_asks_for_nothing_that_it_is_not_given(secured_run: Secured, role: str) -> None:
    refusals = {
        (decision.operation, decision.resource, decision.name)
        for decision in secured_run.decisions
        if decision.principal == default_principal(role) and not decision.allowed
    }
    # what dora does without: librdkafka looks for a reader's group, and a topic's configuration is
    # compared where it may be read
    beside = {r for r in refusals if r[1] == "Group" and r[2].endswith(".unused")}
    beside |= {r for r in refusals if r[0] == "DESCRIBE_CONFIGS"}
    assert refusals - beside == set()


def test_no_secret_is_told_anywhere(secured_run: Secured) -> None:
    told = [
        path
        for path in secured_run.directory.rglob("*")
        if path.is_file()
        and path.suffix != ".properties"
        and path != secured_run.directory / "run.toml"
        and CANARY.encode() in path.read_bytes()
    ]
    assert told == []
    assert len(secured_run.scraped) >= 2, "metrics were scraped"
    assert not any(CANARY in text for text in secured_run.scraped.values())
    assert secured_run.traced, "traces were sent"
    assert not any(CANARY.encode() in body for body in secured_run.traced)


def test_no_secret_is_in_the_log(secured_run: Secured) -> None:
    consumer = Consumer({"bootstrap.servers": secured_run.broker.open, "group.id": "test"})
    topics = consumer.list_topics(timeout=30).topics
    places = [TopicPartition(t, p, 0) for t in TOPICS.all for p in topics[t].partitions]
    ends = {(p.topic, p.partition): consumer.get_watermark_offsets(p)[1] for p in places}
    consumer.assign(places)
    waiting, records = {place for place, end in ends.items() if end}, 0

    def read() -> bool:
        nonlocal records
        for message in consumer.consume(1000, 0.2):
            assert message.error() is None
            parts = (message.value(), message.key(), repr(message.headers()).encode())
            whole = b" ".join(part or b"" for part in parts)
            assert CANARY.encode() not in whole, (message.topic(), message.offset())
            records += 1
        waiting.difference_update(
            (p.topic, p.partition)
            for p in consumer.position(places)
            if p.offset >= ends[p.topic, p.partition]
        )
        return not waiting

    until(read, "the whole log to be read", DEADLINE)
    consumer.close()
    assert records > 20


def _cases(*roles: str) -> list[tuple[str, Right]]:
    return [(role, right) for role in roles for right in ROLES[role].rights(RUN)]


@pytest.mark.parametrize(("role", "right"), _cases(*PROCESSES), ids=str)
def test_a_process_that_lacks_a_right_ends_at_once_and_names_it(
    secured_run: Secured, role: str, right: Right
) -> None:
    with without(secured_run, role, right):
        command = {"trainer": "train"}.get(role, role)
        ended = secured_run.dora(role, command, str(secured_run.directory / "run.toml"))
    refused(ended, 1, f"User:dora-{role} lacks {right}", "dora topics acls RUN")


@pytest.mark.parametrize(("role", "right"), _cases("reader", "exporter"), ids=str)
def test_looking_without_a_right_names_it(secured_run: Secured, role: str, right: Right) -> None:
    command = ("audit", RUN)
    if role == "exporter":
        command = export_command(secured_run.directory / f"without-{right.name}")
        damage(secured_run.broker, TOPICS.trajectories, range(PARTITIONS))
    elif right.name in (TOPICS.workers, TOPICS.dead_letters):
        command = ("report", RUN, "-o", str(secured_run.directory / "never.html"))
    with without(secured_run, role, right):
        ended = secured_run.dora(role, *command)
    # of a topic that it may not even see, seeing it is the first thing that it lacks
    lacked = Right(right.resource, right.name, "Describe")
    said = " ".join(ended.stderr.split())
    assert f"lacks {right}" in said or f"lacks {lacked}" in said, said
    refused(ended, 1, f"User:dora-{role} lacks ", right.name)


def test_topics_are_deleted_with_the_rights_of_a_deleter(secured_run: Secured) -> None:
    name = "deleted"
    config = str(secured_run.directory / "run.toml")
    users = {"creator": default_principal("creator"), "deleter": default_principal("deleter")}
    given = grants(name, users)
    with secured_run.broker.admin() as admin, AclAdmin(secured_run.settings("creator")) as creator:
        admin.grant(given)
        until(
            lambda: not creator.lacking(ROLES["creator"].rights(name)), "rights to arrive", DEADLINE
        )
    made = secured_run.dora("creator", "topics", "create", config, "--set", f"run.name={name}")
    assert made.exit_code == 0, made.output
    refused(
        secured_run.dora("creator", "topics", "delete", name, "--yes"),
        1,
        "User:dora-creator lacks Delete on Topic deleted.",
    )
    gone = secured_run.dora("deleter", "topics", "delete", name, "--yes")
    assert gone.exit_code == 0, gone.output


@pytest.mark.parametrize("operation", ["Create", "Describe"])
def test_topics_are_not_created_without_a_right(secured_run: Secured, operation) -> None:  # type: ignore[no-untyped-def]
    name = f"never-{operation.lower()}"
    right = Right("Topic", f"{name}.steps", operation)
    given = grants(name, {"creator": default_principal("creator")})
    with secured_run.broker.admin() as admin, AclAdmin(secured_run.settings("creator")) as creator:
        admin.grant(grant for grant in given if grant.right != right)
        others = [g.right for g in given if g.right.operation == "Describe" and g.right != right]
        until(lambda: not creator.lacking(others), "rights to arrive", DEADLINE)
    config = str(secured_run.directory / "run.toml")
    ended = secured_run.dora("creator", "topics", "create", config, "--set", f"run.name={name}")
    refused(ended, 1, f"User:dora-creator lacks {right}")


def test_who_may_not_grant_is_told_so(secured_run: Secured) -> None:
    ended = secured_run.dora("trainer", "topics", "acls", RUN, "--role", "trainer", "--apply")
    refused(ended, 1, "does not allow granting rights", "User:dora-trainer lacks Alter on Cluster")
