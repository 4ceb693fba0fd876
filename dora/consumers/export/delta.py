"""The Delta table that a run is exported to.

A commit of the table's log adds one version, partitioned by it, with its `Source` in the commit
info and a transaction identifier of that version (Delta protocol, "Transaction Identifiers"): of
two exports that add the same version at the same time, one fails. The log keeps its commits for
good, so that it always says what was exported.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dora import faults
from dora.consumers.export.rows import SOURCE_KEY, TOKEN_COLUMNS, Source
from dora.consumers.export.targets import EXTRA, Report, TableTarget, WatchedBatches
from dora.errors import ExportError, UsageError, first_line
from dora.log.table_schema import SCHEMA, exported_version
from dora.schemas.records import RunStarted

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
except ImportError as error:
    raise UsageError(f"--to delta needs a package that is missing: {error}", hint=EXTRA) from error

_PLAIN = deltalake.ColumnProperties(dictionary_enabled=False)
"""Of long lists of numbers: as in `rows.PARQUET_OPTIONS`."""
_SETTINGS: dict[str, str | None] = {"delta.enableExpiredLogCleanup": "false"}


class DeltaTarget(TableTarget):
    """A table in the directory `place`, or at an address such as `s3://bucket/path`, reached with
    the properties `storage`. Raises as `TableTarget` does."""

    marker = "_delta_log"

    def __init__(
        self,
        place: Path | str,
        run: RunStarted,
        report: Report,
        *,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        directory = place if isinstance(place, Path) else None
        super().__init__(str(place), directory, run, report, storage or {})

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """Add or replace the version in one commit, as `Target.write`."""
        version = source.version
        application = f"dora:{source.run_id}:{version}"
        before = None
        if self._table is not None:
            before = self._table.transaction_version(application)
        there = before is not None or version in self.exported
        watched = WatchedBatches(batches)
        commit = deltalake.CommitProperties(
            custom_metadata={SOURCE_KEY: source.to_json()},
            app_transactions=[deltalake.Transaction(application, (before or 0) + 1)],
        )
        try:
            if self.directory is not None and not there:
                self.remove_unfinished(self.directory / f"version={version}")
            rows = pa.RecordBatchReader.from_batches(SCHEMA, _all(watched))
            self._commit(rows, commit, f"version = {version}" if there else None)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            if watched.error is not None:
                raise watched.error from None
            if isinstance(error, CommitFailedError):
                raise ExportError(
                    f"another export added version {version} to {self.place} meanwhile",
                    hint="Run the same command again: it goes on after that version.",
                ) from error
            raise self.write_error(version, first_line(error)) from error
        self.exported[version] = source
        return self._size(version)

    def may_be_own(self, entry: Path) -> bool:
        """Without a log what the first commit was to add."""
        return exported_version(entry) is not None

    def read_exported(self) -> dict[int, Source]:
        """The versions that commits added; UsageError if the table is another's."""
        self._table = self._open()
        if self._table is None:
            return {}
        found: dict[int, Source] = {}
        for commit in self._table.history():  # the newest first
            text = commit.get(SOURCE_KEY)
            if text is None:
                continue  # not an export's: compaction, vacuum
            try:
                source = Source.from_json(text)
            except ValueError as error:
                raise self.foreign_error(
                    "a Delta table that is no export of dora", error
                ) from error
            self.check_same_run(source.run, source.run_id)
            found.setdefault(source.version, source)
        if not found:
            raise self.foreign_error("a Delta table that no export of dora made")
        if json.loads(self._table.schema().to_json()) != json.loads(_schema().to_json()):
            raise self.columns_error(f"it was made by dora {found[max(found)].dora_version}")
        return found

    def _open(self) -> Any:
        """The table; None if there is none yet."""
        try:
            return deltalake.DeltaTable(self.place, storage_options=self._storage or None)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError, ValueError) as error:
            raise ExportError(
                f"cannot open the Delta table {self.place}: {self.redact(first_line(error))}"
            ) from error

    def _commit(
        self,
        rows: pa.RecordBatchReader,
        commit: Any,
        replaces: str | None,
    ) -> None:
        lists = {f"{name}.list.element": _PLAIN for name in TOKEN_COLUMNS}
        writer = deltalake.WriterProperties(compression="ZSTD", column_properties=lists)
        shared: dict[str, Any] = {
            "partition_by": ["version"],
            "commit_properties": commit,
            "writer_properties": writer,
        }
        if self._table is None:
            started = self._started
            deltalake.write_deltalake(
                self.place,
                rows,
                mode="error",
                name="trajectories",
                description=f"Trajectories of run {started.run} ({started.run_id})",
                configuration=_SETTINGS,
                storage_options=self._storage or None,
                **shared,
            )
            self._table = self._open()
        elif replaces is not None:
            deltalake.write_deltalake(
                self._table, rows, mode="overwrite", predicate=replaces, **shared
            )
        else:
            deltalake.write_deltalake(self._table, rows, mode="append", **shared)

    def _size(self, version: int) -> int:
        """Bytes of the files of `version`."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        sizes = zip(
            actions["partition.version"].to_pylist(),
            actions["size_bytes"].to_pylist(),
            strict=True,
        )
        return sum(size for number, size in sizes if number == version)


def _all(batches: WatchedBatches) -> Iterator[pa.RecordBatch]:
    yield from batches
    faults.point("export.version_written")  # no commit yet


def _schema() -> Any:
    return deltalake.Schema.from_arrow(SCHEMA)
