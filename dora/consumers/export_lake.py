"""What the tables of a lakehouse, Iceberg and Delta, have in common as targets of an export.

Invariant: one commit of the table's own log adds a version and says where it came from; until then
its files are in no snapshot. Where the table lies in a directory of this machine, one export at a
time writes there, and what an interrupted one left of a version is removed before that version is
written again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import filelock
import pyarrow as pa

from dora.consumers.export_rows import SCHEMA, Source
from dora.consumers.export_targets import LOCK, Say, refusal
from dora.errors import ExportError, InUseError, UsageError
from dora.schemas.records import RunStarted

_FULL = ("no space left", "quota", "file too large")
EXTRA = "Install dora with its extra `lakes`: pip install 'dora-rl[lakes]'."


class LakeTarget(ABC):
    """A table of one run. `directory` is where it lies if that is on this machine, else None.

    UsageError if the place holds something else or another run's export, InUseError if another
    export is writing there, ExportError if it cannot be reached or written to.
    """

    def __init__(
        self, directory: Path | None, run: RunStarted, say: Say, properties: Mapping[str, str]
    ) -> None:
        self.directory = directory
        self._hidden = [value for value in properties.values() if value]
        self._started = run
        self._say = say
        self._versions: dict[int, Source] = {}
        self._lock: filelock.BaseFileLock | None = None
        if directory is None:
            return
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory} is a file; name a directory for the export")
        if directory.is_dir():
            self.check_contents(directory)  # before even the lock is put there
        lock = filelock.FileLock(directory / LOCK)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise InUseError(
                f"another export is writing to {directory}",
                hint="Wait until it has ended, or name another directory.",
            ) from error
        except OSError as error:
            raise refusal(f"cannot write to {directory}", error) from error
        self._lock = lock

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the table is, for people."""

    def exported(self, run: str) -> Mapping[int, Source]:
        """What the table says of itself."""
        return {v: source for v, source in self._versions.items() if source.run == run}

    @abstractmethod
    def write(self, source: Source, batches: Iterator[pa.RecordBatch]) -> int:
        """See `Target.write`."""

    @abstractmethod
    def check_contents(self, directory: Path) -> None:
        """UsageError if `directory` holds what no export of this format put there."""

    def close(self) -> None:
        """Let others export to the place."""
        if self._lock is not None:
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

    def foreign(self, what: str) -> UsageError:
        """`what` lies where the table should be."""
        return UsageError(
            f"{self.place} holds {what}",
            hint="Name a directory that is new or empty, or the one of an earlier export of the "
            "same run to the same format.",
        )

    def other_columns(self, made_by: str) -> UsageError:
        """The table's columns are not those of `SCHEMA`."""
        return UsageError(
            f"{self.place} has other columns than an export of this version of dora ({made_by})",
            hint=f"Name another place; the columns now are {', '.join(SCHEMA.names)}.",
        )

    def check_run(self, run: str, run_id: str) -> None:
        """UsageError if the table was made of another run."""
        mine = self._started
        if (run, run_id) != (mine.run, mine.run_id):
            who = f"run {run}"
            if run == mine.run:
                who = f"an earlier run of the name {run}"
            raise UsageError(
                f"{self.place} holds the export of {who}",
                hint=f"Name another place for run {mine.run}.",
            )

    def sweep(self, folder: Path) -> None:
        """Remove what an interrupted export left in the `folder` of a version that no commit ever
        added."""
        left = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
        for file in left:
            file.unlink()
        if left:
            self._say(f"removed the half-written {folder.name} that an interrupted export left")

    def hide(self, text: str) -> str:
        """`text` without any value of the properties: some are secrets."""
        for value in self._hidden:
            text = text.replace(value, "***")
        return text

    def failed(self, version: int, why: str) -> ExportError:
        """`version` could not be added: `why`, in the words of the library or the system."""
        why = self.hide(why)
        full = any(text in why.lower() for text in _FULL)
        return ExportError(
            f"cannot export version {version} to {self.place}: {why}",
            hint=("Free space there, or name another place. " if full else "")
            + f"The versions that were exported before are whole ({len(self._versions)} of them): "
            "run the same command again and it goes on with this one.",
        )


class Guarded:
    """Batches that a library reads; `error` is what they raised, whatever it makes of that."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches
        except BaseException as error:
            self.error = error
            raise


def first_line(error: BaseException) -> str:
    """What a library said, without the stack that it appends."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
