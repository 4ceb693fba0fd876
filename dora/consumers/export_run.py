"""Exporting a run: the closed versions that a target does not hold yet, oldest first.

Invariant: exactly once. What was exported is what the target says; a version is added whole with
its offsets or not at all, and dead letters are in the log before the version that they lay in is in
the target. So an export may be interrupted anywhere and started again.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from dora import faults
from dora.bus.settings import ClusterSettings
from dora.consumers.export_reading import ExportLog, NotWhole, StillOpen, Versions
from dora.consumers.export_rows import batches
from dora.consumers.export_targets import Say, Target
from dora.consumers.trajectory_rows import Fates
from dora.errors import ExportError, RunError
from dora.schemas.records import RunStarted

OpenTarget = Callable[[RunStarted], Target]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which versions: from `first` to `last` (None: without bound), both included."""

    first: int | None = None
    last: int | None = None

    def __contains__(self, version: int) -> bool:
        above = self.first is None or version >= self.first
        return above and (self.last is None or version <= self.last)

    @property
    def single(self) -> int | None:
        """The version, if exactly one is asked for."""
        return self.first if self.first == self.last else None


@dataclass(slots=True)
class Summary:
    """What an export did.

    `exported` are the versions that were added, `updated` those of them that replace an older
    state, `there` is how many were in the target before and still are right. `open` and `missing`
    say by version why it is not exported: it may still change, or records of it are gone.
    `rows` and `bytes` are those added; `foreign` counts the records that do not belong where they
    lie, `dead_letters` those of them that were written to the dead letters now.
    """

    run: str
    place: str
    exported: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    there: int = 0
    open: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0
    duplicates: int = 0
    foreign: int = 0
    dead_letters: int = 0
    unreadable: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def export_run(
    settings: ClusterSettings,
    run: str,
    open_target: OpenTarget,
    *,
    wanted: Wanted = Wanted(),
    ended: bool = False,
    write_letters: bool = True,
    rows: int = 1024,
    deadline: float = 3600.0,
    say: Say = lambda text: None,
) -> Summary:
    """Bring the target up to the closed versions of `run` within `wanted`.

    With `ended` the run counts as over. At most `rows` rows are in memory at once, beside what the
    clients fetch ahead. Raises TopicError or RunError if there is no such run or version, RunError
    if the one version asked for may still change, what the target raises at its door, ExportError
    when it refuses rows, DeadlineError after `deadline` seconds and BusError if the cluster fails.
    """
    began = time.monotonic()
    log = ExportLog(settings, run, deadline=deadline, write_letters=write_letters)
    if wanted.single is not None:
        log.check_version(wanted.single)
    left = max(1.0, deadline - (time.monotonic() - began))
    with (
        open_target(log.started) as target,
        Versions(settings, log, ended=ended, deadline=left) as versions,
        log.letters as letters,
    ):
        log.hand_over()
        export = _Export(run, log, versions, target, rows, say)
        for version in versions.numbers:
            if version in wanted:
                export.take(version)
        letters.flush()
        summary = export.summary
        summary.duplicates = versions.duplicates
        summary.foreign, summary.dead_letters = letters.seen, letters.written
        summary.unreadable = list(log.unreadable)
    if wanted.single is not None and wanted.single in summary.open:
        raise RunError(
            f"version {wanted.single} of run {run} cannot be exported yet: "
            f"{summary.open[wanted.single]}",
            hint="Its rows may still change. If the run will never go on, say so with --ended.",
        )
    summary.seconds = time.monotonic() - began
    return summary


class _Export:
    def __init__(
        self, run: str, log: ExportLog, versions: Versions, target: Target, rows: int, say: Say
    ) -> None:
        self._log = log
        self._versions = versions
        self._target = target
        self._rows = rows
        self._say = say
        self._fates = Fates(log)
        self._there: Mapping[int, Any] = target.exported(run)
        self.summary = Summary(run, target.place)

    def take(self, version: int) -> None:
        """Export `version`, or note why not."""
        versions, summary = self._versions, self.summary
        there = self._there.get(version)
        if there is not None and not versions.changed(there):
            summary.there += 1
            return
        reason = versions.open_reason(version)
        if reason is not None:
            summary.open[version] = reason
            return
        reason = versions.gone_reason(version)
        if reason is not None:
            summary.missing[version] = reason
            return
        counted = 0

        def counting() -> Iterator[pa.RecordBatch]:
            nonlocal counted
            for batch in batches(
                self._log,
                version,
                rows=self._rows,
                trajectories=versions.trajectories(version),
                fates=self._fates,
            ):
                counted += batch.num_rows
                self._say(f"version {version}: {counted:,} rows")
                yield batch
                faults.point("export.batch_read")

        try:
            size = self._target.write(versions.source(version), counting())
        except NotWhole as error:
            summary.missing[version] = error.message
        except StillOpen as error:
            summary.open[version] = error.message
        else:
            faults.point("export.version_exported")
            summary.exported.append(version)
            if there is not None:
                summary.updated.append(version)
            summary.rows += counted
            summary.bytes += size


def spans(versions: Iterable[int]) -> str:
    """`version 3`, `versions 0 to 4, 7`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(versions):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    several = len(runs) > 1 or runs[0][0] < runs[0][1]
    return f"version{'s' if several else ''} {', '.join(texts)}"


def check_complete(summary: Summary) -> None:
    """ExportError, naming the versions, if records of some are gone that were never exported."""
    if not summary.missing:
        return
    named = "; ".join(f"version {v}: {why}" for v, why in sorted(summary.missing.items())[:3])
    more = f"; and {len(summary.missing) - 3} more" if len(summary.missing) > 3 else ""
    first = max(summary.missing) + 1
    raise ExportError(
        f"{spans(summary.missing)} of run {summary.run} cannot be exported to {summary.place} any "
        f"more: {named}{more}",
        hint=f"The others were exported. Export more often, or raise kafka.retention_hours; from "
        f"now on leave those out with --versions {first}:",
    )
