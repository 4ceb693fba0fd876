"""What a trainer makes of the records that it reads.

Invariant: every record that can be read and belongs here changes the window once, in the order of
the log; one that cannot is a dead letter, or ends the trainer where the order of admissions would
be unknown without it.
"""

import logging
import time
from collections.abc import Iterable

from dora.bus.reader import Message, Unreadable
from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.consumers.trainer.batch_builder import Planner
from dora.consumers.trainer.heartbeat import PROCESS, Heartbeat
from dora.core.processes import GONE
from dora.core.state import RunState
from dora.errors import RunError
from dora.log.dead_letters import dead_letter
from dora.log.ledger import LedgerWriter
from dora.schemas.records import Admission, Status, Step, Trajectory
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)


class Intake:
    """Takes the records of the run whose window is `state`."""

    def __init__(
        self,
        config: Config,
        state: RunState,
        planner: Planner,
        ledger: LedgerWriter,
        transactions: TransactionalWriter,
        writer: LogWriter,
        heartbeat: Heartbeat,
    ) -> None:
        self._topics = RunTopics(config.run.name)
        self._max_message_bytes = config.kafka.max_message_bytes
        self._state = state
        self._planner = planner
        self._ledger = ledger
        self._transactions = transactions
        self._writer = writer
        self._heartbeat = heartbeat
        self._live_versions = 0

    def live_versions(self) -> int:
        """Most versions with unfinished groups at once since this was asked last."""
        most, self._live_versions = self._live_versions, 0
        return most

    def take(self, messages: Iterable[Message]) -> None:
        """Fold what was read into the window.

        RunError if the journal contradicts itself or cannot be read, FencedError if another trainer
        took over.
        """
        for message in messages:
            value = message.value
            match value:
                case Unreadable():
                    self._unreadable(message, value)
                case Trajectory() if value.purpose == "train":
                    self._planner.take(value, message.partition, message.offset)
                case Admission() if value.purpose == "train":
                    self._admit(value, message)
                case Step():
                    self._ledger.saw(value)
                case Status(role="trainer") if value.state not in GONE:
                    self._heartbeat.settle_with_rival(value, self._transactions)
                case _:
                    pass
        self._live_versions = max(self._live_versions, len(self._state.live_versions()))

    def _admit(self, admission: Admission, message: Message) -> None:
        place = f"{message.topic} offset {message.offset}"
        if admission.policy_version > self._state.newest:
            raise RunError(
                f"{place} admits group {admission.group_id} under version "
                f"{admission.policy_version}, but the newest is {self._state.newest}",
                hint="Something else than this run's coordinator wrote to the topic.",
            )
        try:
            self._state.admit(admission)
        except ValueError as error:
            raise RunError(f"{place} contradicts the journal before it: {error}") from error

    def _unreadable(self, message: Message, value: Unreadable) -> None:
        place = message.place
        if message.topic == self._topics.workers:
            return  # of these only another trainer's word matters, and it will speak again
        if message.topic != self._topics.trajectories:
            raise RunError(
                f"{place} cannot be read ({value.code}): {value.reason}",
                hint="Without it the order of admissions is unknown. The topic is damaged, or was "
                "written by a newer dora.",
            )
        log.warning("%s cannot be read (%s): %s", place, value.code, value.reason)
        meter().count("dora_process_dead_letters_total", value=value.code)
        letter = dead_letter(
            value.code,
            value.reason,
            run=self._topics.run,
            process=PROCESS,
            now_ms=time.time_ns() // 1_000_000,
            max_message_bytes=self._max_message_bytes,
            message=message,
            trajectory_id=message.key or "",
            payload=value.payload,
        )
        self._writer.send(self._topics.dead_letters, letter, key=PROCESS)
