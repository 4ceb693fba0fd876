"""Reads a run's log into a report.

Invariant: one pass over the trajectories, of which only lengths and sums stay; nothing that is
missing or unreadable stops the report, it is named in it. The log may grow meanwhile: the ledger
was read first, so whatever it names is there.
"""

import time
from contextlib import closing

from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import TopicAdmin
from dora.consumers.audit import Progress, audit_run
from dora.consumers.report_assembly import assemble
from dora.consumers.report_data import RunReport
from dora.consumers.report_tally import Control, Tally
from dora.consumers.run_log import RunLog
from dora.core.audit_report import AuditReport
from dora.core.ring import JOURNAL
from dora.errors import DeadlineError, RunError, TopicError
from dora.schemas.records import Command, DeadLetter, Status

_PROGRESS_RECORDS = 5_000


def read_report(
    settings: ClusterSettings,
    run: str,
    *,
    audit: bool = True,
    deadline: float = 3600.0,
    progress: Progress | None = None,
) -> RunReport:
    """The report of `run` as of now; without `audit` the log is not audited.

    `progress` is called now and then with a topic and the records of it that were read. TopicError
    if there is no such run, RunError if it has not begun, BusError if the cluster fails,
    DeadlineError if a pass over a topic, or everything until the audit's end, takes more than
    `deadline` seconds.
    """
    until = time.monotonic() + deadline
    log = RunLog(settings, run, deadline=deadline)
    control = Control(log.started, log.ledger)
    foreign = _read_control(settings, log, control, until - time.monotonic())
    control.incidents.attempts(control.orders)
    newest = max((step.version_out for step in log.ledger), default=0)
    tally = Tally(
        log.started,
        max(newest, *log.policies, 0),
        log.trained_at(),
        log.admissions.values(),
        control,
    )
    for number, placed in enumerate(log.trajectories()):
        tally.take(placed.record)
        if progress is not None and number % _PROGRESS_RECORDS == 0:
            progress(log.topics.trajectories, number)
    audited: AuditReport | None = None
    refused: str | None = None
    if audit:
        try:
            left = until - time.monotonic()
            audited = audit_run(settings, run, deadline=left, progress=progress)
        except DeadlineError as error:
            raise DeadlineError(
                f"the report of run {run} took more than {deadline:g} s",
                hint="Give it more time with --timeout, or leave the audit out with --no-audit.",
            ) from error
        except (TopicError, RunError) as error:
            refused = error.message
    return assemble(
        log.started,
        log.ledger,
        log.policies,
        control,
        tally,
        audit=audited,
        audit_refused=refused,
        missing=[*log.missing, *foreign.missing],
        unreadable=[*log.unreadable, *foreign.unreadable],
    )


class _Notes:
    """What of the control topics is gone or cannot be read."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unreadable: list[str] = []


def _read_control(
    settings: ClusterSettings, log: RunLog, control: Control, deadline: float
) -> _Notes:
    """Take commands, statuses and dead letters."""
    notes = _Notes()
    topics = log.topics
    kinds: dict[str, type[Command | Status | DeadLetter]] = {
        topics.dispatch: Command,
        topics.workers: Status,
        topics.dead_letters: DeadLetter,
    }
    with TopicAdmin(settings) as admin:
        partitions = {info.name: info.partitions for info in admin.describe(log.run)}
    wanted = {
        (topic, number): BEGINNING
        for topic in kinds
        for number in range(partitions.get(topic, 0))
        if (topic, number) != (topics.dispatch, JOURNAL)
    }
    for topic in kinds:
        if topic not in partitions:
            notes.missing.append(f"the topic {topic} does not exist any more")
    with closing(LogReader(settings, client_id=f"{log.run}.report")) as reader:
        for (topic, number), first in reader.start_offsets(wanted).items():
            if first:
                notes.missing.append(
                    f"{topic} partition {number} begins at offset {first}: "
                    f"0 to {first - 1} were deleted by retention"
                )
        reader.assign(wanted)
        for message in reader.read_to_end(deadline):
            _take(message, kinds[message.topic], control, notes)
    return notes


def _take(
    message: Message, kind: type[Command | Status | DeadLetter], control: Control, notes: _Notes
) -> None:
    value = message.value
    place = f"{message.topic} partition {message.partition} offset {message.offset}"
    if isinstance(value, Unreadable):
        notes.unreadable.append(f"{place} cannot be read ({value.code}): {value.reason}")
    elif isinstance(value, kind):
        control.take(value)
    else:
        found = type(value).__name__
        notes.unreadable.append(f"{place} holds a {found}, which does not belong there")
