"""The Delta table that a run is exported to.

Invariant: a commit of the table's log adds one version, partitioned by it, with its `Source` in the
commit info and a transaction identifier of that version (Delta protocol, "Transaction
Identifiers"): of two exports that add the same version at the same time, one fails. The log keeps
its commits for good, so that it always tells what was exported.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dora import faults
from dora.consumers.export.lake import EXTRA, Guarded, LakeTarget
from dora.consumers.export.rows import SOURCE_KEY, TOKEN_COLUMNS, Source
from dora.consumers.export.targets import Say
from dora.errors import ExportError, UsageError, first_line
from dora.log.table_schema import SCHEMA, exported_version
from dora.schemas.records import RunStarted

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
except ImportError as error:
    raise UsageError(f"--to delta needs a package that is missing: {error}", hint=EXTRA) from error

_PLAIN = deltalake.ColumnProperties(dictionary_enabled=False)
"""Of long lists of numbers: see `export_targets.PARQUET_OPTIONS`."""
_SETTINGS: dict[str, str | None] = {"delta.enableExpiredLogCleanup": "false"}


class DeltaTarget(LakeTarget):
    """A table in the directory `place`, or at an address such as `s3://bucket/path`, which
    `storage` tells how to reach. Raises as `LakeTarget` does."""

    marker = "_delta_log"

    def __init__(
        self,
        place: Path | str,
        run: RunStarted,
        say: Say,
        *,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        directory = place if isinstance(place, Path) else None
        super().__init__(str(place), directory, run, say, storage or {})

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """See `Target.write`."""
        version = source.version
        application = f"dora:{source.run_id}:{version}"
        before = None
        if self._table is not None:
            before = self._table.transaction_version(application)
        there = before is not None or version in self.exported
        guarded = Guarded(batches)
        commit = deltalake.CommitProperties(
            custom_metadata={SOURCE_KEY: source.to_json()},
            app_transactions=[deltalake.Transaction(application, (before or 0) + 1)],
        )
        try:
            if self.directory is not None and not there:
                self.sweep(self.directory / f"version={version}")
            rows = pa.RecordBatchReader.from_batches(SCHEMA, _all(guarded))
            self._commit(rows, commit, f"version = {version}" if there else None)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            if guarded.error is not None:
                raise guarded.error from None
            if isinstance(error, CommitFailedError):
                raise ExportError(
                    f"another export added version {version} to {self.place} meanwhile",
                    hint="Run the same command again: it goes on after that version.",
                ) from error
            raise self.failed(version, first_line(error)) from error
        self.exported[version] = source
        return self._size(version)

    def belongs(self, entry: Path) -> bool:
        """Without a log what the first commit was to add."""
        return exported_version(entry) is not None

    def look(self) -> dict[int, Source]:
        """The versions that commits added; UsageError if the table is another's."""
        self._table = self._open()
        if self._table is None:
            return {}
        found: dict[int, Source] = {}
        for commit in self._table.history():  # the newest first
            text = commit.get(SOURCE_KEY)
            if text is None:
                continue  # another's: compaction, vacuum
            try:
                source = Source.from_json(text)
            except ValueError as error:
                raise self.foreign("a Delta table of somebody else", error) from error
            self.check_run(source.run, source.run_id)
            found.setdefault(source.version, source)
        if not found:
            raise self.foreign("a Delta table that no export of dora made")
        if json.loads(self._table.schema().to_json()) != json.loads(_schema().to_json()):
            raise self.other_columns(f"it was made by dora {found[max(found)].dora_version}")
        return found

    def _open(self) -> Any:
        """The table; None if there is none yet."""
        try:
            return deltalake.DeltaTable(self.place, storage_options=self._storage or None)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError, ValueError) as error:
            raise ExportError(
                f"cannot open the Delta table {self.place}: {self.hide(first_line(error))}"
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


def _all(batches: Guarded) -> Iterator[pa.RecordBatch]:
    yield from batches
    faults.point("export.version_written")  # no commit yet


def _schema() -> Any:
    return deltalake.Schema.from_arrow(SCHEMA)
