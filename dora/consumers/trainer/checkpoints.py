"""Full training checkpoints in the run's directory.

A checkpoint that has its name is complete and on disk, with a manifest that shows damage before
anything of it is loaded. Only those count that a committed step names; others are removed at the
next start.
"""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from dora.errors import WeightsError
from dora.schemas.records import Policy, RunStarted, WeightFile
from dora.weights.store import describe, is_later, replace_directory, storage_error, verify

_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{16}")
_UNFINISHED = ".unfinished-"
_MANIFEST = "manifest.json"


def checkpoint_name(version: int, checksum: str) -> str:
    """Name of the checkpoint that holds policy `version`."""
    return f"step-{version:08d}-{checksum[:16]}"


def starting_checkpoint(started: RunStarted, policy: Policy | None) -> str | None:
    """Name of the checkpoint that a run begins with which began with a step of another run; None
    for a run that began with its model. `policy` is its version 0."""
    if not started.origin or policy is None:
        return None
    return checkpoint_name(0, policy.weights_checksum)


class Checkpoints:
    """The checkpoints below one directory. Errors of the storage become WeightsError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` fill a new directory, then give it its name."""
        staging = self.directory / f"{_UNFINISHED}{name}-{uuid.uuid4().hex[:8]}"
        try:
            staging.mkdir(parents=True)
            save(staging)
            files = [[file.path, file.size, file.sha256] for file in describe(staging)]
            (staging / _MANIFEST).write_text(json.dumps(files) + "\n")
            replace_directory(staging, self.directory / name)
        except OSError as error:
            raise storage_error("cannot write a checkpoint", str(self.directory), error) from error
        except RuntimeError as error:  # torch reports a full disk in its own words
            free = shutil.disk_usage(self.directory).free
            raise WeightsError(
                f"cannot write a checkpoint at {self.directory}, where {free / 2**20:,.1f} MiB are "
                f"free: {error}",
                hint="If the disk is full, free space there, or lower trainer.keep_checkpoints and "
                "weights.keep; then start the trainer again: nothing that was committed is lost.",
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Directory of a checkpoint; WeightsError if `name` (from the log) is not one."""
        if not _NAME.fullmatch(name):
            raise WeightsError(f"the ledger names {name!r}, which is no checkpoint")
        return self.directory / name

    def verify(self, name: str) -> None:
        """WeightsError if the checkpoint is not there, or not as it was written."""
        path = self.path(name)
        try:
            entries = json.loads((path / _MANIFEST).read_text())
            files = [WeightFile(str(file), int(size), str(sha)) for file, size, sha in entries]
        except (OSError, ValueError, TypeError) as error:
            raise WeightsError(f"{path / _MANIFEST} cannot be read: {error}") from error
        verify(path, files)

    def newest_intact(self, names: Sequence[str]) -> tuple[str | None, dict[str, str]]:
        """The last of `names` that is as it was written, and why those after it are not."""
        damaged: dict[str, str] = {}
        for name in reversed(names):
            try:
                self.verify(name)
            except WeightsError as error:
                damaged[name] = error.message
            else:
                return name, damaged
        return None, damaged

    def names(self) -> set[str]:
        """Names of the checkpoints that are there."""
        try:
            return {p.name for p in self.directory.iterdir() if _NAME.fullmatch(p.name)}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise storage_error("cannot list checkpoints", str(self.directory), error) from error

    def keep_only(self, names: Collection[str], *, newest: int | None = None) -> list[str]:
        """Remove all others and what an interrupted `write` left; returns what was removed.

        With `newest`, those of later versions are left alone.
        """
        if not self.directory.is_dir():
            return []
        removed = []
        try:
            for entry in sorted(self.directory.iterdir()):
                if newest is not None and is_later(entry.name, newest):
                    continue
                orphan = _NAME.fullmatch(entry.name) and entry.name not in names
                if orphan or entry.name.startswith(_UNFINISHED):
                    shutil.rmtree(entry)
                    removed.append(entry.name)
        except OSError as error:
            raise storage_error("cannot delete a checkpoint", str(self.directory), error) from error
        return removed
