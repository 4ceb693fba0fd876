"""Exporting a run: the closed versions that a target does not hold yet, oldest first.

An export may be interrupted anywhere and started again, and each version is in the target once: the
target says what was exported, a version is added whole with its offsets or not at all, and dead
letters are in the log before the version in which they lay is in the target.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from dora import faults
from dora.bus.settings import ClusterSettings
from dora.consumers.export.reading import ExportLog, NotWhole, StillOpen, VersionReader
from dora.consumers.export.rows import batches
from dora.consumers.export.targets import Report, Target
from dora.consumers.inspect.rows import Fates
from dora.errors import ExportError, RunError
from dora.schemas.records import RunStarted

OpenTarget = Callable[[RunStarted], Target]


@dataclass(frozen=True, slots=True)
class VersionRange:
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
    lie, `dead_letters` those of them that were written to the dead letters now. `details` are the
    target's own.
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
    details: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values; without `details` if there are none."""
        values = asdict(self)
        if not self.details:
            del values["details"]
        return values


def export_run(
    settings: ClusterSettings,
    run: str,
    open_target: OpenTarget,
    *,
    wanted: VersionRange = VersionRange(),
    ended: bool = False,
    write_dead_letters: bool = True,
    deadline: float = 3600.0,
    report: Report = lambda text: None,
) -> Summary:
    """Bring the target up to the closed versions of `run` within `wanted`.

    With `ended` the run counts as over. Raises TopicError or RunError if there is no such run or
    version, RunError if the one version asked for may still change, what `open_target`
    raises, ExportError when it refuses rows, DeadlineError after `deadline` seconds and BusError if
    the cluster fails.
    """
    began = time.monotonic()
    log = ExportLog(settings, run, deadline=deadline, write_dead_letters=write_dead_letters)
    if wanted.single is not None:
        log.check_version(wanted.single)
    left = max(1.0, deadline - (time.monotonic() - began))
    with (
        open_target(log.started) as target,
        VersionReader(settings, log, ended=ended, deadline=left) as reader,
        log.dead_letters as dead_letters,
    ):
        log.write_foreign()
        export = _Export(run, log, reader, target, report)
        for version in reader.versions.numbers:
            if version in wanted:
                export.add(version)
        dead_letters.flush()
        summary = export.summary
        summary.duplicates = reader.duplicates
        summary.foreign, summary.dead_letters = dead_letters.seen, dead_letters.written
        summary.unreadable = list(log.unreadable)
        summary.details = dict(target.details)
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
        self, run: str, log: ExportLog, reader: VersionReader, target: Target, report: Report
    ) -> None:
        self._log = log
        self._reader = reader
        self._target = target
        self._report = report
        self._fates = Fates(log)
        self._there = dict(target.exported)
        self.summary = Summary(run, target.place)

    def add(self, version: int) -> None:
        """Export `version`, or note why not."""
        versions, summary = self._reader.versions, self.summary
        there = self._there.get(version)
        if there is not None and not self._reader.changed(there):
            summary.there += 1
        elif reason := versions.open_reason(version):
            summary.open[version] = reason
        elif reason := versions.gone_reason(version):
            summary.missing[version] = reason
        else:
            self._write(version)

    def _write(self, version: int) -> None:
        summary, counted = self.summary, 0

        def counting() -> Iterator[pa.RecordBatch]:
            nonlocal counted
            trajectories = self._reader.trajectories(version)
            for batch in batches(trajectories, self._log.admissions, self._fates):
                counted += batch.num_rows
                self._report(f"version {version}: {counted:,} rows")
                yield batch
                faults.point("export.batch_read")

        try:
            size = self._target.write(self._reader.source(version), counting())
        except NotWhole as error:
            summary.missing[version] = error.message
        except StillOpen as error:
            summary.open[version] = error.message
        else:
            faults.point("export.version_exported")
            summary.exported.append(version)
            if version in self._there:
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
