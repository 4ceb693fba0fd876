"""The Iceberg table that a run is exported to.

A change of the catalog's pointer adds one version: its data file, its `Source` among the snapshot's
properties, and the same under a property of the table, which stays when snapshots expire. Data
files are written beforehand and belong to no snapshot until then; one whose commit is known to have
failed is removed.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dora import faults
from dora.consumers.export.rows import PARQUET_OPTIONS, SOURCE_KEY, Source
from dora.consumers.export.targets import EXTRA, Report, TableTarget, WatchedBatches, disk_error
from dora.errors import ExportError, UsageError, first_line
from dora.log.table_schema import SCHEMA
from dora.schemas.records import RunStarted
from dora.weights.store import flush_entry

try:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import (
        CommitFailedException,
        CommitStateUnknownException,
        NamespaceAlreadyExistsError,
        NoSuchTableError,
        NotInstalledError,
        RESTError,
        TableAlreadyExistsError,
        ValidationError,
    )
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from sqlalchemy import URL
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as error:
    raise UsageError(
        f"--to iceberg needs a package that is missing: {error}", hint=EXTRA
    ) from error

NAMESPACE = "dora"
CATALOG_FILE = "catalog.db"
WAREHOUSE = "warehouse"
COMMITS = 5
"""How often a commit is tried when others change the table."""
_RUN, _RUN_ID, _DORA = "dora.run", "dora.run-id", "dora.version"
_PREFIX = f"{SOURCE_KEY}."
_REFUSED = (
    NoSuchTableError,
    NotInstalledError,
    OSError,
    RESTError,
    SQLAlchemyError,
    ValidationError,
    ValueError,
    pa.ArrowException,
)
"""What catalogs and storage raise; pyiceberg's exceptions have no base of their own."""


class IcebergTarget(TableTarget):
    """The table `dora.<run>` of a catalog in SQLite in the directory `place`, its data below.

    With `catalog` (a name of pyiceberg's configuration, or any name with its properties as
    `storage`) `place` is the table's name there, with its namespace. Raises as `TableTarget` does.
    """

    marker = CATALOG_FILE

    def __init__(
        self,
        place: Path,
        run: RunStarted,
        report: Report,
        *,
        catalog: str | None = None,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        if catalog is None and set("#?") & set(str(place.resolve())):
            raise UsageError(f"{place.resolve()}: Iceberg has no paths with # or ? in them")
        self._catalog_name = catalog
        if catalog is None:
            self._identifier: tuple[str, ...] = (NAMESPACE, run.run)
            name = str(place)
        else:
            self._identifier = _identifier(str(place))
            name = f"table {place} of the catalog {catalog}"
        super().__init__(name, place if catalog is None else None, run, report, storage or {})

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """Add or replace the version in one commit, as `Target.write`."""
        version = source.version
        folder = f"{self._table.location().rstrip('/')}/data/version={version}"
        path = f"{folder}/{uuid.uuid4()}.parquet"
        watched = WatchedBatches(batches)
        try:
            if self.directory is not None and version not in self.exported:
                self.remove_unfinished(_local(folder))
            rows, size = self._stage(path, source, iter(watched))
            faults.point("export.version_written")
            self._commit(source, path if rows else None)
        except _REFUSED as error:
            if watched.error is not None:
                raise watched.error from None
            raise self.write_error(version, first_line(error)) from error
        if not rows:
            self._discard(path)
        self.exported[version] = source
        return size if rows else 0

    def may_be_own(self, entry: Path) -> bool:
        """Nothing, without a catalog."""
        return False

    def read_exported(self) -> dict[int, Source]:
        """The versions that commits added; UsageError if the table is another's."""
        catalog = self._open_catalog()
        try:
            try:
                self._table = catalog.load_table(self._identifier)
            except NoSuchTableError:
                self._table = self._create(catalog)
        except _REFUSED as error:
            why = f"{type(error).__name__}: {self.redact(first_line(error))}"
            raise ExportError(f"cannot open {self.place}: {why}") from None
        properties = self._table.properties
        if _RUN not in properties:
            raise self.foreign_error("an Iceberg table that no export of dora made")
        self.check_same_run(properties[_RUN], properties.get(_RUN_ID, ""))
        if not _same_columns(self._table.schema()):
            raise self.columns_error(f"it was made by dora {properties.get(_DORA)}")
        try:
            sources = [
                Source.from_json(properties[key]) for key in properties if key.startswith(_PREFIX)
            ]
        except ValueError as error:
            raise self.foreign_error("an Iceberg table that is no export of dora", error) from error
        return {source.version: source for source in sources}

    def _open_catalog(self) -> Any:
        name, properties = self._catalog_name, self._storage
        if self.directory is not None:
            home = self.directory.resolve()
            address = URL.create("sqlite", database=str(home / CATALOG_FILE))
            properties = {
                "type": "sql",
                "uri": address.render_as_string(),
                "warehouse": f"file://{home / WAREHOUSE}",
                **properties,
            }
        try:
            return load_catalog(name or NAMESPACE, **properties)
        except _REFUSED as error:
            raise ExportError(
                f"cannot open the Iceberg catalog for {self.place}: {type(error).__name__}: "
                f"{self.redact(first_line(error))}",
                hint=None
                if name is None
                else "Give its properties with --property key=value, or in pyiceberg's own "
                "configuration (~/.pyiceberg.yaml, PYICEBERG_CATALOG__<NAME>__<KEY>).",
            ) from None

    def _create(self, catalog: Any) -> Any:
        started = self._started
        properties = {
            _RUN: started.run,
            _RUN_ID: started.run_id,
            _DORA: started.dora_version,
            "commit.retry.num-retries": "0",  # a retry must look at what the others committed
            "write.metadata.delete-after-commit.enabled": "true",
        }
        with suppress(NamespaceAlreadyExistsError):
            catalog.create_namespace(self._identifier[:-1])
        transaction = catalog.create_table_transaction(
            self._identifier, schema=SCHEMA, properties=properties
        )
        with transaction.update_spec() as spec:
            spec.add_identity("version")
        # another export may be faster
        with suppress(CommitFailedException, TableAlreadyExistsError):
            transaction.commit_transaction()
        return catalog.load_table(self._identifier)

    def _stage(
        self, path: str, source: Source, batches: Iterator[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Write the data file; returns its rows and its bytes."""
        if self.directory is not None:
            _local(path).parent.mkdir(parents=True, exist_ok=True)
        output = self._table.io.new_output(path)
        rows = 0
        # Without field ids, which pyiceberg wants of files that are added: the table's name mapping
        # says which column is which.
        schema = SCHEMA.with_metadata({SOURCE_KEY: source.to_json()})
        try:
            with (
                output.create() as stream,
                pq.ParquetWriter(stream, schema, **PARQUET_OPTIONS) as writer,
            ):
                for batch in batches:
                    rows += batch.num_rows
                    writer.write_batch(batch)
            if self.directory is not None:
                flush_entry(_local(path))
        except BaseException:
            self._discard(path)
            raise
        return rows, len(output)

    def _commit(self, source: Source, path: str | None) -> None:
        """Add the file at `path` (None: no rows) in one commit, in place of what is there."""
        key, text = f"{_PREFIX}{source.version}", source.to_json()
        known = self._table.properties.get(key)
        for _ in range(COMMITS):
            transaction = self._table.transaction()
            if known is not None:
                transaction.delete(f"version == {source.version}")
            properties = {SOURCE_KEY: text}
            if path is None:
                transaction.append(SCHEMA.empty_table(), snapshot_properties=properties)
            else:
                transaction.add_files(
                    [path], snapshot_properties=properties, check_duplicate_files=False
                )
            transaction.set_properties({key: text})
            try:
                transaction.commit_transaction()
                return
            except CommitFailedException:
                self._table.refresh()
            except CommitStateUnknownException:
                self._table.refresh()
                if self._table.properties.get(key) == text and self._holds(path):
                    return
                raise
            if self._table.properties.get(key) != known:
                self._discard(path)
                raise ExportError(
                    f"another export added version {source.version} to {self.place} meanwhile",
                    hint="Run the same command again: it goes on after that version.",
                )
        self._discard(path)
        raise ExportError(
            f"{self.place} was changed by others in each of {COMMITS} attempts to add version "
            f"{source.version}",
            hint="Run the same command again: it goes on with this version.",
        )

    def _holds(self, path: str | None) -> bool:
        """Whether the current snapshot has the file."""
        files = self._table.inspect.files()["file_path"].to_pylist()
        return path is None or path in files

    def _discard(self, path: str | None) -> None:
        """Remove a data file that is in no snapshot."""
        if path is not None:
            try:
                self._table.io.delete(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._report(f"{disk_error(f'could not remove {path}', error).message}")


def _identifier(text: str) -> tuple[str, ...]:
    parts = tuple(text.split("."))
    if len(parts) < 2 or not all(parts):
        raise UsageError(
            f"{text!r} is not the name of a table with its namespace",
            hint="With --catalog, name the table in place of a directory: namespace.table.",
        )
    return parts


def _local(location: str) -> Path:
    """The path of a `file://` location as this module makes them, without any escapes."""
    return Path(location.removeprefix("file://"))


def _same_columns(schema: Any) -> bool:
    try:
        mine = pyarrow_to_schema(SCHEMA, name_mapping=schema.name_mapping)
    except ValueError:
        return False
    return bool(mine.as_struct() == schema.as_struct())
