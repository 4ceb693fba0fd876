"""`dora report` over a real Kafka: of a run as `dora run` makes it, and of damaged logs."""

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dora.bus import ClusterSettings, LogWriter, TopicAdmin, cluster_settings, topic_plan
from dora.config import KafkaSection
from dora.consumers.report import reading as report_reading
from dora.consumers.report.reading import read_report
from dora.errors import DeadlineError
from dora.log.run_log import RunLog
from dora.schemas.records import DeadLetter
from tests.brokers import Cluster
from tests.pages import parsed
from tests.small_run import dora, refused
from tests.written_run import DEADLINE, RunWriter, WrittenRun, config_of, spoil

RUN_SECONDS = 280.0
CONFIG = """\
[run]
name = "{run}"
directory = "runs"

[policy]
model = "emulated"

[task]
kind = "synthetic"
synthetic_prompts = 64
synthetic_prompt_tokens = 8

[window]
max_staleness = 1
groups_per_step = 4
group_size = 2

[rollout]
engine = "emulated"
workers = 2
capacity = 8
max_new_tokens = 64

[rollout.emulated]
time_scale = 0.05
load_seconds = 0.1
length_mean = 24

[trainer]
engine = "emulated"
steps = 4

[trainer.emulated]
step_seconds = 2.0
"""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that came to its end."""

    name: str
    address: str
    summary: dict[str, Any]

    def command(self, name: str, *options: str) -> Any:
        """`dora NAME RUN -b ... OPTIONS`."""
        return dora(name, self.name, "-b", self.address, *options)


@pytest.fixture(scope="module")
def ended(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    name = f"reported-{uuid.uuid4().hex[:8]}"
    directory = tmp_path_factory.mktemp("reported")
    (directory / "run.toml").write_text(CONFIG.format(run=name))
    done = subprocess.run(
        [sys.executable, "-m", "dora", "run", "run.toml", "--plain", "-b", kafka.bootstrap_servers],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((directory / "runs" / name / "summary.json").read_text())
    return EndedRun(name, kafka.bootstrap_servers, summary)


@pytest.fixture(scope="module")
def written(kafka: Cluster) -> WrittenRun:
    """A run with foreign records in its log, of whose first version a part was deleted."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    made = RunWriter(settings, f"damaged-{uuid.uuid4().hex[:8]}", "model").write()
    spoil(made)
    made.delete(made.topics.trajectories, 0, 2)
    with LogWriter(settings, client_id="test") as writer:
        stray = DeadLetter(made.run, "code", "why", "w0", 0)
        writer.send(made.topics.dispatch, stray, partition=1)
        writer.send(made.topics.steps, stray, partition=0)
        writer.flush(DEADLINE)
    return made


def test_the_report_of_a_run_has_the_numbers_of_summary_and_audit_and_loads_nothing(
    ended: EndedRun, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    result = ended.command("report", "-o", str(path), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {
        "file": str(path),
        "bytes": path.stat().st_size,
        "runs": [ended.name],
        "steps": [4],
        "violations": [0],
    }
    page = parsed(path.read_text())
    audit = json.loads(ended.command("audit", "--json").stdout)
    assert page.row("Groups started") == [f"{audit['groups_started']:,}"]
    assert page.row("Finished records") == [f"{audit['trajectories']:,}"]
    assert page.row("torn_step") == ["0"]
    assert "Audit: every rule was kept" in page.text
    assert f"Trajectories {ended.summary['trajectories']:,}" in page.text
    assert "K = 1, B = 4, G = 2" in page.text
    assert page.row("window.groups_per_step") == ["4"]
    assert page.row("rollout.emulated.length_mean") == ["24.0"]
    assert {"success-steps", "reward-time", "staleness", "lengths", "length-tail"} <= set(page.ids)
    assert {"throughput", "times-1", "timeline-1"} <= set(page.ids)


def test_a_report_has_the_numbers_of_the_summary(
    ended: EndedRun, settings: ClusterSettings
) -> None:
    report = read_report(settings, ended.name, audit=False)
    numbers = report.numbers
    for name in (
        "steps", "success_first", "success_last", "success_source", "trajectories", "tokens",
        "max_staleness", "staleness_bound", "live_versions_max", "groups_trained",
        "groups_set_aside",
    ):  # fmt: skip
        assert getattr(numbers, name) == ended.summary[name], name
    for name in ("wall_seconds", "tokens_per_second", "trainer_idle_share"):
        assert getattr(numbers, name) == pytest.approx(ended.summary[name]), name
    assert [point.value for point in report.success] == [
        point["success"] for point in ended.summary["curve"]
    ]
    finished = [each.record for each in RunLog(settings, ended.name).trajectories()]
    # one worker may have done all the work
    workers = {each.worker for each in finished if each.purpose == "train"}
    assert {row.label for row in report.timeline.rows} == workers
    assert [row.kind for row in report.versions] == ["full"] * 5
    assert report.audit is None and report.audit_refused is None


def test_foreign_and_deleted_records_are_named_and_do_not_stop_a_report(
    written: WrittenRun, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.html"
    address = written.settings.bootstrap_servers
    result = dora("report", written.run, "-b", address, "-o", str(path))
    assert result.exit_code == 0, result.output
    page = parsed(path.read_text())
    topics = written.topics
    assert f"{topics.trajectories} partition 0 begins at offset 2: 0 to 1 were deleted" in page.text
    assert f"{topics.dispatch} partition 1 offset" in page.text
    assert "holds a DeadLetter, which does not belong there" in page.text
    assert "cannot be read" in page.text
    assert page.row("Takeovers of trajectories") == ["its worker was lost", "1"]
    assert page.row("Groups set aside") == ["verifier timed out", "1"]
    assert "Notes:" in page.text


def test_runs_of_different_tasks_may_be_compared(
    ended: EndedRun, written: WrittenRun, tmp_path: Path
) -> None:
    path = tmp_path / "both.html"
    result = ended.command("report", "-o", str(path), "--compare", written.run, "--no-audit")
    assert result.exit_code == 0, result.output
    page = parsed(path.read_text())
    assert "The runs have different tasks" in page.text
    assert page.row("Steps")[:2] == ["4", "3"]
    assert page.row("task.kind") == ['"synthetic"', '"reasoning-gym"']


def test_what_cannot_be_reported_is_refused_with_the_reason(
    ended: EndedRun, tmp_path: Path
) -> None:
    refused(ended.command("report", "-o", str(tmp_path / "none" / "x.html")), 2, "no directory")
    refused(ended.command("report", "-o", str(tmp_path)), 2, "is a directory")
    refused(ended.command("report", "--compare", ended.name), 2, "not compared with itself")
    refused(dora("report", f"{ended.name}x", "-b", ended.address), 1, "has no run", ended.name)
    assert not list(tmp_path.iterdir())


def test_an_audit_that_takes_too_long_can_be_left_out(
    ended: EndedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> None:
        raise DeadlineError("the audit took too long", hint="An option that a report lacks.")

    monkeypatch.setattr(report_reading, "audit_run", late)
    result = ended.command("report", "-o", str(tmp_path / "x.html"))
    refused(result, 1, "took more than", "--timeout", "--no-audit")
    assert "lacks" not in result.output


def test_a_run_that_has_not_begun_is_refused(
    settings: ClusterSettings, run_name: str, tmp_path: Path
) -> None:
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config_of(run_name, settings.bootstrap_servers, "model")))
    output = tmp_path / "x.html"
    result = dora("report", run_name, "-b", settings.bootstrap_servers, "-o", str(output))
    refused(result, 1, "has not begun")
    assert not output.exists()
