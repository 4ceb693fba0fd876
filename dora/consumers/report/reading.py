"""Reads a run's log into a report.

Invariant: one pass over the trajectories, of which only lengths and sums stay; nothing that is
missing or unreadable stops the report, it is named in it. The log may grow meanwhile: the ledger
was read first, so whatever it names is there.
"""

import time

from dora.bus.settings import ClusterSettings
from dora.consumers.audit import Progress, audit_run
from dora.consumers.report.assembly import assemble
from dora.consumers.report.data import RunReport
from dora.consumers.report.tally import Control, Tally
from dora.core.audit.report import AuditReport
from dora.errors import DeadlineError, RunError, TopicError
from dora.log.run_log import RunLog

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
    for record in log.control():
        control.take(record)
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
        missing=log.missing,
        unreadable=log.unreadable,
    )
