"""Where exported versions go, and the directory of Parquet files.

Invariant: a version is in a target whole, together with the offsets that it came from, or not at
all. In a directory a version is one file below `version=N/`, which appears by a rename after it was
flushed to the disk; what a crash leaves behind is named `.unfinished-...` and removed by the next
export. A directory that is not this run's export is refused before anything is written.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from dora import faults
from dora.consumers.export_rows import SCHEMA, SOURCE_KEY, Source
from dora.errors import ExportError, InUseError, UsageError
from dora.schemas.records import RunStarted

UNFINISHED = ".unfinished-"
LOCK = ".dora-export.lock"
_VERSION = "version="

_LISTS = ("prompt_token_ids", "response_token_ids", "response_logprobs", "response_mask")
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    # Dictionaries of token ids and of numbers that never repeat take four times as long to write
    # and are no smaller. Splitting bytes puts the few bits that floats share beside each other.
    "use_dictionary": [name for name in SCHEMA.names if name not in _LISTS],
    "column_encoding": {"response_logprobs.list.element": "BYTE_STREAM_SPLIT"},
}

Say = Callable[[str], None]
"""Takes a sentence for the person who exports."""


class Target(Protocol):
    """Where versions go. Closed by `with`; not for use from several threads."""

    @property
    def place(self) -> str:
        """Where it is, for people."""

    def exported(self, run: str) -> Mapping[int, Source]:
        """The versions of `run` that are in there, by the target's own metadata."""

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """Add the version, or replace it if it is there: all or nothing. Returns bytes written.

        ExportError if the target refuses; whatever `batches` raises goes through, and the version
        is then not in the target.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class DirectoryTarget(ABC):
    """A directory with one file per version. `directory` is made if it does not exist.

    UsageError if it holds files of others or the export of another run or format, InUseError if
    another export is writing there, ExportError if the disk refuses.
    """

    file_name: str
    """Of a version's file."""
    sidecar: str | None = None
    """Of the file beside it that holds its `Source`, where the format has no room for it."""

    def __init__(self, directory: Path, run: RunStarted, say: Say) -> None:
        self.directory = directory
        self._started = run
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory} is a file; name a directory for the export")
        if directory.is_dir():
            self._check_contents()  # before even the lock is put there
        self._lock = filelock.FileLock(directory / LOCK)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise InUseError(
                f"another export is writing to {directory}",
                hint="Wait until it has ended, or name another directory.",
            ) from error
        except OSError as error:
            raise refusal(f"cannot write to {directory}", error) from error
        try:
            self._versions = self._look()
            self._clean(say)
        except BaseException:
            self._lock.release()
            raise

    @property
    def place(self) -> str:
        """The directory."""
        return str(self.directory)

    def exported(self, run: str) -> Mapping[int, Source]:
        """What the files say of themselves."""
        return {v: source for v, source in self._versions.items() if source.run == run}

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """See `Target.write`."""
        draft = self.directory / f"{UNFINISHED}{_VERSION}{source.version}"
        home = self.directory / f"{_VERSION}{source.version}"
        try:
            self.fill(draft, source, batches)
            size = draft.stat().st_size
            flush(draft)
            faults.point("export.version_written")
            home.mkdir(exist_ok=True)
            draft.replace(home / self.file_name)
            flush(home)
            faults.point("export.version_placed")
            if self.sidecar is not None:
                draft.write_text(source.to_json() + "\n", encoding="utf-8")
                flush(draft)
                draft.replace(home / self.sidecar)
                flush(home)
            flush(self.directory)
        except OSError as error:
            there = f"The versions that were exported before are whole ({len(self._versions)} of "
            there += "them): run the same command again and it goes on with this one."
            raise refusal(
                f"cannot export version {source.version} to {self.directory}", error, there
            ) from error
        finally:
            draft.unlink(missing_ok=True)
        self._versions[source.version] = source
        return size

    @abstractmethod
    def fill(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """Write the version's file at `draft`, with `source` in it."""

    @abstractmethod
    def source_of(self, file: Path) -> Source:
        """What a file of this target says it came from; ValueError if it is none."""

    def close(self) -> None:
        """Let others export to the directory."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_contents(self) -> None:
        """UsageError if something is there that no export of this format put there."""
        for entry in sorted(self.directory.iterdir()):
            ours = entry.name == LOCK or entry.name.startswith(UNFINISHED)
            if not ours and version_of(entry) is None:
                raise self._foreign(entry)

    def _look(self) -> dict[int, Source]:
        """The versions that are there; UsageError if they are another run's."""
        self._check_contents()
        found: dict[int, Source] = {}
        for entry in sorted(self.directory.iterdir()):
            version = version_of(entry)
            if version is None:
                continue
            names = {file.name for file in entry.iterdir()}
            for name in sorted(names - {self.file_name, self.sidecar}):
                raise self._foreign(entry / name)
            if names >= {self.file_name} | ({self.sidecar} if self.sidecar else set()):
                file = entry / self.file_name
                try:
                    source = self.source_of(file)
                except (ValueError, OSError) as error:
                    raise self._foreign(file, str(error)) from error
                self._check_source(file, source, version)
                found[version] = source
        return found

    def _check_source(self, file: Path, source: Source, version: int) -> None:
        run = self._started
        if source.run != run.run or source.run_id != run.run_id:
            who = f"run {source.run}"
            if source.run == run.run:
                who = f"an earlier run of the name {run.run}"
            raise UsageError(
                f"{self.directory} holds the export of {who} ({file})",
                hint=f"Name another directory for run {run.run}.",
            )
        if source.version != version:
            raise self._foreign(file, f"it is of version {source.version}")

    def _foreign(self, entry: Path, why: str | None = None) -> UsageError:
        return UsageError(
            f"{self.directory} holds something that this export did not put there: {entry}"
            + (f" ({why})" if why else ""),
            hint="Name a directory that is new or empty, or the one of an earlier export of the "
            "same run to the same format.",
        )

    def _clean(self, say: Say) -> None:
        for entry in sorted(self.directory.iterdir()):
            if entry.name.startswith(UNFINISHED):
                entry.unlink()
                what = entry.name.removeprefix(UNFINISHED)
                say(f"removed the half-written {what} that an interrupted export left")


class ParquetTarget(DirectoryTarget):
    """Hive-style Parquet: `version=N/trajectories.parquet`, zstd, `Source` in the file metadata.

    The column `version` is the directory's name and not in the files, as Hive and Spark want it.
    """

    file_name = "trajectories.parquet"

    def fill(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
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


def version_of(entry: Path) -> int | None:
    """The version whose directory `entry` is, or None."""
    text = entry.name.removeprefix(_VERSION)
    ours = entry.name.startswith(_VERSION) and text.isascii() and text.isdecimal()
    return int(text) if ours and text == str(int(text)) and entry.is_dir() else None


def refusal(what: str, error: OSError, there: str | None = None) -> ExportError:
    """What a disk refused, and what to do; `there` says what of the export is safe."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free space there, or name another directory."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "Give this user write access there, or name another directory."
    hint = " ".join(filter(None, [hint, there])) or None
    return ExportError(f"{what}: {error.strerror or error}", hint=hint)


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
