"""A run's topics on a real broker, and `dora topics`."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient, NewPartitions

from dora.bus import (
    ClusterSettings,
    LogReader,
    LogWriter,
    RunTopics,
    TopicAdmin,
    TransactionalWriter,
    topic_plan,
)
from dora.cli.main import cli
from dora.config import Config
from dora.errors import TopicError
from dora.log.ledger import first_entry
from dora.schemas.records import Status
from tests import factories


def make_config(name: str, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": name},
            "policy": {"model": "m"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward"},
            "trainer": {"steps": 1},
            "window": {"max_staleness": 1, "groups_per_step": 2, "group_size": 2},
            "kafka": {"lanes": 2, "dispatch_partitions": 3},
            **sections,
        }
    )


@pytest.fixture
def admin(settings: ClusterSettings) -> TopicAdmin:
    return TopicAdmin(settings)


def run_cli(settings: ClusterSettings, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["topics", *arguments, "-b", settings.bootstrap_servers])


def write_config(path: Path, name: str) -> Path:
    file = path / "run.toml"
    file.write_text(
        f'[run]\nname = "{name}"\n[policy]\nmodel = "m"\n'
        '[task]\nkind = "reasoning-gym"\nname = "spell_backward"\n[trainer]\nsteps = 1\n'
        "[kafka]\nlanes = 2\ndispatch_partitions = 3\n",
        encoding="utf-8",
    )
    return file


def test_the_plan_follows_from_the_configuration(run_name: str) -> None:
    config = make_config(run_name)
    plan = {spec.name: spec for spec in topic_plan(config)}
    topics = RunTopics(run_name)
    assert {name: spec.partitions for name, spec in plan.items()} == {
        topics.dispatch: 3,
        topics.chunks: 6,
        topics.trajectories: 6,
        topics.handovers: 1,
        topics.policies: 1,
        topics.steps: 1,
        topics.workers: 1,
        topics.dead_letters: 1,
    }
    assert set(plan) == set(topics.all)
    compacted = {n for n, spec in plan.items() if spec.configs["cleanup.policy"] == "compact"}
    assert compacted == {topics.policies, topics.workers}
    kept = {n: s.configs["retention.ms"] for n, s in plan.items() if n != topics.handovers}
    assert set(kept.values()) == {"-1"}
    assert plan[topics.handovers].configs["retention.ms"] == "3600000"


def test_retention_limits_the_data_but_never_the_ledger(run_name: str) -> None:
    config = make_config(run_name, kafka={"retention_hours": 2.0, "replication_factor": 3})
    plan = {spec.name: spec for spec in topic_plan(config)}
    topics = RunTopics(run_name)
    hours = str(2 * 3_600_000)
    limited = {n for n, spec in plan.items() if spec.configs["retention.ms"] == hours}
    assert limited == {topics.chunks, topics.trajectories}
    assert {spec.configs["min.insync.replicas"] for spec in plan.values()} == {"2"}


def test_topics_are_made_as_planned_and_described(admin: TopicAdmin, run_name: str) -> None:
    plan = topic_plan(make_config(run_name))
    assert set(admin.create(plan)) == {spec.name for spec in plan}
    admin.verify(plan)
    infos = {info.name: info for info in admin.describe(run_name)}
    assert {name: info.partitions for name, info in infos.items()} == {
        spec.name: spec.partitions for spec in plan
    }
    assert all(info.records == 0 for info in infos.values())
    assert infos[f"{run_name}.steps"].configs["retention.ms"] == "-1"
    assert infos[f"{run_name}.chunks"].configs["max.message.bytes"] == str(8 * 2**20)
    assert admin.topic_ids(run_name) == {name: info.topic_id for name, info in infos.items()}
    assert len({info.topic_id for info in infos.values()}) == len(plan)
    assert run_name in admin.list_runs()


def test_existing_topics_are_not_created_over(admin: TopicAdmin, run_name: str) -> None:
    plan = topic_plan(make_config(run_name))
    admin.create(plan[:1])
    with pytest.raises(TopicError, match=f"already has {run_name}.dispatch"):
        admin.create(plan)
    assert admin.existing(run_name) == [f"{run_name}.dispatch"]
    assert set(admin.create(plan, exist_ok=True)) == {spec.name for spec in plan[1:]}
    assert admin.create(plan, exist_ok=True) == []


def test_missing_topics_and_other_shapes_are_all_named(admin: TopicAdmin, run_name: str) -> None:
    plan = topic_plan(make_config(run_name))
    admin.create([spec for spec in plan if not spec.name.endswith(".workers")])
    wider = topic_plan(make_config(run_name, kafka={"lanes": 4, "dispatch_partitions": 3}))
    with pytest.raises(TopicError) as caught:
        admin.verify(wider)
    text = caught.value.message
    assert f"{run_name}.workers is missing" in text
    assert f"{run_name}.chunks has 6 partitions, the configuration needs 12" in text
    assert f"{run_name}.dispatch" not in text


def test_a_topic_that_would_lose_or_refuse_records_is_refused(
    admin: TopicAdmin, run_name: str
) -> None:
    plan = topic_plan(make_config(run_name))
    admin.create(
        topic_plan(
            make_config(
                run_name,
                kafka={
                    "lanes": 2,
                    "dispatch_partitions": 3,
                    "retention_hours": 1.0,
                    "max_message_bytes": 2**20,
                },
            )
        )
    )
    with pytest.raises(TopicError) as caught:
        admin.verify(plan)
    assert f"{run_name}.chunks has retention.ms=3600000, the run needs -1" in caught.value.message
    assert f"{run_name}.steps has max.message.bytes=1048576" in caught.value.message


def test_partitions_added_by_somebody_are_noticed(
    admin: TopicAdmin, settings: ClusterSettings, run_name: str
) -> None:
    plan = topic_plan(make_config(run_name))
    admin.create(plan)
    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    client.create_partitions([NewPartitions(f"{run_name}.steps", 2)])[f"{run_name}.steps"].result()
    deadline = time.monotonic() + 30.0
    while {info.partitions for info in admin.describe(run_name) if ".steps" in info.name} != {2}:
        assert time.monotonic() < deadline, "the added partition did not appear"
    with pytest.raises(TopicError, match="steps has 2 partitions, the configuration needs 1"):
        admin.verify(plan)


def test_a_topic_made_anew_has_another_id(admin: TopicAdmin, run_name: str) -> None:
    plan = topic_plan(make_config(run_name))
    admin.create(plan)
    before = admin.topic_ids(run_name)
    assert set(admin.delete(run_name)) == set(before)
    assert admin.existing(run_name) == []
    admin.create(plan)
    after = admin.topic_ids(run_name)
    assert all(after[name] != before[name] for name in before)


def test_an_unknown_run_is_described_as_nothing_and_similar_names_are_given(
    admin: TopicAdmin, run_name: str
) -> None:
    admin.create(topic_plan(make_config(run_name)))
    almost = run_name[:-1] + ("x" if run_name[-1] != "x" else "y")
    assert admin.describe(almost) == []
    with pytest.raises(TopicError) as caught:
        admin.delete(almost)
    assert run_name in str(caught.value)


def test_deleting_a_run_deletes_the_trainers_offsets(
    admin: TopicAdmin, settings: ClusterSettings, run_name: str
) -> None:
    admin.create(topic_plan(make_config(run_name)))
    group = f"{run_name}.trainer"
    with (
        TransactionalWriter(settings, group, client_id="t", transaction_timeout=30.0) as writer,
        writer.transaction() as block,
    ):
        block.send_offsets(group, {(f"{run_name}.trajectories", 0): 1})
    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    assert group in {g.group_id for g in client.list_consumer_groups().result().valid}
    admin.delete(run_name)
    assert group not in {g.group_id for g in client.list_consumer_groups().result().valid}


def test_only_the_latest_status_of_a_process_need_be_kept(
    admin: TopicAdmin, settings: ClusterSettings, run_name: str
) -> None:
    admin.create(topic_plan(make_config(run_name)))
    topic = RunTopics(run_name).workers
    with LogWriter(settings, client_id="w0") as writer:
        for moment in range(3):
            status = Status(run_name, "w0", "rollout", "i", "ready", moment)
            writer.send(topic, status, key="w0")
    with LogReader(settings, client_id="r") as reader:
        reader.assign({(topic, 0): 0})
        assert [m.key for m in reader.read_to_end(30.0)] == ["w0"] * 3


def test_the_command_creates_describes_and_deletes(
    settings: ClusterSettings, run_name: str, tmp_path: Path
) -> None:
    file = write_config(tmp_path, run_name)

    dry = run_cli(settings, "create", str(file), "--dry-run")
    assert dry.exit_code == 0
    assert f"would create {run_name}.chunks with 6 partitions" in dry.output
    assert TopicAdmin(settings).existing(run_name) == []

    created = run_cli(settings, "create", str(file))
    assert created.exit_code == 0, created.output
    assert f"created {run_name}.steps with 1 partition" in created.output
    assert run_cli(settings, "create", str(file)).exit_code == 1
    again = run_cli(settings, "create", str(file), "--exist-ok")
    assert (again.exit_code, again.output) == (0, "all of them exist\n")

    described = json.loads(run_cli(settings, "describe", run_name, "--json").stdout)
    assert described["run"] == run_name
    assert described["cluster_id"] == TopicAdmin(settings).cluster_id()
    by_name = {topic["name"]: topic for topic in described["topics"]}
    assert by_name[f"{run_name}.chunks"]["partitions"] == 6
    assert by_name[f"{run_name}.chunks"]["end_offsets"] == [0] * 6
    text = run_cli(settings, "describe", run_name)
    assert "latest per key" in text.output
    assert by_name[f"{run_name}.steps"]["id"] in text.output
    assert run_name in json.loads(run_cli(settings, "describe", "--json").stdout)["runs"]

    asked = run_cli(settings, "delete", run_name)
    assert asked.exit_code == 1
    assert f"would delete {run_name}.steps with 0 records" in asked.output
    assert "--yes" in asked.output
    assert run_cli(settings, "delete", run_name, "--dry-run", "--yes").exit_code == 0
    assert len(TopicAdmin(settings).existing(run_name)) == 8

    deleted = run_cli(settings, "delete", run_name, "--yes", "--json")
    assert deleted.exit_code == 0, deleted.output
    assert json.loads(deleted.stdout)["deleted"] is True
    assert TopicAdmin(settings).existing(run_name) == []


def test_list_shows_each_run_with_its_state_and_status_takes_the_newest_or_a_file(
    admin: TopicAdmin, settings: ClusterSettings, run_name: str, tmp_path: Path
) -> None:
    def look(*arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, "-b", settings.bootstrap_servers])

    config, now = make_config(run_name), time.time_ns() // 1_000_000
    admin.create(topic_plan(config))
    admin.create(topic_plan(make_config(f"{run_name}-torn")))
    empty = {
        run["run"]: run for run in json.loads(look("list", f"{run_name}*", "--json").stdout)["runs"]
    }
    assert (empty[run_name]["state"], empty[run_name]["version"]) == ("empty", -1)

    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    gone = f"{run_name}-torn.workers"
    client.delete_topics([gone])[gone].result(30.0)
    topics = RunTopics(run_name)
    ids = admin.topic_ids(run_name)
    begun = first_entry(config, admin.cluster_id(), ids, {}, "")
    # begun in an hour, so that no other test's run is newer
    begun = replace(begun, created_ms=now + 3_600_000)
    steps = [factories.step(version + 1, version, run=run_name, at=now) for version in (0, 1)]
    with LogWriter(settings, client_id="w") as writer:
        for record in (begun, *steps):
            writer.send(topics.steps, record, key=run_name)
        ended = factories.status(
            "trainer", "stopped", run=run_name, at=now, metrics={"steps_target": 2.0}
        )
        writer.send(topics.workers, ended, key="trainer")
        writer.flush(30.0)
    found = json.loads(look("list", f"{run_name}*", "--json").stdout)["runs"]
    assert found[-1]["run"] == run_name, "the newest is last"
    assert (found[-1]["state"], found[-1]["version"], found[-1]["steps"]) == ("complete", 2, 2)
    line = next(
        text
        for text in look("list", f"{run_name}*").stdout.splitlines()
        if text.startswith(f"{run_name} ")
    )
    assert line.split()[1:5] == ["complete", "2", "2", "0"]

    torn = next(run for run in found if run["run"] == f"{run_name}-torn")
    assert torn["state"] == "unreadable" and "torn.workers" in torn["problem"]

    newest = look("status", "--json")
    assert newest.exit_code == 0, newest.output
    assert json.loads(newest.stdout)["run"] == run_name
    file = write_config(tmp_path, run_name)
    assert json.loads(look("status", str(file), "--json").stdout)["run"] == run_name
    absent = look("status", str(write_config(tmp_path, run_name + "-absent")))
    assert absent.exit_code == 1
    assert f"has no run {run_name}-absent" in absent.output


def test_the_command_says_which_runs_there_are_when_the_name_is_wrong(
    admin: TopicAdmin, settings: ClusterSettings, run_name: str
) -> None:
    admin.create(topic_plan(make_config(run_name)))
    for command in (["describe"], ["delete", "--yes"]):
        result = run_cli(settings, command[0], run_name + "x", *command[1:])
        assert result.exit_code == 1
        assert f"has no run {run_name}x" in result.output
        assert run_name in result.output.replace(run_name + "x", "")
