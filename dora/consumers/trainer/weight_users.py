"""Which versions the rollout workers hold, await or load, as they say themselves.

Invariant: what a worker said before `heard` was called is known when it returns, or the caller is
told that it is not. At start nobody's age is known: all that the topic remembers count as just
heard, so that a live worker is never taken for a dead one.
"""

import logging
import time

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.core.weight_keeping import WeightUser, weight_user
from dora.errors import DeadlineError
from dora.log.presence import recent_statuses
from dora.schemas.records import Status

log = logging.getLogger(__name__)

READ_SECONDS = 30.0


class WeightUsers:
    """Follows the workers topic of a run."""

    def __init__(self, config: Config, settings: ClusterSettings) -> None:
        self._heartbeat_timeout = config.rollout.heartbeat_timeout_seconds
        self._load_timeout = config.rollout.load_timeout_seconds
        self._users: dict[str, WeightUser] = {}
        self._reader = LogReader(settings, client_id="trainer-workers")
        self._reader.assign(recent_statuses(self._reader, RunTopics(config.run.name)))

    def heard(self) -> list[WeightUser] | None:
        """Every worker that may still use weights; None if Kafka did not answer in time."""
        try:
            for message in self._reader.read_to_end(READ_SECONDS):
                if isinstance(message.value, Status):
                    self._hear(message.value)
        except DeadlineError as error:
            log.warning("no weights are deleted now: %s", error.message)
            return None
        now = time.monotonic()
        self._users = {name: user for name, user in self._users.items() if user.until >= now}
        return list(self._users.values())

    def close(self) -> None:
        """Let go of the cluster's connections."""
        self._reader.close()

    def _hear(self, status: Status) -> None:
        user = weight_user(
            status,
            time.monotonic(),
            heartbeat_timeout=self._heartbeat_timeout,
            load_timeout=self._load_timeout,
        )
        if user is None:
            self._users.pop(status.process, None)
        else:
            self._users[status.process] = user
