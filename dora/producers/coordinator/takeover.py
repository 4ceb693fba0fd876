"""Reads from the chunk log what lost trajectories have, so that other workers go on with them.

Every trajectory that was asked for is answered once, in the end with an empty prefix: a log that
cannot be read costs tokens, never a trajectory. A thread reads beside the coordinator's work, and
only chunks of the trajectories asked for are decoded.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.core.scheduling.prefixes import Prefix, PrefixCollector
from dora.errors import BusError, DeadlineError
from dora.schemas.records import Chunk

log = logging.getLogger(__name__)

SCAN_SECONDS = 60.0
"""How long one reading may take before what was found so far has to do."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A trajectory to look for: its version, its partition and where the version begins there."""

    version: int
    place: Partition
    start: int


class ChunkScanner:
    """Answers in `poll` what was asked for with `ask`; with `mixed` (schedule `partial`) prefixes
    may be of several versions."""

    def __init__(
        self, settings: ClusterSettings, *, deadline: float = SCAN_SECONDS, mixed: bool = False
    ) -> None:
        self._settings = settings
        self._mixed = mixed
        self._deadline = deadline
        self._waiting: dict[str, Lost] = {}
        self._running: dict[str, Lost] = {}
        self._thread: threading.Thread | None = None
        self._found: dict[str, Prefix] = {}
        self._error: BaseException | None = None

    def ask(self, wanted: Mapping[str, Lost]) -> None:
        """Look for these trajectories, by id, unless they are looked for already."""
        for identity, lost in wanted.items():
            if identity not in self._running:
                self._waiting[identity] = lost

    def poll(self) -> dict[str, Prefix]:
        """What was found since the last call; never blocks."""
        found: dict[str, Prefix] = {}
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._error is not None:
                raise self._error
            found, self._found, self._running = self._found, {}, {}
        if self._thread is None and self._waiting:
            self._running, self._waiting = self._waiting, {}
            # a daemon: what it reads is of no use any more once the coordinator ends
            self._thread = threading.Thread(target=self._scan, name="takeover", daemon=True)
            self._thread.start()
        return found

    def _scan(self) -> None:
        try:
            self._found = scan(self._settings, self._running, self._deadline, mixed=self._mixed)
        except BaseException as error:  # noqa: BLE001 - raised in `poll`
            self._error = error


def scan(
    settings: ClusterSettings, wanted: Mapping[str, Lost], deadline: float, *, mixed: bool = False
) -> dict[str, Prefix]:
    """The best prefix of each trajectory in the log as of now (see `core.prefixes`)."""
    started = time.monotonic()
    versions = {identity: lost.version for identity, lost in wanted.items()}
    collector = PrefixCollector(versions, mixed=mixed)
    try:
        with LogReader(settings, client_id="takeover", wanted=wanted.__contains__) as reader:
            starts: dict[Partition, int] = {}
            for lost in wanted.values():
                starts[lost.place] = min(lost.start, starts.get(lost.place, lost.start))
            first = reader.start_offsets(starts)
            reader.assign(
                {p: at if at == BEGINNING else max(at, first[p]) for p, at in starts.items()}
            )
            for message in reader.read_to_end(deadline):
                if isinstance(message.value, Chunk):
                    collector.add_chunk(message.value)
    except (BusError, DeadlineError) as error:
        log.warning("chunks could be read only in part: %s", error.message)
    found = {identity: collector.best(identity) for identity in wanted}
    log.info(
        "taking over %d trajectories with %d tokens; reading took %.2f s",
        len(found),
        sum(prefix.tokens for prefix in found.values()),
        time.monotonic() - started,
    )
    return found
