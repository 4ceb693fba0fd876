"""Directories with a file for each version: Parquet and JSON lines.

The file appears below `version=N/` by a rename, after it was flushed to the disk. What a crash
leaves behind is named `.unfinished-...` and removed by the next export.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dora import faults
from dora.consumers.export.rows import PARQUET_OPTIONS, SOURCE_KEY, TOKEN_COLUMNS, Source
from dora.consumers.export.targets import Report, Target, disk_error
from dora.log.table_schema import SCHEMA, VERSION_PREFIX, exported_version
from dora.schemas.records import RunStarted
from dora.weights.store import flush_entry

UNFINISHED = ".unfinished-"
_PLAIN = [name for name in SCHEMA.names if name not in TOKEN_COLUMNS]


class DirectoryTarget(Target):
    """A directory with one file per version."""

    file_name: str
    """Of a version's file."""
    sidecar: str | None = None
    """Of the file beside it that holds its `Source`, where the format has no room for it."""
    directory: Path

    def __init__(self, directory: Path, run: RunStarted, report: Report) -> None:
        super().__init__(str(directory), directory, run, report)

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """Write a draft, flush it and rename it, as `Target.write`."""
        draft = self.directory / f"{UNFINISHED}{VERSION_PREFIX}{source.version}"
        home = self.directory / f"{VERSION_PREFIX}{source.version}"
        try:
            self.write_file(draft, source, batches)
            size = draft.stat().st_size
            flush_entry(draft)
            faults.point("export.version_written")
            home.mkdir(exist_ok=True)
            draft.replace(home / self.file_name)
            flush_entry(home)
            faults.point("export.version_placed")
            if self.sidecar is not None:
                draft.write_text(source.to_json() + "\n", encoding="utf-8")
                flush_entry(draft)
                draft.replace(home / self.sidecar)
                flush_entry(home)
            flush_entry(self.directory)
        except OSError as error:
            raise disk_error(
                f"cannot export version {source.version} to {self.directory}",
                error,
                self.resume_hint,
            ) from error
        finally:
            draft.unlink(missing_ok=True)
        self.exported[source.version] = source
        return size

    @abstractmethod
    def write_file(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """Write the version's file at `draft`, with `source` in it."""

    @abstractmethod
    def source_of(self, file: Path) -> Source:
        """What a file of this target says it came from; ValueError if it is none."""

    def may_be_own(self, entry: Path) -> bool:
        """The directory of a version, or a draft."""
        return exported_version(entry) is not None or (
            entry.name.startswith(UNFINISHED) and entry.is_file()
        )

    def read_exported(self) -> dict[int, Source]:
        """The versions that the files name in their metadata; drafts are removed."""
        self.check_contents(self.directory)
        found: dict[int, Source] = {}
        drafts: list[Path] = []
        for entry in sorted(self.directory.iterdir()):
            version = exported_version(entry)
            if version is not None:
                source = self._source(entry, version)
                found |= {} if source is None else {version: source}
            elif entry.name.startswith(UNFINISHED):
                drafts.append(entry)
        for draft in drafts:
            draft.unlink()
            what = draft.name.removeprefix(UNFINISHED)
            self._report(f"removed the half-written {what} that an interrupted export left")
        return found

    def _source(self, home: Path, version: int) -> Source | None:
        """Where the version in the directory `home` came from; None if it is not whole."""
        wanted = {self.file_name} | ({self.sidecar} if self.sidecar else set())
        names = {file.name for file in home.iterdir()}
        for name in sorted(names - wanted):
            raise self.foreign_error(home / name)
        if names < wanted:
            return None
        file = home / self.file_name
        try:
            source = self.source_of(file)
        except (ValueError, OSError) as error:
            raise self.foreign_error(file, error) from error
        self.check_same_run(source.run, source.run_id, f" ({file})")
        if source.version != version:
            raise self.foreign_error(file, f"it is of version {source.version}")
        return source


class ParquetTarget(DirectoryTarget):
    """Hive-style Parquet: `version=N/trajectories.parquet`, zstd, `Source` in the file metadata.

    The column `version` is the directory's name and not in the files, as Hive and Spark want it.
    """

    file_name = "trajectories.parquet"

    def write_file(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """A row group per batch."""
        position = SCHEMA.get_field_index("version")
        schema = SCHEMA.remove(position).with_metadata({SOURCE_KEY: source.to_json()})
        with pq.ParquetWriter(draft, schema, **PARQUET_OPTIONS) as writer:
            for batch in batches:
                columns = [array for i, array in enumerate(batch.columns) if i != position]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

    def source_of(self, file: Path) -> Source:
        """From the footer; ValueError if there is none, or the file is no Parquet."""
        metadata = pq.read_metadata(file).metadata or {}
        text = metadata.get(SOURCE_KEY.encode())
        if text is None:
            raise ValueError("its metadata names no run of dora")
        return Source.from_json(text)


class JsonlTarget(DirectoryTarget):
    """`version=N/trajectories.jsonl`, UTF-8: one object a line, named like the columns of `SCHEMA`.
    Times are ISO 8601 in UTC.

    JSON lines have no metadata: a version's `Source` lies in a file beside it, which appears after
    it. A version without that file counts as not exported, and is replaced by the same lines.
    """

    file_name = "trajectories.jsonl"
    sidecar = "_source.json"

    def write_file(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """A line per row."""
        with draft.open("w", encoding="utf-8") as file:
            for batch in batches:
                file.writelines(lines(batch))

    def source_of(self, file: Path) -> Source:
        """From the file beside it."""
        return Source.from_json(file.with_name(self.sidecar).read_bytes())


def lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Each row of a batch of `SCHEMA` as a line of JSON."""
    plain = batch.select(_PLAIN).to_pylist()
    packed = [_joined(batch.column(name)) for name in TOKEN_COLUMNS]
    for row, *lists in zip(plain, *packed, strict=True):
        row["reward_parts"] = dict(row["reward_parts"])
        head = _object(row)
        tail = ", ".join(
            f'"{name}": [{text}]' for name, text in zip(TOKEN_COLUMNS, lists, strict=True)
        )
        yield f"{head[:-1]}, {tail}}}\n"


def _object(row: dict[str, Any]) -> str:
    """A row as JSON, which has neither infinity nor NaN: they become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_time)
    except ValueError:
        return _object(json.loads(json.dumps(row, default=_time), parse_constant=lambda name: None))


def _joined(column: pa.ListArray) -> list[str]:
    """The values of each list, with commas between. Arrow writes a float32 with the fewest digits
    that give it back."""
    texts = pa.ListArray.from_arrays(column.offsets, column.values.cast(pa.string()))
    joined: list[str] = pc.binary_join(texts, ",").to_pylist()
    return joined


def _time(value: Any) -> str:
    """ISO 8601; only times are values that `json` does not know."""
    text: str = value.isoformat()
    return text
