"""Iceberg and Delta tables in directories, as targets of an export and as people read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from dora.consumers.export.delta import DeltaTarget
from dora.consumers.export.iceberg import IcebergTarget
from tests.factories import run_started

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
