"""Exports that cannot be, or not wholly: said with the reason, and nothing is left half."""

import shutil
import subprocess
from pathlib import Path

import filelock
import pytest

from dora.consumers.export.directories import UNFINISHED as DRAFT
from dora.consumers.export.targets import LOCK
from dora.core import ring
from tests.brokers import Cluster
from tests.exports import CLOSED, FORMATS, export, rows, summary, visible
from tests.integration.test_disk import largest_file
from tests.needs import small_file_system
from tests.small_run import refused
from tests.written_run import WrittenRun, write


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
    refused(last, 1, "versions 0 to 1 of run", "its part of the journal of admissions was deleted")
    assert (summary(last)["exported"], summary(last)["foreign"]) == ([2], 0)


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


def test_a_full_file_system_keeps_whole_versions_and_takes_the_rest_once_there_is_room(
    written: WrittenRun, exported: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with small_file_system(disk, "28k"):
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
