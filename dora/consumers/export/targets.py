"""Where exported versions go, and the directory of Parquet files.

Invariant: a version is in a target whole, together with the offsets that it came from, or not at
all. In a directory a version is one file below `version=N/`, which appears by a rename after it was
flushed to the disk; what a crash leaves behind is named `.unfinished-...` and removed by the next
export. A directory that is not this run's export is refused before anything is written.
"""

import errno
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from dora import faults
from dora.closeable import Closeable
from dora.consumers.export.rows import SOURCE_KEY, TOKEN_COLUMNS, Source
from dora.errors import ExportError, InUseError, UsageError
from dora.log.table_schema import SCHEMA, VERSION_PREFIX, exported_version
from dora.schemas.records import RunStarted
from dora.weights.store import flush_entry

UNFINISHED = ".unfinished-"
LOCK = ".dora-export.lock"

PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    # Dictionaries of token ids and of numbers that never repeat take four times as long to write
    # and are no smaller. Splitting bytes puts the few bits that floats share beside each other.
    "use_dictionary": [name for name in SCHEMA.names if name not in TOKEN_COLUMNS],
    "column_encoding": {"response_logprobs.list.element": "BYTE_STREAM_SPLIT"},
}

Say = Callable[[str], None]
"""Takes a sentence for the person who exports."""


class Target(Closeable):
    """Where the versions of one run go; `place` says where that is, for people. Not for use from
    several threads.

    `directory` is the place if it is on this machine (it is made if it does not exist), else None:
    one export at a time writes there. UsageError if the place holds something that no export of
    this run to this format put there, InUseError if another export is writing to it, ExportError
    if it cannot be reached, read or written to.
    """

    marker: str | None = None
    """Where the directory holds an entry of this name, everything in it is the table's own."""

    def __init__(self, place: str, directory: Path | None, run: RunStarted, say: Say) -> None:
        self.place = place
        self.directory = directory
        self.details: Counter[str] = Counter()
        """What else there is to tell about what was written, by name."""
        self._started = run
        self._say = say
        self._lock = None if directory is None else self._claim(directory)
        try:
            self.exported = self.look()
            """The versions that are in there, by the target's own metadata."""
        except OSError as error:
            self.close()
            raise refusal(f"cannot read {place}", error) from error
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def belongs(self, entry: Path) -> bool:
        """Whether an export of this format may have put `entry` into its directory."""

    @abstractmethod
    def look(self) -> dict[int, Source]:
        """Open what is there: the versions in it. Raises like the constructor, or OSError."""

    @abstractmethod
    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """Add the version, or replace it if it is there: all or nothing. Returns bytes written.

        ExportError if the target refuses; whatever `batches` raises goes through, and the version
        is then not in the target.
        """

    def close(self) -> None:
        """Let others export to the place."""
        if self._lock is not None:
            self._lock.release()

    def check_contents(self, directory: Path) -> None:
        """UsageError if something is there that no export of this format put there."""
        entries = sorted(directory.iterdir())
        if any(entry.name == self.marker for entry in entries):
            return
        for entry in entries:
            if entry.name != LOCK and not self.belongs(entry):
                raise self.foreign(entry)

    def check_run(self, run: str, run_id: str, found: str = "") -> None:
        """UsageError if what was `found` there was made of another run."""
        mine = self._started
        if (run, run_id) != (mine.run, mine.run_id):
            who = f"an earlier run of the name {run}" if run == mine.run else f"run {run}"
            raise UsageError(
                f"{self.place} holds the export of {who}{found}",
                hint=f"Name another place for run {mine.run}.",
            )

    def foreign(self, what: Path | str, why: object = None) -> UsageError:
        """`what`, a path or in words, lies where the export should be."""
        if isinstance(what, Path):
            what = f"something that this export did not put there: {what}"
        return UsageError(
            f"{self.place} holds {what}" + (f" ({why})" if why else ""),
            hint="Name a directory that is new or empty, or the one of an earlier export of the "
            "same run to the same format.",
        )

    @property
    def whole(self) -> str:
        """What to tell who could not add a version."""
        return (
            f"The versions that were exported before are whole ({len(self.exported)} of them): "
            "run the same command again and it goes on with this one."
        )

    def _claim(self, directory: Path) -> filelock.BaseFileLock:
        lock = filelock.FileLock(directory / LOCK)
        try:
            if directory.is_dir():
                self.check_contents(directory)  # before even the lock is put there
            elif directory.exists():
                raise UsageError(f"{directory} is a file; name a directory for the export")
            directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise InUseError(
                f"another export is writing to {directory}",
                hint="Wait until it has ended, or name another directory.",
            ) from error
        except OSError as error:
            raise refusal(f"cannot write to {directory}", error) from error
        return lock


class DirectoryTarget(Target):
    """A directory with one file per version."""

    file_name: str
    """Of a version's file."""
    sidecar: str | None = None
    """Of the file beside it that holds its `Source`, where the format has no room for it."""
    directory: Path

    def __init__(self, directory: Path, run: RunStarted, say: Say) -> None:
        super().__init__(str(directory), directory, run, say)

    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """See `Target.write`."""
        draft = self.directory / f"{UNFINISHED}{VERSION_PREFIX}{source.version}"
        home = self.directory / f"{VERSION_PREFIX}{source.version}"
        try:
            self.fill(draft, source, batches)
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
            raise refusal(
                f"cannot export version {source.version} to {self.directory}", error, self.whole
            ) from error
        finally:
            draft.unlink(missing_ok=True)
        self.exported[source.version] = source
        return size

    @abstractmethod
    def fill(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """Write the version's file at `draft`, with `source` in it."""

    @abstractmethod
    def source_of(self, file: Path) -> Source:
        """What a file of this target says it came from; ValueError if it is none."""

    def belongs(self, entry: Path) -> bool:
        """The directory of a version, or a draft."""
        return exported_version(entry) is not None or (
            entry.name.startswith(UNFINISHED) and entry.is_file()
        )

    def look(self) -> dict[int, Source]:
        """What the files say of themselves; drafts are removed."""
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
            self._say(f"removed the half-written {what} that an interrupted export left")
        return found

    def _source(self, home: Path, version: int) -> Source | None:
        """Where the version in the directory `home` came from; None if it is not whole."""
        wanted = {self.file_name} | ({self.sidecar} if self.sidecar else set())
        names = {file.name for file in home.iterdir()}
        for name in sorted(names - wanted):
            raise self.foreign(home / name)
        if names < wanted:
            return None
        file = home / self.file_name
        try:
            source = self.source_of(file)
        except (ValueError, OSError) as error:
            raise self.foreign(file, error) from error
        self.check_run(source.run, source.run_id, f" ({file})")
        if source.version != version:
            raise self.foreign(file, f"it is of version {source.version}")
        return source


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


def refusal(what: str, error: OSError, there: str | None = None) -> ExportError:
    """What a disk refused, and what to do; `there` says what of the export is safe."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free space there, or name another directory."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "Give this user write access there, or name another directory."
    hint = " ".join(filter(None, [hint, there])) or None
    return ExportError(f"{what}: {error.strerror or error}", hint=hint)
