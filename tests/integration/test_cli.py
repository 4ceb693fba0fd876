"""Commands that read a run's log, against a real Kafka that holds a small run."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from dora.bus import ClusterSettings, LogReader, TopicAdmin, topic_plan
from dora.bus.reader import Message
from dora.cli.main import cli
from dora.config import Config
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.monitor.run_view import RunView
from dora.schemas.records import Admission, DeadLetter, Record, SlotOffset, Step
from tests.factories import (
    LANES,
    RING,
    B,
    G,
    K,
    admission,
    policy,
    run_started,
    status,
    step,
    trajectory,
)
from tests.log_writer import RunLogWriter

DEADLINE = 30.0
NOW = 1_700_000_000_000


def config_of(run: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": run},
            "policy": {"model": "model"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward"},
            "trainer": {"steps": 2},
            "window": {"max_staleness": K, "groups_per_step": B, "group_size": G},
        }
    )


class Log(RunLogWriter):
    """A run's log that records are appended to by hand."""

    def send(self, *records: Record) -> None:
        super().send(*records)
        self.flush()

    def step(self, sequence: int, groups: list[Admission]) -> Step:
        metrics = {"success_rate": 0.5, "reward_mean": 0.5, "staleness_max": 1.0}
        return step(
            sequence, sequence, groups, self.places, at=NOW + 10_000 * (sequence + 1), **metrics
        )

    def fill(self) -> None:
        """Two steps; one group of version 2 is half done."""
        run = self.run
        groups = [admission(number, number // 2, run) for number in range(5)]
        slots = tuple(SlotOffset(self.topics.trajectories, p, 0) for p in range(RING * LANES))
        self.send(run_started(run, at=NOW), policy(0, run, slots))
        self.send(*groups[:2], *(trajectory(g, s, at=NOW) for g in groups[:2] for s in range(G)))
        self.send(self.step(0, groups[:2]), policy(1, run, slots))
        self.send(*groups[2:4], *(trajectory(g, s, at=NOW) for g in groups[2:4] for s in range(G)))
        self.send(self.step(1, groups[2:4]), policy(2, run, slots))
        self.send(groups[4], trajectory(groups[4], 0, reward=0.0, at=NOW + 20_000))
        self.send(
            status("trainer", "waiting", run=run, at=NOW + 21_000),
            status("coordinator", run=run, at=NOW + 21_000),
            status("w0", run=run, at=NOW + 21_000, version=2, capacity=8, running=("g4/1#0",)),
            DeadLetter(run, "verifier_failed", "no number", "w0", NOW, trajectory_id="g1/0"),
        )


@pytest.fixture
def log(settings: ClusterSettings, run_name: str) -> Iterator[Log]:
    TopicAdmin(settings).create(topic_plan(config_of(run_name)))
    log = Log(settings, run_name)
    try:
        yield log
    finally:
        log.close()


def invoke(settings: ClusterSettings, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "-b", settings.bootstrap_servers])


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_status_shows_a_run_whose_processes_are_gone_as_stalled(log: Log) -> None:
    log.fill()
    result = invoke(log.settings, "status", log.run)
    text = "\n".join(lines_of(result))
    for part in (log.run, "stalled", "trainer silent for", "1 of 4 groups outstanding", "0.500"):
        assert part in text


def test_status_as_json_holds_window_processes_and_rates(log: Log) -> None:
    log.fill()
    result = invoke(log.settings, "status", log.run, "--json")
    snapshot = json.loads(result.stdout)
    assert (snapshot["step"], snapshot["newest"], snapshot["groups_outstanding"]) == (2, 2, 1)
    assert snapshot["staleness_max"] == 1
    assert snapshot["trajectories"] == 9
    assert snapshot["dead_letters"] == 1
    assert snapshot["health"] == "stalled" and snapshot["reasons"]
    assert [process["process"] for process in snapshot["processes"]] == [
        "trainer",
        "coordinator",
        "w0",
    ]
    assert snapshot["versions"][-1]["trajectories_unfinished"] == 1


def test_status_of_a_run_without_a_ledger_says_that_it_has_not_started(log: Log) -> None:
    text = "\n".join(lines_of(invoke(log.settings, "status", log.run)))
    assert "not started" in text


@pytest.mark.parametrize("command", ["status", "tail"])
def test_an_unknown_run_is_refused_with_the_names_there_are(
    settings: ClusterSettings, log: Log, command: str
) -> None:
    result = invoke(settings, command, log.run[:-1])
    assert result.exit_code == 1
    assert log.run in result.stderr


def test_a_long_history_is_read_from_the_window_on(log: Log) -> None:
    run = log.run
    old = [admission(number, 0, run) for number in range(2)]
    middle = [admission(number, 1, run) for number in (2, 3)]
    topic = log.topics.trajectories
    log.send(run_started(run, at=NOW), policy(0, run), *old)
    log.send(*(trajectory(group, sample, at=NOW) for group in old for sample in range(G)))
    log.send(log.step(0, old), policy(1, run, (SlotOffset(topic, 1, 0),)), *middle)
    log.send(*(trajectory(group, sample, at=NOW) for group in middle for sample in range(G)))
    log.send(log.step(1, middle), policy(2, run, (SlotOffset(topic, 2, 0),)))
    new = admission(4, 2, run)
    log.send(new, trajectory(new, 0, at=NOW))
    for history, trajectories in ((None, 9), (1, 5)):
        monitor = RunMonitor(log.settings, run, history=history)
        try:
            monitor.catch_up(DEADLINE)
            snapshot = monitor.snapshot()
            assert snapshot.trajectories == trajectories
            assert snapshot.groups_outstanding == 1
            assert snapshot.whole_history is (history is None)
            log_grows = trajectory(new, 1, at=NOW)
            if history is not None:
                log.send(log_grows)
                while monitor.snapshot().trajectories < trajectories + 1:
                    assert monitor.poll(timeout=DEADLINE), "the new record did not come"
        finally:
            monitor.close()


def test_an_evaluation_of_a_version_long_gone_is_counted_whatever_arrives_first(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, prompts = log.run, 300
    held_out = [admission(number, 0, run, "eval") for number in range(prompts)]
    # more than comes with one fetch, so that the journal's end comes after the trajectories
    others = [admission(number, 3, run, "eval") for number in range(400)]
    digits = Random(1)  # that do not compress
    others = [replace(each, group_id=f"{digits.getrandbits(40_000):x}") for each in others]
    groups = [admission(number, number // 2, run) for number in range(12)]
    log.send(run_started(run, at=NOW), policy(0, run), *others, *held_out)
    log.send(*(trajectory(group, at=NOW) for group in held_out))
    for sequence in range(6):
        batch = groups[2 * sequence : 2 * sequence + 2]
        log.send(*batch, *(trajectory(g, s, at=NOW) for g in batch for s in range(G)))
        log.send(log.step(sequence, batch), policy(sequence + 1, run))
    read: list[str] = []
    handle = RunView.handle

    def noted(view: RunView, message: Message) -> None:
        read.append(type(message.value).__name__)
        handle(view, message)

    monkeypatch.setattr(RunView, "handle", noted)
    monitor = RunMonitor(log.settings, run)
    try:
        monitor.catch_up(DEADLINE)
        snapshot = monitor.snapshot()
    finally:
        monitor.close()
    evaluation, _ = snapshot.evaluations
    assert (evaluation.version, evaluation.admitted, evaluation.finished) == (0, prompts, prompts)
    assert "Admission" not in read[read.index("Trajectory") :]
    assert (snapshot.trajectories, snapshot.late) == (prompts + len(groups) * G, 0)


def test_tail_shows_the_records_of_each_topic(log: Log) -> None:
    log.fill()
    expected = {
        "trajectories": 9,
        "steps": 3,
        "policies": 3,
        "workers": 3,
        "dispatch": 5,
        "dead-letters": 1,
        "chunks": 0,
    }
    for topic, count in expected.items():
        arguments = ("tail", log.run, "-t", topic, "-o", "beginning", "--exit")
        assert len(lines_of(invoke(log.settings, *arguments))) == count, topic
        objects = [
            json.loads(line) for line in lines_of(invoke(log.settings, *arguments, "--json"))
        ]
        assert all(each["topic"] == f"{log.run}.{topic}" for each in objects)
    last = lines_of(invoke(log.settings, "tail", log.run, "-t", "steps", "-o", "-1", "--exit"))
    assert len(last) == 1 and "step 1 → 2" in last[0]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("-o", "beginning", "--limit", "2"), 2),
        (("-o", "-3", "--exit"), 3),
        (("-o", "end", "--exit"), 0),
        (("-o", "3", "--exit"), 2),
        (("-o", "beginning", "--exit", "--version", "1"), 4),
        (("-o", "s@1d", "-e"), 9),
        (("-o", "beginning", "--until", "1000000000000"), 0),
        (("-o", "s@2100-01-01", "-e"), 0),
        (("-o", "beginning", "--exit", "--version", "7"), 0),
    ],
)
def test_tail_begins_where_it_is_told(log: Log, arguments: tuple[str, ...], count: int) -> None:
    log.fill()
    found = [
        json.loads(line)
        for line in lines_of(invoke(log.settings, "tail", log.run, "--json", *arguments))
    ]
    assert len(found) == count
    if "--version" in arguments:
        assert all(each["record"]["policy_version"] == 1 for each in found)


def test_tail_prints_partitions_headers_and_formats_as_kcat_does(log: Log) -> None:
    log.fill()

    def tailed(*arguments: str) -> str:
        return invoke(log.settings, "tail", log.run, "-o", "beginning", "-e", *arguments).stdout

    every = [json.loads(line) for line in tailed("--json").splitlines()]
    chosen = every[0]["partition"]
    one = [json.loads(line) for line in tailed("--json", "-p", str(chosen)).splitlines()]
    assert one == [each for each in every if each["partition"] == chosen]
    assert one[0]["headers"]["ce_type"] == "dora.trajectory.v1"
    first = one[0]
    line = tailed("-p", str(chosen), "-c", "1", "-f", r"%t\t%p@%o %k %T 100%% %h %s\n")
    place, rest = line.split("\t")
    assert place == f"{log.run}.trajectories"
    start = f"{chosen}@{first['offset']} {first['key']} {first['timestamp_ms']} 100% "
    assert rest.startswith(start) and "ce_type=dora.trajectory.v1" in rest
    assert json.loads(rest[rest.index("{") :]) == first["record"]
    refused = invoke(log.settings, "tail", log.run, "-p", "99")
    assert refused.exit_code == 2 and "no 99" in refused.output
    assert invoke(log.settings, "tail", log.run, "-o", "s@yesterday").exit_code == 2


def test_a_damaged_record_is_shown_as_unreadable_and_the_rest_goes_on(
    log: Log, settings: ClusterSettings
) -> None:
    from confluent_kafka import Producer

    log.send(run_started(log.run, at=NOW))
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    producer.produce(log.topics.steps, b"\xc3\x01short", partition=0)
    assert producer.flush(DEADLINE) == 0
    lines = lines_of(invoke(settings, "tail", log.run, "-t", "steps", "-o", "beginning", "--exit"))
    assert len(lines) == 2 and "unreadable (" in lines[1]
    snapshot = json.loads(invoke(settings, "status", log.run, "--json").stdout)
    assert snapshot["unreadable"] == 1
    assert f"{log.topics.steps}[0]@1" in snapshot["problems"][0]


def test_an_unreachable_cluster_is_named_within_the_connect_timeout(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli,
        ["status", "demo", "-b", "127.0.0.1:1"],
        env={"DORA_KAFKA__CONNECT_TIMEOUT_SECONDS": "1"},
    )
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def test_the_readers_leave_no_trace_in_the_log(log: Log) -> None:
    log.fill()
    reader = LogReader(log.settings, client_id="test")
    topics = [(name, 0) for name in log.topics.all]
    before = reader.end_offsets(topics)
    invoke(log.settings, "status", log.run)
    invoke(log.settings, "tail", log.run, "-o", "beginning", "--exit")
    assert reader.end_offsets(topics) == before
    reader.close()


DRY_RUN = """
[run]
name = "dry"
[policy]
model = "model"
prepare = "hooks:prepare"
[task]
kind = "jsonl"
path = "words.jsonl"
verifier = "hooks:verify"
[trainer]
steps = 3
[rollout]
engine = "emulated"
"""


@pytest.fixture
def prepared_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(DRY_RUN)
    (tmp_path / "words.jsonl").write_text('{"prompt": "sun", "answer": "nus"}\n' * 20)
    (tmp_path / "hooks.py").write_text(
        "def prepare(directory, config): ...\ndef verify(response, item): return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hooks", raising=False)
    return tmp_path


def test_a_dry_run_says_what_would_be_done_and_does_nothing(prepared_directory: Path) -> None:
    before = sorted(prepared_directory.rglob("*"))
    result = CliRunner().invoke(cli, ["run", "run.toml", "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    checks = {check["subject"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["task.verifier"]["outcome"] == "ok"
    assert checks["model"]["detail"] == "make model with hooks:prepare"
    assert "start a local broker" in checks["kafka"]["detail"]
    assert checks["processes"]["detail"] == "start coordinator, trainer, w0"
    left = [
        path for path in sorted(prepared_directory.rglob("*")) if "__pycache__" not in str(path)
    ]
    assert left == before


def test_a_dry_run_finds_all_problems_at_once(prepared_directory: Path) -> None:
    (prepared_directory / "words.jsonl").write_text("no json\n")
    (prepared_directory / "hooks.py").write_text("def prepare(directory, config): ...\n")
    result = CliRunner().invoke(cli, ["run", "run.toml", "--dry-run", "--json"])
    assert result.exit_code == 1
    problems = {
        check["subject"]: check["detail"]
        for check in json.loads(result.stdout)["checks"]
        if check["outcome"] == "problem"
    }
    assert 'has no "verify"' in problems["task.verifier"]
    assert "words.jsonl" in problems["prompts"]
    assert "nothing was started" in result.stderr


def test_a_failing_prepare_leaves_no_model_directory(prepared_directory: Path) -> None:
    (prepared_directory / "hooks.py").write_text(
        "def prepare(directory, config):\n    directory.mkdir()\n    raise SystemExit(3)\n"
    )
    result = CliRunner().invoke(cli, ["prepare", "run.toml"])
    assert result.exit_code == 3
    assert not (prepared_directory / "model").exists()


def test_doctor_reports_each_finding_for_programs(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json", "--broker-dir", str(tmp_path / "none")])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["ok"] else 1)
    subjects = {finding["subject"] for finding in report["findings"]}
    assert {"python", "java", "torch", "deepspeed", "c++ compiler", "broker"} <= subjects
    missing = [finding for finding in report["findings"] if finding["verdict"] == "missing"]
    assert all(finding["remedy"] for finding in missing)


def test_doctor_refuses_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nname = 1\n")
    result = CliRunner().invoke(cli, ["doctor", str(tmp_path / "run.toml"), "--json"])
    assert result.exit_code == 1
    finding = json.loads(result.stdout)["findings"][-1]
    assert (finding["subject"], finding["verdict"]) == ("configuration", "missing")
