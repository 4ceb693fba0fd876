"""Exported trajectories feed the trainer of a new run: no log of the old one is needed."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.bus import ClusterSettings
from dora.bus.topics import TopicAdmin, topic_plan
from dora.config import Config
from dora.config.loading import to_toml
from dora.consumers.audit import audit_run
from dora.consumers.trainer.trainer import Trainer
from dora.errors import RunError, UsageError
from dora.log.run_log import RunLog
from dora.producers.replay.exported import FileRecording, trajectory_of
from dora.producers.tasks.import_files import FileRow, find_files
from tests.configurations import emulated
from tests.exported_rows import group, rows_of
from tests.small_run import dora, refused
from tests.written_run import RunWriter, WrittenRun

SECONDS = 120.0


@pytest.fixture
def written(settings: ClusterSettings, run_name: str) -> WrittenRun:
    """A run that is over."""
    return RunWriter(settings, f"{run_name}-old", "model").write()


def config_of(directory: Path, name: str, address: str = "localhost:1", size: int = 2) -> Config:
    return emulated(
        directory,
        run=name,
        window={"group_size": size},
        trainer={"batch_timeout_seconds": SECONDS, "emulated": {"step_seconds": 0.0}},
        kafka={"bootstrap_servers": address},
    )


def test_a_trainer_takes_exported_groups_after_their_log_is_gone(
    written: WrittenRun, run_name: str, tmp_path: Path
) -> None:
    settings, home = written.settings, tmp_path / "exported"
    address = settings.bootstrap_servers
    export = dora("export", written.run, str(home), "--to", "parquet", "--ended", "-b", address)
    assert export.exit_code == 0, export.output
    old = {p.record.trajectory_id: p.record for p in RunLog(settings, written.run).trajectories()}
    with TopicAdmin(settings) as admin:
        admin.delete(written.run)
    path, config = tmp_path / "run.toml", config_of(tmp_path, run_name, address)
    path.write_text(to_toml(config))
    trainer = threading.Thread(target=train, args=(settings, config), daemon=True)
    trainer.start()
    secret = ("--set", 'kafka.properties={"sasl.password" = "canary-2718"}')
    serve = ("--serve", str(path), "-b", address, "--wait", "60", "--json", *secret)
    result = dora("import", str(home), *serve)
    trainer.join(SECONDS)
    assert not trainer.is_alive()
    assert result.exit_code == 0, result.output
    assert f"dora train {path} --bootstrap-server {address}" in result.stderr
    assert "canary" not in result.output
    report = json.loads(result.stdout)
    assert (report["version"], report["source"], report["left_out"]) == (3, written.run, 0)
    log = RunLog(settings, run_name)
    new = {p.record.trajectory_id: p.record for p in log.trajectories()}
    for identity, record in new.items():
        assert record.token_ids == old[identity].token_ids
        assert record.logprobs == old[identity].logprobs
        assert (record.reward, record.started_ms) == (
            old[identity].reward,
            old[identity].started_ms,
        )
    assert log.set_aside() == {"g6": "verifier timed out"}
    audit = audit_run(settings, run_name, chunks=False, deadline=SECONDS)
    assert audit.steps == 3 and not audit.violated, audit.findings


def train(settings: ClusterSettings, config: Config) -> None:
    """Train as soon as `dora import` has made the topics."""
    waiting = threading.Event()
    until = time.monotonic() + SECONDS
    topics = topic_plan(config)
    with TopicAdmin(settings) as admin:
        while len(admin.describe(config.run.name)) < len(topics) and time.monotonic() < until:
            waiting.wait(0.1)
    Trainer(config, settings).run(threading.Event())


def exported_lines(directory: Path, *changes: dict[str, Any]) -> list[Path]:
    """A file of two groups, with `changes` to its rows in turn."""
    from dora.consumers.export.directories import lines

    batch = rows_of([*group(0, 0, [0.0, 1.0]), *group(0, 1, [0.0, 1.0])])
    rows = [json.loads(line) for line in lines(batch)]
    for row, change in zip(rows, changes, strict=False):
        row.update(change)
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_files([file])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"run": "another"}, UsageError, "line 2: of run r, but rows before it are of another"),
        ({"staleness": 2}, RunError, "was trained 2 versions late, window.max_staleness = 1"),
        (
            {"version_runs": [{"version": 0, "tokens": 1}, {"version": 1, "tokens": 2}]},
            RunError,
            "mixes policy versions",
        ),
        (
            {"sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0}},
            RunError,
            "sampled with temperature = 0.5, rollout.temperature = 1.0",
        ),
        ({"version": "0"}, UsageError, "line 1: no trajectory: version: Input should be a valid"),
        ({"ordinal": "first"}, UsageError, "line 1: no trajectory: ordinal: Input should be a"),
        ({"trajectory_id": "g0/1"}, UsageError, "line 2: g0/1 stands in the files before that"),
    ],
)
def test_trajectories_that_do_not_fit_the_configuration_are_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    files = exported_lines(tmp_path, change)
    with pytest.raises(error) as caught:
        FileRecording(files, config_of(tmp_path, "new"))
    assert message in str(caught.value)


def test_what_is_not_whole_is_left_out_with_what_comes_after_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "new")
    whole = FileRecording(exported_lines(tmp_path), config)
    assert [a.group_id for a in whole.admissions] == ["g0", "g1"] and whole.left_out == 0
    served = [timed.record for timed in whole.records(whole.admissions[1])]
    assert served == [replace(each, run="new") for each in group(0, 1, [0.0, 1.0])]
    gap = {"ordinal": 7, "group_id": "g7", "trajectory_id": "g7/0"}
    found = FileRecording(
        exported_lines(tmp_path, {}, {}, gap, gap | {"trajectory_id": "g7/1"}), config
    )
    assert [a.group_id for a in found.admissions] == ["g0"] and found.left_out == 1
    with pytest.raises(RunError, match="hold no group of run r that can be served"):
        FileRecording(exported_lines(tmp_path, gap, gap | {"trajectory_id": "g7/1"}), config)
    with pytest.raises(RunError, match="has 2 trajectories in the files"):
        FileRecording(exported_lines(tmp_path), config_of(tmp_path, "new", size=1))


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"run": "r"}\n')
    config = config_of(tmp_path, "new")
    with pytest.raises(UsageError, match="is no export of trajectories: it has no column version"):
        FileRecording([file], config)
    (row,) = rows_of(group(0, 0, [1.0])).to_pylist()
    for change, message in (
        ({"response_logprobs": [float("nan")] * 3}, "log-probability"),
        ({"attempt": "first"}, "Trajectory cannot be written"),
    ):
        with pytest.raises(UsageError, match=f"row 1: no trajectory: {message}"):
            trajectory_of(FileRow("file, row 1", row | change), "new")
    parts = row | {"reward_parts": {"a": 0.5, "b": None}}  # as JSON lines say that b was NaN
    assert trajectory_of(FileRow("file, row 1", parts), "new").reward_parts == {"a": 0.5}
    refused(dora("import", str(file), "--serve", str(tmp_path / "none.toml")), 2, "none.toml")
