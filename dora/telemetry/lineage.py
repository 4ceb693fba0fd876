"""Committed steps as OpenLineage events, where the configuration asks for them.

Training never waits for them: events wait in a queue of bounded length and are sent by a thread of
its own; what the receiver does not take is dropped and counted. A step always has the same id: a
trainer that starts again sends what a crash left out, and an event sent twice is the same one.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from dora.config import Config
from dora.errors import ConfigError
from dora.schemas.records import RunStarted, Step
from dora.telemetry.meter import meter
from dora.telemetry.trackers import ProgressFile

log = logging.getLogger(__name__)

QUEUE = 1000
"""Steps that wait to be sent; more are dropped."""
CLOSE_SECONDS = 15.0

Send = Callable[[Step, str], None]
"""Sends the event of a step of the run with this id; raises whatever goes wrong."""


class Lineage:
    """Lineage that is off."""

    def begin(self, started: RunStarted, recent: Iterable[Step], newest: int) -> None:
        """The trainer goes on after step `newest`; `recent` are the last entries of the ledger."""

    def step(self, step: Step) -> None:
        """A step was committed; returns at once."""

    def close(self) -> None:
        """Send what is left, for a bounded time."""


def lineage_of(config: Config) -> Lineage:
    """What the configuration asks for; ConfigError if a package for it is missing or OpenLineage's
    own configuration cannot be used."""
    section = config.lineage
    if section.url is None and not section.from_environment:
        return Lineage()
    try:
        from dora.telemetry.lineage_events import sender
    except ImportError as error:
        key = "url" if section.url is not None else "from_environment"
        raise ConfigError(
            f"lineage.{key} is set, but the package openlineage-python is not installed",
            hint="pip install 'dora-rl[lineage]'",
        ) from error
    return SentLineage(config, sender(config))


class SentLineage(Lineage):
    """Lineage that is sent with `send`."""

    def __init__(self, config: Config, send: Send) -> None:
        self._send = send
        self._path = config.run_directory / "trackers" / "lineage.json"
        self._steps: queue.Queue[Step | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._failing = False
        self._ended = threading.Event()

    def begin(self, started: RunStarted, recent: Iterable[Step], newest: int) -> None:
        mark = ProgressFile(self._path, started.run_id)
        reached = mark.read()
        for step in recent:
            if step.kind == "step" and reached < step.version_out <= newest:
                self.step(step)
        self._thread = threading.Thread(
            target=self._work, args=(started.run_id, mark), name="lineage", daemon=True
        )
        self._thread.start()

    def step(self, step: Step) -> None:
        try:
            self._steps.put_nowait(step)
        except queue.Full:
            self._drop(step, "more steps wait than are kept")

    def close(self) -> None:
        if self._thread is None:
            return
        until = time.monotonic() + CLOSE_SECONDS
        with suppress(queue.Full):
            self._steps.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._ended.set()
            left = [step for step in iter(self._next, None) if step is not None]
            meter().count("dora_trainer_lineage_events_dropped_total", len(left))
            log.warning("lineage: the receiver is too slow, %d steps were not sent", len(left))

    def _next(self) -> Step | None:
        try:
            return self._steps.get_nowait()
        except queue.Empty:
            return None

    def _work(self, run_id: str, mark: ProgressFile) -> None:
        while (step := self._steps.get()) is not None and not self._ended.is_set():
            try:
                self._send(step, run_id)
                mark.write(step.version_out)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not stop training
                self._drop(step, f"{type(error).__name__}: {error}")
            else:
                self._failing = False
                meter().count("dora_trainer_lineage_events_total")

    def _drop(self, step: Step, why: str) -> None:
        """Warns once until events are taken again."""
        meter().count("dora_trainer_lineage_events_dropped_total")
        if self._failing:
            return
        self._failing = True
        # an address may hold credentials
        said = re.sub(r"(?<=://)[^/\s@]*@", "", why)
        log.warning(
            "lineage: the event of step %d was dropped, training goes on: %s",
            step.version_out,
            said,
        )
