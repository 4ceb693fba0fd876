"""Iceberg and Delta tables as targets: one commit for each version, or nothing of it."""

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dora.consumers.export.delta import DeltaTarget
from dora.consumers.export.iceberg import IcebergTarget
from dora.errors import ExportError, InUseError, UsageError
from dora.log.table_schema import SCHEMA
from tests.exported_rows import Broken, broken_rows, source, version_rows
from tests.lakes import Open, counted, delta, iceberg, iceberg_table, open_lake, table_of

__all__ = ["open_lake"]


def test_versions_are_added_once_with_what_they_came_from(tmp_path: Path, open_lake: Open) -> None:
    home = tmp_path / "lake"
    with open_lake(home) as target:
        assert target.exported == {}
        assert target.write(source(0), version_rows(0)) > 0
        assert target.write(source(3), version_rows(3)) > 0
        assert target.write(source(1), iter([])) == 0  # nothing was generated under it
    with open_lake(home) as target:
        assert target.exported == {v: source(v) for v in (0, 1, 3)}
    expected = pa.Table.from_batches([*version_rows(0), *version_rows(3)])
    found = table_of(home).sort_by([("version", "ascending"), ("trajectory_id", "ascending")])
    assert found.cast(SCHEMA).equals(expected.sort_by([
        ("version", "ascending"), ("trajectory_id", "ascending"),
    ]))  # fmt: skip


def test_rows_that_cannot_be_read_to_the_end_leave_the_table_as_it_was(
    tmp_path: Path, open_lake: Open
) -> None:
    with open_lake(tmp_path) as target:
        with pytest.raises(Broken):
            target.write(source(0), broken_rows(0))
        target.write(source(1), version_rows(1))
        with pytest.raises(Broken):
            target.write(source(2), broken_rows(2))
        assert set(target.exported) == {1}
        target.write(source(2), version_rows(2))
    assert counted(tmp_path) == {1: 4, 2: 4}


def test_a_version_that_is_there_is_replaced(tmp_path: Path, open_lake: Open) -> None:
    with open_lake(tmp_path) as target:
        for version in range(2):
            target.write(source(version), version_rows(version))
        target.write(source(0, groups=3), version_rows(0, 3))
    with open_lake(tmp_path) as target:
        assert target.exported == {0: source(0, groups=3), 1: source(1)}
    assert counted(tmp_path) == {0: 6, 1: 4}


def test_what_an_interrupted_export_left_is_removed(tmp_path: Path, open_lake: Open) -> None:
    said: list[str] = []
    with open_lake(tmp_path) as target:
        target.write(source(0), version_rows(0))
    (folder,) = {path.parent for path in tmp_path.rglob("version=0/*.parquet")}
    left = folder.with_name("version=1") / "left.parquet"
    left.parent.mkdir()
    left.write_bytes(b"half a file")
    kept = sorted(folder.iterdir())
    with open_lake(tmp_path, said.append) as target:
        target.write(source(1), version_rows(1))
    assert not left.exists() and sorted(folder.iterdir()) == kept
    assert said == ["removed the half-written version=1 that an interrupted export left"]
    assert counted(tmp_path) == {0: 4, 1: 4}


def test_what_cannot_be_removed_is_an_error_and_the_table_stays_as_it_was(
    tmp_path: Path, open_lake: Open
) -> None:
    with open_lake(tmp_path) as target:
        target.write(source(0), version_rows(0))
        (folder,) = {path.parent for path in tmp_path.rglob("version=0/*.parquet")}
        (folder.with_name("version=1") / "left.parquet").mkdir(parents=True)
        with pytest.raises(ExportError, match=r"cannot export version 1 to .*directory"):
            target.write(source(1), version_rows(1))
    assert counted(tmp_path) == {0: 4}


def test_what_somebody_else_put_there_is_refused_and_kept(tmp_path: Path, open_lake: Open) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"did not put there: .*notes\.txt"):
        open_lake(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    with pytest.raises(UsageError, match="is a file"):
        open_lake(file)


def test_two_exports_do_not_write_to_one_directory(tmp_path: Path, open_lake: Open) -> None:
    with open_lake(tmp_path), pytest.raises(InUseError, match="another export is writing"):
        open_lake(tmp_path)
    with open_lake(tmp_path):
        pass


def test_a_disk_that_refuses_a_file_leaves_the_table_as_it_was(
    tmp_path: Path, open_lake: Open
) -> None:
    with open_lake(tmp_path) as target:
        target.write(source(0), version_rows(0))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # bytes
        try:
            with pytest.raises(
                ExportError, match=r"cannot export version 1 to .*File too large"
            ) as e:
                target.write(source(1), version_rows(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert e.value.hint is not None and e.value.hint.startswith("Free space there")
        assert counted(tmp_path) == {0: 4}
        target.write(source(1), version_rows(1))
    assert counted(tmp_path) == {0: 4, 1: 4}


def test_names_of_directories_may_have_spaces(tmp_path: Path, open_lake: Open) -> None:
    home = tmp_path / "my lake"
    with open_lake(home) as target:
        target.write(source(0), version_rows(0))
    assert counted(home) == {0: 4}
    with pytest.raises(UsageError, match=r"no paths with # or \?"):
        iceberg(tmp_path / "lake#1")


def test_a_directory_that_may_not_be_written_to_is_an_error(open_lake: Open) -> None:
    with pytest.raises(ExportError, match="cannot write to /proc/dora-lake"):
        open_lake(Path("/proc/dora-lake"))


def test_what_was_deleted_from_a_table_does_not_come_back(tmp_path: Path, open_lake: Open) -> None:
    with open_lake(tmp_path) as target:
        target.write(source(0), version_rows(0))
        target.write(source(1), version_rows(1))
    if (tmp_path / "_delta_log").is_dir():
        DeltaTable(tmp_path).delete("version = 0")
        DeltaTable(tmp_path).optimize.compact()
    else:
        iceberg_table(tmp_path).delete("version == 0")
    with open_lake(tmp_path) as target:
        assert set(target.exported) == {0, 1}
    assert counted(tmp_path) == {1: 4}


@pytest.mark.parametrize(
    ("package", "module"),
    [("deltalake", "dora.consumers.export.delta"), ("pyiceberg", "dora.consumers.export.iceberg")],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, module: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UsageError) as caught:
        importlib.import_module(module)
    assert package in caught.value.message
    assert caught.value.hint is not None and "dora-rl[lakes]" in caught.value.hint


KILLED = """\
from pathlib import Path
from tests.exported_rows import source, version_rows
from tests.factories import run_started
from {module} import {name}
with {name}(Path({home!r}), run_started(), print) as target:
    for version in range(3):
        if version not in target.exported:
            target.write(source(version), version_rows(version))
"""


def test_kill_9_between_data_and_commit_leaves_a_version_whole_or_out(
    tmp_path: Path, open_lake: Open
) -> None:
    made = {iceberg: IcebergTarget, delta: DeltaTarget}[open_lake]
    code = KILLED.format(module=made.__module__, name=made.__name__, home=str(tmp_path))
    point = {"DORA_FAULT": "export.version_written:kill:2"}
    killed = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **point}, timeout=120, check=False
    )
    assert killed.returncode == -9
    assert counted(tmp_path) == {0: 4}
    with open_lake(tmp_path) as target:
        assert set(target.exported) == {0}
        for version in (1, 2):
            target.write(source(version), version_rows(version))
    assert counted(tmp_path) == {0: 4, 1: 4, 2: 4}
    referenced = 3
    assert len(list(tmp_path.rglob("version=*/*.parquet"))) == referenced
