"""Iceberg and Delta tables as targets: one commit for each version, or nothing of it."""

import importlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyiceberg.catalog import load_catalog

from dora.consumers.export_delta import DeltaTarget
from dora.consumers.export_iceberg import IcebergTarget
from dora.consumers.export_rows import SCHEMA, SOURCE_KEY
from dora.errors import ExportError, InUseError, UsageError
from tests.exported_rows import Broken, broken_rows, source, version_rows
from tests.run_records import run_started

Open = Callable[..., Any]


def silent(text: str) -> None:
    """Nobody listens."""


def iceberg(directory: Path, say: Callable[[str], None] = silent, run: str = "r") -> IcebergTarget:
    return IcebergTarget(directory, run_started(run), say)


def delta(directory: Path, say: Callable[[str], None] = silent, run: str = "r") -> DeltaTarget:
    return DeltaTarget(directory, run_started(run), say)


@pytest.fixture(params=[iceberg, delta])
def open_lake(request: pytest.FixtureRequest) -> Open:
    """Opens a table of either format."""
    made: Open = request.param
    return made


def table_of(directory: Path) -> pa.Table:
    """All rows, as readers of the format see them."""
    if (directory / "_delta_log").is_dir():
        return DeltaTable(directory).to_pyarrow_table()
    table: pa.Table = iceberg_table(directory).scan().to_arrow()
    return table


def iceberg_table(directory: Path, run: str = "r") -> Any:
    """The table of a directory's catalog, opened as people do."""
    catalog = load_catalog("dora", type="sql", uri=f"sqlite:///{directory}/catalog.db")
    return catalog.load_table(("dora", run))


def counted(directory: Path) -> dict[int, int]:
    """Rows by version."""
    rows = table_of(directory).group_by("version").aggregate([("ordinal", "count")])
    return dict(
        zip(*(rows[name].to_pylist() for name in ("version", "ordinal_count")), strict=True)
    )


def test_versions_are_added_once_with_what_they_came_from(tmp_path: Path, open_lake: Open) -> None:
    home = tmp_path / "lake"
    with open_lake(home) as target:
        assert target.exported("r") == {}
        assert target.write(source(0), version_rows(0)) > 0
        assert target.write(source(3), version_rows(3)) > 0
        assert target.write(source(1), iter([])) == 0  # nothing was generated under it
    with open_lake(home) as target:
        assert target.exported("r") == {v: source(v) for v in (0, 1, 3)}
        assert target.exported("other") == {}
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
        assert set(target.exported("r")) == {1}
        target.write(source(2), version_rows(2))
    assert counted(tmp_path) == {1: 4, 2: 4}


def test_a_version_that_is_there_is_replaced(tmp_path: Path, open_lake: Open) -> None:
    with open_lake(tmp_path) as target:
        for version in range(2):
            target.write(source(version), version_rows(version))
        target.write(source(0, groups=3), version_rows(0, 3))
    with open_lake(tmp_path) as target:
        assert target.exported("r") == {0: source(0, groups=3), 1: source(1)}
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


def test_an_export_that_died_before_its_first_commit_is_gone_on_with(tmp_path: Path) -> None:
    left = tmp_path / "version=0" / "left.parquet"
    left.parent.mkdir()
    left.write_bytes(b"half a file")
    with delta(tmp_path) as target:
        target.write(source(0), version_rows(0))
    assert not left.exists() and counted(tmp_path) == {0: 4}


def test_the_table_of_another_run_is_refused(tmp_path: Path) -> None:
    with delta(tmp_path / "d") as target:
        target.write(source(0), version_rows(0))
    with pytest.raises(UsageError, match="holds the export of run r"):
        delta(tmp_path / "d", run="s")
    with iceberg(tmp_path / "i"):
        pass
    with iceberg(tmp_path / "i", run="s") as target:  # a catalog has room for both
        target.write(source(0, run="s"), version_rows(0))
    assert iceberg_table(tmp_path / "i", "s").scan().count() == 4


@pytest.mark.parametrize("make", [IcebergTarget, DeltaTarget])
def test_an_earlier_run_of_the_same_name_is_another_run(tmp_path: Path, make: Any) -> None:
    with make(tmp_path, run_started(), silent) as target:
        target.write(source(0), version_rows(0))
    with pytest.raises(UsageError, match="an earlier run of the name r"):
        make(tmp_path, replace(run_started(), run_id="second"), silent)


def test_what_somebody_else_put_there_is_refused_and_kept(tmp_path: Path, open_lake: Open) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"did not put there: .*notes\.txt"):
        open_lake(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    with pytest.raises(UsageError, match="is a file"):
        open_lake(file)


def test_tables_that_no_export_made_are_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "d"), pa.table({"x": [1]}))
    with pytest.raises(UsageError, match="a Delta table that no export of dora made"):
        delta(tmp_path / "d")
    with iceberg(tmp_path / "i") as target:
        table = target._table
        with table.transaction() as transaction:
            transaction.remove_properties("dora.run")
    with pytest.raises(UsageError, match="an Iceberg table that no export of dora made"):
        iceberg(tmp_path / "i")


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with iceberg(tmp_path / "i") as target, target._table.update_schema() as update:
        update.delete_column("engine")
    with pytest.raises(UsageError, match="other columns than an export of this version"):
        iceberg(tmp_path / "i")
    rows = pa.Table.from_batches([*version_rows(0)]).drop_columns(["engine"])
    made = CommitProperties(custom_metadata={SOURCE_KEY: source(0).to_json()})
    write_deltalake(str(tmp_path / "d"), rows, partition_by=["version"], commit_properties=made)
    with pytest.raises(UsageError, match="other columns than an export of this version"):
        delta(tmp_path / "d")


def test_two_exports_do_not_write_to_one_directory(tmp_path: Path, open_lake: Open) -> None:
    with open_lake(tmp_path), pytest.raises(InUseError, match="another export is writing"):
        open_lake(tmp_path)
    with open_lake(tmp_path):
        pass


def test_of_two_exports_elsewhere_one_adds_a_version(tmp_path: Path) -> None:
    # an address instead of a directory: nothing but the table's log stands between the two
    address = tmp_path.as_uri() + "/d"
    with DeltaTarget(address, run_started(), silent) as first:
        first.write(source(0), version_rows(0))
        with DeltaTarget(address, run_started(), silent) as second:
            second.write(source(1), version_rows(1))
            with pytest.raises(ExportError, match="another export added version 1"):
                first.write(source(1), version_rows(1))
    assert counted(tmp_path / "d") == {0: 4, 1: 4}


def test_a_table_of_another_catalog_survives_others_who_change_it(tmp_path: Path) -> None:
    address = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/c.db",
        "warehouse": f"file://{tmp_path}",
    }
    name = Path("lab.trajectories")

    def opened() -> IcebergTarget:
        return IcebergTarget(name, run_started(), silent, catalog="prod", properties=address)

    with opened() as first, opened() as second:
        assert first.place == "table lab.trajectories of the catalog prod"
        second.write(source(0), version_rows(0))
        with pytest.raises(ExportError, match="another export added version 0"):
            first.write(source(0), version_rows(0))
        second.write(source(1), version_rows(1))
        first.write(source(2), version_rows(2))  # its view of the table is older
    with opened() as third:
        assert set(third.exported("r")) == {0, 1, 2}
        assert third._table.scan().count() == 12
    with pytest.raises(UsageError, match="not the name of a table with its namespace"):
        IcebergTarget(Path("flat"), run_started(), silent, catalog="prod", properties=address)


def test_a_catalog_that_cannot_be_reached_is_told_without_its_secrets() -> None:
    wrong = {"type": "sql", "uri": "sqlite:////nonexistent/hunter2/c.db", "warehouse": "file:///x"}
    with pytest.raises(ExportError) as caught:
        IcebergTarget(Path("a.b"), run_started(), silent, catalog="prod", properties=wrong)
    assert "table a.b of the catalog prod" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ExportError) as caught:
        IcebergTarget(Path("a.b"), run_started(), silent, catalog="unknown-catalog")
    assert "--property key=value" in str(caught.value)


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


def test_a_damaged_table_is_told_in_a_line(tmp_path: Path) -> None:
    with delta(tmp_path / "d") as target:
        target.write(source(0), version_rows(0))
    (log,) = (tmp_path / "d" / "_delta_log").glob("*.json")
    log.write_text("{bad")
    with pytest.raises(ExportError, match="cannot open the Delta table") as caught:
        delta(tmp_path / "d")
    assert "\n" not in caught.value.message
    with iceberg(tmp_path / "i"):
        pass
    (tmp_path / "i" / "catalog.db").write_bytes(b"no database" * 100)
    with pytest.raises(ExportError, match="file is not a database"):
        iceberg(tmp_path / "i")


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
        assert set(target.exported("r")) == {0, 1}
    assert counted(tmp_path) == {1: 4}


def test_the_log_of_a_delta_table_is_kept(tmp_path: Path) -> None:
    with delta(tmp_path) as target:
        target.write(source(0), version_rows(0))
    table = DeltaTable(tmp_path)
    assert table.metadata().configuration == {"delta.enableExpiredLogCleanup": "false"}
    table.create_checkpoint()
    table.cleanup_metadata()
    table = DeltaTable(tmp_path)
    assert table.transaction_version("dora:id:0") == 1
    assert table.history()[-1][SOURCE_KEY] == source(0).to_json()


def test_a_version_whose_commit_is_not_in_the_history_any_more_is_not_added_twice(
    tmp_path: Path,
) -> None:
    with delta(tmp_path) as target:
        target.write(source(0), version_rows(0))
        rows = pa.Table.from_batches([*version_rows(1)])
        unsaid = CommitProperties(app_transactions=[Transaction("dora:id:1", 1)])
        write_deltalake(str(tmp_path), rows, mode="append", commit_properties=unsaid)
    with delta(tmp_path) as target:
        assert set(target.exported("r")) == {0}
        target.write(source(1), version_rows(1))
    assert counted(tmp_path) == {0: 4, 1: 4}


def test_snapshots_of_an_iceberg_table_say_where_they_came_from(tmp_path: Path) -> None:
    with iceberg(tmp_path) as target:
        for version in range(2):
            target.write(source(version), version_rows(version))
    table = iceberg_table(tmp_path)
    said = [snapshot.summary[SOURCE_KEY] for snapshot in table.snapshots()]
    assert said == [source(0).to_json(), source(1).to_json()]
    assert [str(field) for field in table.spec().fields] == ["1000: version: identity(2)"]
    (file, _) = table.inspect.files()["file_path"].to_pylist()
    assert "/warehouse/dora/r/data/version=" in file


def test_duckdb_and_polars_read_both(tmp_path: Path) -> None:
    for make, home in ((iceberg, tmp_path / "i"), (delta, tmp_path / "d")):
        with make(home) as target:
            for version in range(2):
                target.write(source(version), version_rows(version))
    trajectories = DeltaTable(tmp_path / "d").to_pyarrow_dataset()
    query = (
        "SELECT version, avg(reward) AS reward, avg(len(response_token_ids)) AS tokens "
        "FROM trajectories GROUP BY version ORDER BY version"
    )
    expected = [(0, 0.5, 3.0), (1, 0.5, 3.0)]
    assert duckdb.sql(query).fetchall() == expected
    connection = iceberg_table(tmp_path / "i").scan().to_duckdb("trajectories")
    assert connection.sql(query).fetchall() == expected
    for lazy in (
        pl.scan_delta(str(tmp_path / "d")),
        pl.scan_iceberg(iceberg_table(tmp_path / "i")),
    ):
        found = (
            lazy.group_by("version")
            .agg(pl.col("reward").mean(), pl.col("response_token_ids").list.len().mean())
            .sort("version")
            .collect()
        )
        assert [tuple(row) for row in found.rows()] == expected
    assert trajectories.schema.field("version").type == pa.int32()


@pytest.mark.parametrize(
    ("package", "module"),
    [("deltalake", "dora.consumers.export_delta"), ("pyiceberg", "dora.consumers.export_iceberg")],
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
from tests.run_records import run_started
from {module} import {name}
with {name}(Path({home!r}), run_started(), print) as target:
    for version in range(3):
        if version not in target.exported("r"):
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
        assert set(target.exported("r")) == {0}
        for version in (1, 2):
            target.write(source(version), version_rows(version))
    assert counted(tmp_path) == {0: 4, 1: 4, 2: 4}
    referenced = 3
    assert len(list(tmp_path.rglob("version=*/*.parquet"))) == referenced
