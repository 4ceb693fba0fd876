"""Reads a run's whole log into the audit of `core.audit`.

What is judged is one consistent cut of the log, also while the run goes on. A step and
its policy are committed in one transaction, whose markers reach the two topics one after the other;
so policies are read first, then steps until they have reached them, then the policies of the steps
that came meanwhile. What a ledger entry names was written before it and is read after it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.core.audit.audit import Audit, Versioned
from dora.core.audit.report import AuditReport
from dora.errors import DeadlineError, RunError, TopicError
from dora.schemas.records import Policy

Progress = Callable[[str, int], None]
"""Called now and then with a topic and the records of it that have been read."""

_MARKER_SECONDS = 5.0  # the markers of one transaction arrive within milliseconds
_PROGRESS_RECORDS = 5_000


def audit_run(
    settings: ClusterSettings,
    run: str,
    *,
    chunks: bool = True,
    deadline: float = 3600.0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit `run` up to the end of its log as of now; without `chunks` token chunks are skipped.

    Raises TopicError if the run does not exist, RunError if it has not started, DeadlineError if
    reading takes more than `deadline` seconds, BusError if the cluster fails.
    """
    shell = _Shell(settings, run, chunks, deadline, progress)
    return shell.run()


class _Shell:
    def __init__(
        self,
        settings: ClusterSettings,
        run: str,
        chunks: bool,
        deadline: float,
        progress: Progress | None,
    ) -> None:
        self._settings = settings
        self._topics = RunTopics(run)
        self._with_chunks = chunks
        self._audit = Audit(chunks=chunks)
        self._seconds = deadline
        self._until = time.monotonic() + deadline
        self._progress = progress
        self._read = 0
        with TopicAdmin(settings) as admin:
            self._partitions = admin.partitions_of(run)
        self._run = run

    def run(self) -> AuditReport:
        self._versions()
        if not self._read:
            raise RunError(
                f"run {self._run} has not started: its ledger is empty",
                hint="The trainer writes the first record of it; is `dora train` running?",
            )
        self._stream(self._topics.dispatch, [0])
        self._stream(self._topics.trajectories, begins="trajectories")
        if self._with_chunks:
            self._stream(self._topics.chunks, begins="chunks")
        report = self._audit.report()
        return report if report.run else replace(report, run=self._run)

    def _versions(self) -> None:
        """Feed the ledger and the policies that belong to it."""
        newest = 0  # of the policies
        with closing(self._reader()) as policies, closing(self._reader()) as steps:
            policies.assign({(self._topics.policies, 0): BEGINNING})
            for message in policies.read_to_end(self._left()):
                newest = max(newest, _version(message))
                self._feed(message)
            steps.assign({(self._topics.steps, 0): BEGINNING})
            for message in steps.read_to_end(self._left()):
                self._feed(message)
            settled = time.monotonic() + min(_MARKER_SECONDS, self._left())
            while self._audit.newest < newest and time.monotonic() < settled:
                for message in steps.poll(timeout=0.1):
                    self._feed(message)
            while newest < self._audit.newest and time.monotonic() < settled:
                for message in policies.poll(timeout=0.1):
                    if _version(message) <= self._audit.newest:
                        newest = max(newest, _version(message))
                        self._feed(message)

    def _stream(
        self, topic: str, partitions: list[int] | None = None, begins: Versioned | None = None
    ) -> None:
        """Feed partitions of a topic (by default all), from what retention left to their end."""
        numbers = range(self._count(topic)) if partitions is None else partitions
        self._read = 0
        with closing(self._reader()) as reader:
            reader.assign({(topic, number): BEGINNING for number in numbers})
            if begins is not None:
                for (_, number), offset in reader.positions().items():
                    self._audit.begins(begins, number, offset)
            for message in self._messages(reader):
                self._feed(message)

    def _messages(self, reader: LogReader) -> Iterator[Message]:
        for message in reader.read_to_end(self._left()):
            yield message
            if self._progress is not None and self._read % _PROGRESS_RECORDS == 0:
                self._progress(message.topic, self._read)

    def _feed(self, message: Message) -> None:
        self._read += 1
        if isinstance(message.value, Unreadable):
            reason = f"{message.value.code}: {message.value.reason}"
            self._audit.unreadable(message.topic, message.partition, message.offset, reason)
        else:
            self._audit.feed(message.value, message.topic, message.partition, message.offset)

    def _count(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            raise TopicError(
                f"run {self._run} has no topic {topic}",
                hint="It was deleted, or another program made the other topics; "
                f"see `dora topics describe {self._run}`.",
            )
        return count

    def _reader(self) -> LogReader:
        return LogReader(self._settings, client_id=f"{self._run}.audit")

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"the audit of run {self._run} took more than {self._seconds:g} s",
                hint="Give it more time with --timeout, or leave chunks out with --no-chunks.",
            )
        return left


def _version(message: Message) -> int:
    return message.value.version if isinstance(message.value, Policy) else -1
