"""`dora export` of a written run: what arrives, what is done again, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from dora.bus import BEGINNING, LogReader, LogWriter, cluster_settings
from dora.config import KafkaSection
from dora.consumers.export_rows import SOURCE_KEY, Source
from dora.consumers.export_targets import LOCK
from dora.consumers.export_targets import UNFINISHED as DRAFT
from dora.consumers.run_log import RunLog
from dora.core import ring
from dora.faults import VARIABLE
from dora.schemas.records import (
    DeadLetter,
    GroupRef,
    SampleRef,
    Step,
    unpack_logprobs,
    unpack_tokens,
)
from tests.brokers import Cluster
from tests.integration.test_disk import largest_file
from tests.run_records import status
from tests.small_run import dora, refused
from tests.written_run import (
    DEADLINE,
    EVALUATED,
    OUTSTANDING,
    SET_ASIDE,
    UNFINISHED,
    RunWriter,
    WrittenRun,
    admissions,
    spoil,
    trajectory,
)

CLOSED = (0, 1, 2)
"""Of version 3, the last one, groups are outstanding."""
FORMATS = ("parquet", "jsonl")


def write(kafka: Cluster) -> WrittenRun:
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    return RunWriter(settings, f"export-{uuid.uuid4().hex[:8]}", "model").write()


@pytest.fixture(scope="module")
def written(kafka: Cluster) -> WrittenRun:
    """Do not change it."""
    return write(kafka)


@pytest.fixture(scope="module")
def exported(written: WrittenRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as Parquet. Do not change it."""
    directory = tmp_path_factory.mktemp("exported") / "rows"
    assert export(written, directory).exit_code == 0
    return directory


def command(written: WrittenRun, directory: Path, to: str, *options: str) -> list[str]:
    address = written.settings.bootstrap_servers
    return ["export", written.run, "--to", to, str(directory), "-b", address, *options]


def export(written: WrittenRun, directory: Path, *options: str, to: str = "parquet") -> Result:
    return dora(*command(written, directory, to, *options))


def kill(written: WrittenRun, directory: Path, fault: str, *, to: str = "parquet") -> None:
    """The command as a process that is killed (SIGKILL) at a point."""
    killed = subprocess.run(
        [sys.executable, "-m", "dora", *command(written, directory, to)],
        env={**os.environ, VARIABLE: fault},
        capture_output=True,
        timeout=4 * DEADLINE,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def summary(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def rows(directory: Path) -> list[dict[str, Any]]:
    """All rows, sorted, as readers of the directory see them."""
    files = sorted(directory.glob("version=*/trajectories.jsonl"))
    if files:
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    else:
        found = ds.dataset(directory, partitioning="hive").to_table().to_pylist()
        for row in found:
            row["reward_parts"] = dict(row["reward_parts"])
            for name in ("started_at", "generated_at", "created_at"):
                row[name] = row[name].isoformat()
    return sorted(found, key=lambda row: (row["version"], row["ordinal"], row["trajectory_id"]))


def visible(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.glob("*/[!._]*"))


def dead_letters(written: WrittenRun) -> list[DeadLetter]:
    with LogReader(written.settings, client_id="test") as reader:
        reader.assign({(written.topics.dead_letters, 0): BEGINNING})
        found = [message.value for message in reader.read_to_end(DEADLINE)]
    return [value for value in found if isinstance(value, DeadLetter)]


def test_each_counted_trajectory_of_a_closed_version_is_one_row(
    written: WrittenRun, exported: Path
) -> None:
    counted = {
        p.record.trajectory_id: p
        for p in RunLog(written.settings, written.run).trajectories(CLOSED)
    }
    found = {row["trajectory_id"]: row for row in rows(exported)}
    assert found.keys() == counted.keys() and len(rows(exported)) == len(counted) == 15
    for identity, row in found.items():
        record = counted[identity].record
        tokens = [*row["prompt_token_ids"], *row["response_token_ids"]]
        assert tokens == unpack_tokens(record.token_ids).tolist()
        generated = record.mask.index(1)
        assert len(row["prompt_token_ids"]) == generated
        assert row["response_logprobs"] == unpack_logprobs(record.logprobs)[generated:].tolist()
        assert row["response_mask"] == [bool(each) for each in record.mask[generated:]]
        assert (row["kafka_partition"], row["kafka_offset"]) == (
            counted[identity].partition,
            counted[identity].offset,
        )
        for name in ("run", "group_id", "sample", "reward", "reward_parts", "text", "error"):
            assert row[name] == getattr(record, name)
        assert row["version"] == record.policy_version


def test_a_row_says_what_became_of_its_group(exported: Path) -> None:
    fates = {
        row["group_id"]: (row["state"], row["trained_step"], row["staleness"])
        for row in rows(exported)
    }
    assert fates["g0"] == ("trained", 1, 0)
    assert fates["g3"] == ("trained", 3, 1)
    assert fates[SET_ASIDE] == ("set-aside", None, None)
    assert fates[EVALUATED] == ("evaluation", None, None)
    reasons = {row["set_aside_reason"] for row in rows(exported) if row["group_id"] == SET_ASIDE}
    assert reasons == {"verifier timed out"}


def test_files_say_which_offsets_they_came_from(written: WrittenRun, exported: Path) -> None:
    log = RunLog(written.settings, written.run)
    assert visible(exported) == [f"version={v}/trajectories.parquet" for v in CLOSED]
    for version in CLOSED:
        file = exported / f"version={version}" / "trajectories.parquet"
        source = Source.from_json(pq.read_metadata(file).metadata[SOURCE_KEY.encode()])
        assert (source.run, source.version) == (written.run, version)
        assert source.cluster_id == log.started.cluster_id
        offsets = [(p.partition, p.offset) for p in log.trajectories({version})]
        assert source.ranges == {version: (0, len(offsets))}, "a slot of one lane"
        assert all(source.ranges[p][0] <= o < source.ranges[p][1] for p, o in offsets)


def test_json_lines_hold_the_same(written: WrittenRun, exported: Path, tmp_path: Path) -> None:
    result = export(written, tmp_path, to="jsonl")
    assert result.exit_code == 0, result.output
    assert rows(tmp_path) == rows(exported)
    sources = [json.loads(p.read_text()) for p in tmp_path.glob("*/_source.json")]
    assert sorted(each["version"] for each in sources) == list(CLOSED)


def test_only_what_is_new_is_added(written: WrittenRun, exported: Path, tmp_path: Path) -> None:
    first = summary(export(written, tmp_path, "--versions", ":0", "--json"))
    assert (first["exported"], first["there"], first["rows"]) == ([0], 0, 4)
    file = tmp_path / "version=0" / "trajectories.parquet"
    before = file.stat()
    second = summary(export(written, tmp_path, "--json"))
    assert (second["exported"], second["there"], second["rows"]) == ([1, 2], 1, 11)
    assert second["bytes"] == sum(
        (tmp_path / f"version={v}" / file.name).stat().st_size for v in (1, 2)
    )
    assert second["open"] == {"3": "2 of its groups are outstanding"}
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert rows(tmp_path) == rows(exported)
    third = export(written, tmp_path)
    assert "nothing to add" in third.stdout and "3 versions were there already" in third.stdout


@pytest.mark.parametrize(
    ("to", "point", "there"),
    [
        ("parquet", "export.batch_read", 1),
        ("parquet", "export.version_written", 1),
        ("parquet", "export.version_exported", 2),
        ("jsonl", "export.batch_read", 1),
        ("jsonl", "export.version_placed", 2),
    ],
)
def test_a_killed_export_leaves_whole_versions_and_the_next_one_the_rest(
    written: WrittenRun, exported: Path, tmp_path: Path, to: str, point: str, there: int
) -> None:
    kill(written, tmp_path, f"{point}:kill:2", to=to)
    whole = [row for row in rows(exported) if row["version"] < there]
    assert rows(tmp_path) == whole, "no half file, nothing twice"
    drafts = [p.name for p in tmp_path.iterdir() if p.name.startswith(DRAFT)]
    assert bool(drafts) == (there == 1)
    result = export(written, tmp_path, to=to)
    assert result.exit_code == 0, result.output
    said = "removed the half-written version=1 that an interrupted export left"
    assert (said in result.stderr) == bool(drafts)
    assert rows(tmp_path) == rows(exported)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(DRAFT)]


def test_what_does_not_belong_there_becomes_dead_letters_once_and_the_rest_is_exported(
    kafka: Cluster, tmp_path: Path
) -> None:
    written = write(kafka)
    spoil(written)  # partition 0: behind version 3
    with LogWriter(written.settings, client_id="test") as writer:
        writer.send(written.topics.trajectories, status("w0", run=written.run), partition=2)
        other = trajectory(admissions("another")[5], 0)
        writer.send(written.topics.trajectories, other, partition=2)
        writer.send(written.topics.steps, status("w0", run=written.run), partition=0)
        writer.flush(DEADLINE)
    quiet = summary(export(written, tmp_path / "quiet", "--no-dead-letters", "--json"))
    assert (quiet["exported"], quiet["foreign"], quiet["dead_letters"]) == ([0, 1, 2], 3, 0)
    assert dead_letters(written) == []
    kill(written, tmp_path / "a", "export.version_written:kill:3")
    assert len(dead_letters(written)) == 3, "they are there before the version is"
    first = summary(export(written, tmp_path / "a", "--json"))
    assert (first["exported"], first["foreign"], first["dead_letters"]) == ([2], 3, 0)
    assert len(rows(tmp_path / "a")) == 15
    letters = {(each.topic, each.partition): each for each in dead_letters(written)}
    assert "holds a Status" in letters[written.topics.steps, 0].reason
    second = export(written, tmp_path / "b", "--ended", "--json")
    told = summary(second)
    assert (told["exported"], told["foreign"], told["dead_letters"]) == ([0, 1, 2, 3], 7, 4)
    assert told["duplicates"] == 1, "g0/0 finished a second time behind version 3"
    reasons = sorted(each.reason for each in dead_letters(written))
    assert [reason.split(",")[0] for reason in reasons] == [
        "cannot be read: starts with 6e6f",
        "holds a DeadLetter",
        "holds a Status",
        "holds a Status",
        "is g0/7 of version 0",
        "is of group g99",
        "is of run another",
    ]
    unreadable = next(each for each in dead_letters(written) if each.code == "bad_magic")
    assert unreadable.payload == b"no record" and unreadable.partition == 0
    assert {row["state"] for row in rows(tmp_path / "b") if row["version"] == 3} == {"outstanding"}
    third = export(written, tmp_path / "c", "--ended")
    assert "7 records do not belong where they lie" in third.stdout
    assert "0 of them are new among the dead letters" in third.stdout
    assert len(dead_letters(written)) == 7


def test_versions_that_retention_deleted_are_named_and_the_rest_is_exported(
    kafka: Cluster, tmp_path: Path
) -> None:
    written = write(kafka)
    early = tmp_path / "early"
    assert export(written, early, "--versions", ":1").exit_code == 0
    written.delete(written.topics.trajectories, 1, before=2)
    late = tmp_path / "late"
    result = export(written, late, "--json")
    refused(
        result,
        1,
        f"version 1 of run {written.run} cannot be exported to {late} any more",
        "version 1: ",
        "partition 1 begins at offset 2: 0 to 1, which are its, were deleted by retention",
        "leave those out with --versions 2:",
    )
    assert summary(result)["exported"] == [0, 2]
    assert {row["version"] for row in rows(late)} == {0, 2}
    assert export(written, late, "--versions", "2:").exit_code == 0
    assert export(written, early).exit_code == 0, "it has version 1 since before"
    assert {row["version"] for row in rows(early)} == set(CLOSED)
    written.delete(written.topics.dispatch, ring.JOURNAL, before=2)  # g0 and g1 started there
    last = export(written, tmp_path / "last", "--json")
    refused(last, 1, "versions 0 to 1 of run", f"its part of {written.topics.dispatch} was deleted")
    assert (summary(last)["exported"], summary(last)["foreign"]) == ([2], 0)


def test_a_version_is_replaced_when_its_run_went_on_after_all(
    kafka: Cluster, tmp_path: Path
) -> None:
    written = write(kafka)
    assert export(written, tmp_path, "--ended").exit_code == 0

    def train(group_id: str, refs: tuple[SampleRef, ...], version: int) -> None:
        group = next(each for each in admissions(written.run) if each.group_id == group_id)
        ref = GroupRef(group_id, group.ordinal, group.policy_version, refs)
        entry = Step(written.run, "step", version, version, version + 1, (ref,), (), {}, "s", None,
                     "trainer", 0)  # fmt: skip
        with LogWriter(written.settings, client_id="test") as writer:
            writer.send(written.topics.steps, entry, partition=0)
            writer.flush(DEADLINE)

    placed = RunLog(written.settings, written.run).group(OUTSTANDING)
    train(OUTSTANDING, tuple(SampleRef(s, 0, p.partition, p.offset) for s, p in placed.items()), 3)
    told = summary(export(written, tmp_path, "--ended", "--json"))
    assert (told["exported"], told["updated"], told["there"]) == ([3], [3], 3)
    assert {row["state"] for row in rows(tmp_path) if row["version"] == 3} == {"trained"}
    assert len(rows(tmp_path)) == 17

    train(UNFINISHED, (SampleRef(0, 0, 0, 98), SampleRef(1, 0, 0, 99)), 4)
    refused(
        export(written, tmp_path, "--ended"),
        1,
        f"version 3: the ledger names {UNFINISHED}/0 (partition 0 offset 98), {UNFINISHED}/1",
        "which cannot be read there",
    )
    assert len(rows(tmp_path)) == 17, "what was there stays"


def test_one_version_that_may_still_change_is_refused(written: WrittenRun, tmp_path: Path) -> None:
    refused(
        export(written, tmp_path, "--version", "3"),
        1,
        f"version 3 of run {written.run} cannot be exported yet: 2 of its groups are outstanding",
        "say so with --ended",
    )
    refused(export(written, tmp_path, "--version", "9"), 1, "has no version 9: it has versions 0")
    refused(export(written, tmp_path, "--versions", "2:1"), 2, "not of the form A:B with A <= B")
    assert visible(tmp_path) == []


def test_a_directory_that_is_not_this_runs_export_is_refused_before_anything_is_written(
    written: WrittenRun, exported: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    refused(
        export(written, foreign),
        2,
        f"{foreign} holds something that this export did not put there: {foreign}/notes.txt",
        "Name a directory that is new or empty",
    )
    assert [p.name for p in foreign.iterdir()] == ["notes.txt"]
    refused(export(written, foreign / "notes.txt"), 2, "is a file; name a directory")
    refused(export(written, exported, to="jsonl"), 2, "version=0/trajectories.parquet")

    damaged = tmp_path / "damaged"
    shutil.copytree(exported, damaged)
    file = damaged / "version=1" / "trajectories.parquet"
    file.write_bytes(file.read_bytes()[:-10])
    refused(export(written, damaged), 2, f"did not put there: {file}")


def test_a_directory_with_another_runs_export_is_refused(
    kafka: Cluster, exported: Path, written: WrittenRun
) -> None:
    other = write(kafka)
    refused(export(other, exported), 2, f"{exported} holds the export of run {written.run}")
    assert visible(exported) == [f"version={v}/trajectories.parquet" for v in CLOSED]


def test_two_exports_do_not_write_into_one_directory(written: WrittenRun, tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / LOCK):
        refused(export(written, tmp_path), 1, f"another export is writing to {tmp_path}")
    assert export(written, tmp_path).exit_code == 0


@contextmanager
def file_system(place: Path, size: str) -> Iterator[None]:
    """A small one, where this user may mount it."""
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a small file system")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_file_system_keeps_whole_versions_and_takes_the_rest_once_there_is_room(
    written: WrittenRun, exported: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with file_system(disk, "28k"):
        refused(
            export(written, disk),
            1,
            f"cannot export version 1 to {disk}: ",
            "No space left on device",
            "Free space there, or name another directory.",
            "The versions that were exported before are whole (1 of them)",
        )
        assert rows(disk) == [row for row in rows(exported) if row["version"] == 0]
        assert not [p.name for p in disk.iterdir() if p.name.startswith(DRAFT)]
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert export(written, disk).exit_code == 0
        assert rows(disk) == rows(exported)


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_that_the_disk_refuses_is_not_left_half(
    written: WrittenRun, exported: Path, tmp_path: Path, to: str
) -> None:
    with largest_file(2):
        refused(
            export(written, tmp_path, to=to), 1, f"cannot export version 0 to {tmp_path}: ",
            "File too large", "Free space there",
        )  # fmt: skip
    assert visible(tmp_path) == []
    assert export(written, tmp_path, to=to).exit_code == 0
    assert rows(tmp_path) == rows(exported)
