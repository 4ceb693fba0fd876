"""What Iceberg and Delta tables of exports hold, and whose they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from dora.consumers.export.delta import DeltaTarget
from dora.consumers.export.iceberg import IcebergTarget
from dora.consumers.export.rows import SOURCE_KEY
from dora.errors import ExportError, UsageError
from tests.exported_rows import source, version_rows
from tests.factories import run_started
from tests.lakes import counted, delta, iceberg, iceberg_table, silent


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
        return IcebergTarget(name, run_started(), silent, catalog="prod", storage=address)

    with opened() as first, opened() as second:
        assert first.place == "table lab.trajectories of the catalog prod"
        second.write(source(0), version_rows(0))
        with pytest.raises(ExportError, match="another export added version 0"):
            first.write(source(0), version_rows(0))
        second.write(source(1), version_rows(1))
        first.write(source(2), version_rows(2))  # its view of the table is older
    with opened() as third:
        assert set(third.exported) == {0, 1, 2}
        assert third._table.scan().count() == 12
    with pytest.raises(UsageError, match="not the name of a table with its namespace"):
        IcebergTarget(Path("flat"), run_started(), silent, catalog="prod", storage=address)


def test_a_catalog_that_cannot_be_reached_is_told_without_its_secrets() -> None:
    wrong = {"type": "sql", "uri": "sqlite:////nonexistent/hunter2/c.db", "warehouse": "file:///x"}
    with pytest.raises(ExportError) as caught:
        IcebergTarget(Path("a.b"), run_started(), silent, catalog="prod", storage=wrong)
    assert "table a.b of the catalog prod" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ExportError) as caught:
        IcebergTarget(Path("a.b"), run_started(), silent, catalog="unknown-catalog")
    assert "--property key=value" in str(caught.value)


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
        assert set(target.exported) == {0}
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
