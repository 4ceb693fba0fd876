"""The rights of each role: one definition, and everything that is made of it."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

import dora.bus
from dora.bus.access import CLUSTER, ROLES, Right, default_principal, grants, principal_of, script
from dora.bus.failures import is_passing, missing_rights
from dora.bus.settings import ClusterSettings, is_secret, redacted
from dora.bus.topic_plan import SUFFIXES, RunTopics
from tests.small_run import dora as command
from tests.small_run import refused

ROOT = Path(dora.bus.__file__).parents[2]


@pytest.mark.parametrize("role", ROLES)
def test_every_right_of_a_role_is_of_its_run_alone(role: str) -> None:
    rights = ROLES[role].rights("demo")
    assert rights == sorted(set(rights))
    for right in rights:
        if right.resource == "Topic":
            assert right.name in RunTopics("demo").all
        else:
            assert right.name in ("demo.coordinator", "demo.trainer")


@pytest.mark.parametrize("role", ROLES)
def test_no_right_is_given_that_another_one_implies(role: str) -> None:
    rights = set(ROLES[role].rights("demo"))
    for right in rights:
        if right.operation == "Describe":
            stronger = {
                Right(right.resource, right.name, "Read"),
                Right(right.resource, right.name, "Write"),
                Right(right.resource, right.name, "Delete"),
            }
            assert not stronger & rights


def test_nobody_but_creator_and_deleter_may_change_topics() -> None:
    changing = {
        role
        for role in ROLES
        for right in ROLES[role].rights("demo")
        if right.operation in ("Create", "Delete", "Alter") or right.resource == "Cluster"
    }
    assert changing == {"creator", "deleter"}


def test_only_the_trainer_may_write_the_ledger_and_onlookers_write_nothing() -> None:
    def writers(name: str) -> set[str]:
        right = Right("Topic", f"demo.{name}", "Write")
        return {role for role in ROLES if right in ROLES[role].rights("demo")}

    assert writers("steps") == writers("policies") == {"trainer"}
    assert writers("chunks") == {"rollout", "replay"}
    assert not any(right.operation == "Write" for right in ROLES["reader"].rights("demo"))


def test_the_script_grants_exactly_the_rights(tmp_path: Path) -> None:
    given = grants("demo", {"trainer": "User:CN=it's, O=Ours", "reader": "User:eve"})
    stand_in = tmp_path / "kafka-acls.sh"
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\necho .\n')
    stand_in.chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh"],
        input=script(given, "here:9092"),
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "COMMAND_CONFIG": "a b.txt"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    found = []
    for call in ran.stdout.split("\n.\n")[:-1]:
        words = call.split("\n")
        assert words[:5] == [
            "--bootstrap-server", "here:9092", "--command-config", "a b.txt", "--add",
        ]  # fmt: skip
        principal, operation = words[6], words[8]
        assert (words[5], words[7]) == ("--allow-principal", "--operation")
        for option, name in zip(words[9::2], words[10::2], strict=True):
            found.append((principal, f"--operation {operation} {option} {name}"))
    assert sorted(found) == sorted((g.principal, g.right.options) for g in given)


@pytest.mark.parametrize("role", ROLES)
def test_the_table_shows_every_right_and_no_other(role: str) -> None:
    said = command("topics", "acls", "demo", "--role", role)
    assert said.exit_code == 0, said.output
    shown = set()
    for line in said.output.splitlines()[2:]:
        _, principal, operation, resource, names, why = re.split("  +", line)
        assert principal == default_principal(role) and why
        for name in SUFFIXES if names == "*" else names.split(", "):
            shown.add((resource, f"demo.{name}", operation))
    rights = {(r.resource, r.name, r.operation) for r in ROLES[role].rights("demo")}
    assert rights <= shown
    assert all(operation == "Describe" for _, _, operation in shown - rights)


@pytest.mark.parametrize(
    ("properties", "principal"),
    [
        ({}, "User:ANONYMOUS"),
        ({"security.protocol": "SSL"}, "User:ANONYMOUS"),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "eve"},
            "User:eve",
        ),
        (
            {
                "security.protocol": "sasl_ssl",
                "sasl.mechanisms": "SCRAM-SHA-256",
                "sasl.username": "eve",
                "ssl.certificate.location": "eve.pem",
            },
            "User:eve",
        ),
        (
            {"security.protocol": "ssl", "ssl.certificate.location": "eve.pem"},
            "the subject of the certificate in eve.pem",
        ),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"},
            "the subject of the OAuth token",
        ),
        (
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "GSSAPI",
                "sasl.kerberos.principal": "eve@REALM",
            },
            "User:eve@REALM",
        ),
    ],
)
def test_who_asks_is_told_from_the_properties(properties: dict[str, str], principal: str) -> None:
    assert principal_of(properties) == principal


def test_lacking_rights_are_named_together_and_one_is_granted_by_a_line() -> None:
    settings = ClusterSettings(
        "here:9092",
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "eve"},
    )
    one = missing_rights(settings, [Right("Topic", "demo.steps", "Read")], "reading")
    assert one.message == (
        "Kafka at here:9092 does not allow reading: User:eve lacks Read on Topic demo.steps"
    )
    assert one.hint is not None
    line = "kafka-acls.sh --add --allow-principal User:eve --operation Read --topic demo.steps"
    assert one.hint.endswith(line)
    quoted = missing_rights(
        ClusterSettings("here:9092", {**settings.properties, "sasl.username": "it's"}),
        [Right("Topic", "demo.steps", "Read")],
        "reading",
    )
    assert shlex.split((quoted.hint or "").rpartition(": ")[2])[3] == "User:it's"
    several = missing_rights(
        settings,
        [
            Right("Topic", "demo.chunks", "Write"),
            Right("Topic", "demo.steps", "Write"),
            Right("Group", "demo.trainer", "Read"),
        ],
        "the role x",
    )
    assert several.message.endswith(
        "lacks Write on Topic demo.chunks, demo.steps; Read on Group demo.trainer"
    )
    assert Right("Cluster", CLUSTER, "Alter").options == "--operation Alter --cluster"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("sasl.password", True),
        ("ssl.key.password", True),
        ("ssl.key.pem", True),
        ("sasl.oauthbearer.client.secret", True),
        ("sasl.oauthbearer.config", True),
        ("basic.auth.user.info", True),
        ("sasl.username", False),
        ("ssl.key.location", False),
        ("sasl.oauthbearer.token.endpoint.url", False),
        ("security.protocol", False),
    ],
)
def test_secret_properties_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret
    assert redacted("it is hunter2!", {name: "hunter2"}) == (
        "it is ***!" if secret else "it is hunter2!"
    )


def test_rights_are_shown_for_programs() -> None:
    shown = command("topics", "acls", "demo", "--role", "reader", "--json")
    assert shown.exit_code == 0, shown.output
    made = json.loads(shown.output)
    assert made["run"] == "demo" and made["applied"] is False
    wanted = ROLES["reader"].rights("demo")
    assert [(r["resource"], r["name"], r["operation"]) for r in made["rights"]] == [
        (right.resource, right.name, right.operation) for right in wanted
    ]
    assert {r["principal"] for r in made["rights"]} == {default_principal("reader")}


def test_one_principal_may_have_several_roles() -> None:
    options = ("--principal", "User:CN=all,O=us", "--principal", "trainer=User:eve", "--json")
    shown = command("topics", "acls", "demo", *options)
    principals = {r["role"]: r["principal"] for r in json.loads(shown.output)["rights"]}
    assert principals.pop("trainer") == "User:eve"
    assert set(principals.values()) == {"User:CN=all,O=us"}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--principal", "trainer=eve"), "is not of the form TYPE:NAME"),
        (("--principal", "trainee=User:eve"), "trainee is no role"),
        (("--principal", "eve"), "eve is no role"),
        (("--role", "reader", "--principal", "trainer=User:eve"), "add --role trainer"),
    ],
)
def test_a_principal_of_another_form_is_refused(options: tuple[str, ...], part: str) -> None:
    refused(command("topics", "acls", "demo", *options), 2, part)


@pytest.mark.parametrize("run", ["Demo", "demo; rm -r x", "demo.steps", ""])
def test_rights_are_of_a_name_that_a_run_may_have(run: str) -> None:
    refused(command("topics", "acls", run, "--format", "script"), 2, "run.name")


@pytest.mark.parametrize(
    ("code", "passing"),
    [
        (KafkaError.NOT_COORDINATOR, True),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, True),
        (KafkaError._TIMED_OUT, True),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, False),
        (KafkaError._AUTHENTICATION, False),
    ],
)
def test_a_cluster_that_cannot_tell_rights_yet_refuses_nobody(code: int, passing: bool) -> None:
    assert is_passing(KafkaError(code)) is passing
