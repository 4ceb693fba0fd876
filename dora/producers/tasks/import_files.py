"""Rows of JSON lines and Parquet files, with the place where each stands.

The same files give the same rows in the same order: files in the order in which they are named,
those of a directory by name, with numbers compared as numbers. One row, or one batch of a Parquet
file, is in memory at a time.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dora.errors import UsageError, first_line
from dora.json_lines import parse_json_object
from dora.log.table_schema import exported_version

LINE_BYTES = 64 * 2**20
"""A longer line of JSON is refused."""
ROWS = 1024
_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_HIDDEN = (".", "_")


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row, and its place for messages: `file, line 3` or `file, row 3`, counted from 1."""

    place: str
    fields: dict[str, Any]


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files, and those below the directories; hidden ones and those that begin with `_` are
    left out.

    UsageError if one does not exist or is of another kind, or if a directory has none.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = [
                file
                for file in path.rglob("*")
                if file.is_file()
                and file.suffix in _SUFFIXES
                and not any(part.startswith(_HIDDEN) for part in file.relative_to(path).parts)
            ]
            if not found:
                raise UsageError(f"{path} holds no {', '.join(_SUFFIXES)} file")
            files += sorted(found, key=lambda file: _natural(str(file.relative_to(path))))
        elif not path.exists():
            raise UsageError(f"{path}: no such file or directory")
        elif path.suffix not in _SUFFIXES:
            raise UsageError(
                f"{path}: not a {', '.join(_SUFFIXES)} file",
                hint="JSON is read as one object a line.",
            )
        else:
            files.append(path)
    return files


def columns_of(file: Path) -> list[str] | None:
    """The names of a file's columns; of JSON lines those of the first, and None if there is no
    line. Raises as `rows_of`."""
    if file.suffix == ".parquet":
        return [*_parquet(file).schema_arrow.names, *_partition(file)]
    first = next(rows_of(file), None)
    return None if first is None else list(first.fields)


def rows_of(file: Path, columns: Sequence[str] | None = None) -> Iterator[FileRow]:
    """The rows of a file; of Parquet only `columns`, those of them that it has.

    A column `version` comes from a directory `version=N` where the file has none. UsageError, with
    the place, if the file cannot be read.
    """
    partition = _partition(file)
    rows = _parquet_rows(file, columns) if file.suffix == ".parquet" else _json_rows(file)
    for row in rows:
        yield FileRow(row.place, {**partition, **row.fields}) if partition else row


def _partition(file: Path) -> dict[str, Any]:
    version = exported_version(file.parent)
    return {} if version is None else {"version": version}


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(
            f"{file}: not a Parquet file that can be read: {first_line(error)}"
        ) from error


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[FileRow]:
    with _parquet(file) as opened:
        wanted = None
        if columns is not None:
            wanted = [name for name in opened.schema_arrow.names if name in columns]
        number = 0
        try:
            for batch in opened.iter_batches(ROWS, columns=wanted):
                for fields in batch.to_pylist():
                    number += 1
                    yield FileRow(f"{file}, row {number}", fields)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{file}: damaged after row {number}: {first_line(error)}") from error


def _json_rows(file: Path) -> Iterator[FileRow]:
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be opened: {error.strerror}") from error
    with stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if line.strip():
                place = f"{file}, line {number}"
                yield FileRow(place, _object(place, line))


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        if len(line) > LINE_BYTES:
            raise ValueError(f"longer than {LINE_BYTES // 2**20} MiB")
        return parse_json_object(line)
    except ValueError as error:
        raise UsageError(f"{place}: {error}", hint="JSON is read as one object a line.") from error


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", text)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
