"""Where exported versions go: what directories and the tables of a lakehouse have in common.

A version is in a target whole, together with the offsets that it came from, or not at all. A place
that is not this run's export is refused before anything is written, and one export at a time writes
to a directory of this machine.
"""

import errno
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import filelock
import pyarrow as pa

from dora.closeable import Closeable
from dora.consumers.export.rows import Source
from dora.errors import ExportError, InUseError, UsageError
from dora.log.table_schema import SCHEMA
from dora.schemas.records import RunStarted

LOCK = ".dora-export.lock"
EXTRA = "Install dora with its extra `lakes`: pip install 'dora-rl[lakes]'."
_FULL = ("no space left", "quota", "file too large")

Report = Callable[[str], None]
"""Gets a sentence for the person who exports."""


class Target(Closeable):
    """Where the versions of one run go; `place` says where that is, for people. Not for use from
    several threads.

    `directory` is the place if it is on this machine (it is made if it does not exist), else None:
    one export at a time writes there. UsageError if the place holds something that no export of
    this run to this format put there, InUseError if another export is writing to it, ExportError
    if it cannot be reached, read or written to.
    """

    marker: str | None = None
    """If the directory holds an entry of this name, everything in it is the table's own."""

    def __init__(self, place: str, directory: Path | None, run: RunStarted, report: Report) -> None:
        self.place = place
        self.directory = directory
        self.details: Counter[str] = Counter()
        """Further counts of what was written, by name."""
        self._started = run
        self._report = report
        self._lock = None if directory is None else self._lock_directory(directory)
        try:
            self.exported = self.read_exported()
            """The versions that are in there, by the target's own metadata."""
        except OSError as error:
            self.close()
            raise disk_error(f"cannot read {place}", error) from error
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def may_be_own(self, entry: Path) -> bool:
        """Whether an export of this format may have put `entry` into its directory."""

    @abstractmethod
    def read_exported(self) -> dict[int, Source]:
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
            if entry.name != LOCK and not self.may_be_own(entry):
                raise self.foreign_error(entry)

    def check_same_run(self, run: str, run_id: str, found: str = "") -> None:
        """UsageError if what was `found` there was made of another run."""
        mine = self._started
        if (run, run_id) != (mine.run, mine.run_id):
            who = f"an earlier run of the name {run}" if run == mine.run else f"run {run}"
            raise UsageError(
                f"{self.place} holds the export of {who}{found}",
                hint=f"Name another place for run {mine.run}.",
            )

    def foreign_error(self, what: Path | str, why: object = None) -> UsageError:
        """The error for `what`, a path or in words, that lies where the export should be."""
        if isinstance(what, Path):
            what = f"something that this export did not put there: {what}"
        return UsageError(
            f"{self.place} holds {what}" + (f" ({why})" if why else ""),
            hint="Name a directory that is new or empty, or the one of an earlier export of the "
            "same run to the same format.",
        )

    @property
    def resume_hint(self) -> str:
        """What to do after a version could not be added."""
        return (
            f"The versions that were exported before are whole ({len(self.exported)} of them): "
            "run the same command again and it goes on with this one."
        )

    def _lock_directory(self, directory: Path) -> filelock.BaseFileLock:
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
            raise disk_error(f"cannot write to {directory}", error) from error
        return lock


class TableTarget(Target):
    """A table of one run. `storage` are properties of where it is kept, some of them secrets: no
    message holds their values."""

    def __init__(
        self,
        place: str,
        directory: Path | None,
        run: RunStarted,
        report: Report,
        storage: Mapping[str, str],
    ) -> None:
        self._storage = dict(storage)
        super().__init__(place, directory, run, report)

    def columns_error(self, made_by: str) -> UsageError:
        """The table's columns are not those of `SCHEMA`."""
        return UsageError(
            f"{self.place} has other columns than an export of this version of dora ({made_by})",
            hint=f"Name another place; the columns now are {', '.join(SCHEMA.names)}.",
        )

    def remove_unfinished(self, folder: Path) -> None:
        """Remove what an interrupted export left in the `folder` of a version that no commit ever
        added."""
        left = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
        for file in left:
            file.unlink()
        if left:
            self._report(f"removed the half-written {folder.name} that an interrupted export left")

    def redact(self, text: str) -> str:
        """`text` without any value of the properties."""
        for value in filter(None, self._storage.values()):
            text = text.replace(value, "***")
        return text

    def write_error(self, version: int, why: str) -> ExportError:
        """`version` could not be added: `why`, in the words of the library or the system."""
        why = self.redact(why)
        full = any(text in why.lower() for text in _FULL)
        return ExportError(
            f"cannot export version {version} to {self.place}: {why}",
            hint=("Free space there, or name another place. " if full else "") + self.resume_hint,
        )


class WatchedBatches:
    """Batches for a library to read; `error` is what they raised, which the library may hide."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches
        except BaseException as error:
            self.error = error
            raise


def disk_error(what: str, error: OSError, there: str | None = None) -> ExportError:
    """What a disk refused, and what to do; `there` says what of the export is safe."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free space there, or name another directory."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "Give this user write access there, or name another directory."
    hint = " ".join(filter(None, [hint, there])) or None
    return ExportError(f"{what}: {error.strerror or error}", hint=hint)
