"""What the tables of a lakehouse, Iceberg and Delta, have in common as targets of an export.

Invariant: one commit of the table's own log adds a version and says where it came from; until then
its files are in no snapshot. Where the table lies in a directory of this machine, one export at a
time writes there, and what an interrupted one left of a version is removed before that version is
written again.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from dora.consumers.export.targets import Say, Target
from dora.errors import ExportError, UsageError
from dora.log.table_schema import SCHEMA
from dora.schemas.records import RunStarted

_FULL = ("no space left", "quota", "file too large")
EXTRA = "Install dora with its extra `lakes`: pip install 'dora-rl[lakes]'."


class LakeTarget(Target):
    """A table of one run. `storage` are properties of where it is kept, some of them secrets: none
    of their values is told."""

    def __init__(
        self,
        place: str,
        directory: Path | None,
        run: RunStarted,
        say: Say,
        storage: Mapping[str, str],
    ) -> None:
        self._storage = dict(storage)
        super().__init__(place, directory, run, say)

    def other_columns(self, made_by: str) -> UsageError:
        """The table's columns are not those of `SCHEMA`."""
        return UsageError(
            f"{self.place} has other columns than an export of this version of dora ({made_by})",
            hint=f"Name another place; the columns now are {', '.join(SCHEMA.names)}.",
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
        """`text` without any value of the properties."""
        for value in filter(None, self._storage.values()):
            text = text.replace(value, "***")
        return text

    def failed(self, version: int, why: str) -> ExportError:
        """`version` could not be added: `why`, in the words of the library or the system."""
        why = self.hide(why)
        full = any(text in why.lower() for text in _FULL)
        return ExportError(
            f"cannot export version {version} to {self.place}: {why}",
            hint=("Free space there, or name another place. " if full else "") + self.whole,
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
