"""A process that hosts one rollout worker, or many emulated ones.

To the rest of the run each worker is one of its own: its commands, its incarnation, its statuses.
Here they share one thread, one reader and one writer. The parts of a turn are taken together for
all workers that have something to do, so that these wait for Kafka once, not each.
"""

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from dora.bus.reader import BEGINNING, LogReader, Message
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.processes import GONE
from dora.errors import InUseError, UsageError
from dora.producers.engines import Engine, create_engine
from dora.producers.tasks.hooks import load_hook
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import stop_token_ids, tokenizer_of
from dora.producers.worker.hosting import Installer
from dora.producers.worker.scoring import EmulatedScorer, Scorer
from dora.producers.worker.verifier_trial import summary, try_verifier
from dora.producers.worker.worker import Worker
from dora.schemas.records import Command, Policy, Status
from dora.weights.models import check_length
from dora.weights.store import WeightStore

log = logging.getLogger(__name__)

READ_SECONDS = 60.0

TURN_SECONDS = 0.002
"""Time between two turns, in which what is due comes together. On devices that are emulated
40 times too fast it is less than a tenth of an emulated second."""

MakeWorker = Callable[[str, LogWriter, Callable[[], None]], Worker]


def work(
    settings: ClusterSettings,
    names: Sequence[str],
    make: MakeWorker,
    stop: threading.Event,
    *,
    flush_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the workers of these names until `stop` is set or the coordinator has stopped them all.

    `make` puts the worker of a name on the shared writer; it also gets what reads newly arrived
    records while the worker itself is busy. Raises what one of them fails with, after all have
    reported it: CanaryError or WeightsError when a version cannot be put into the engine, BusError
    when Kafka refuses, and any error of the engine itself.
    """
    reader = LogReader(settings, client_id=names[0])
    writer = LogWriter(settings, client_id=names[0])
    fleet = Fleet(writer, flush_seconds, clock)

    def catch_up(seconds: float = 1.0) -> None:
        fleet.on_messages(reader.poll(timeout=seconds))

    try:
        for name in names:
            fleet.add(make(name, writer, catch_up))
        try:
            reader.assign(fleet.positions())
            fleet.begin()
            while not stop.is_set() and fleet.workers:
                fleet.on_messages(reader.poll(timeout=fleet.wait()))
                fleet.turn()
            fleet.end()
        except Exception as error:
            fleet.report_failure(error)
            raise
    finally:
        reader.close()
        writer.close()


class Fleet:
    """The workers of a process, by name; they write with `writer`."""

    def __init__(self, writer: LogWriter, flush_seconds: float, clock: Callable[[], float]) -> None:
        self.workers: dict[str, Worker] = {}
        self._writer = writer
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._due_at: dict[str, float] = {}
        self._turned_at = clock()

    def add(self, worker: Worker) -> None:
        """One more worker."""
        self.workers[worker.name] = worker
        self._due_at[worker.name] = self._clock()

    def positions(self) -> dict[tuple[str, int], int]:
        """What all of them read."""
        return {
            place: offset
            for worker in self.workers.values()
            for place, offset in worker.positions.items()
        }

    def begin(self) -> None:
        """Report all of them to the coordinator."""
        for worker in self.workers.values():
            worker.begin()

    def on_messages(self, messages: Iterable[Message]) -> None:
        """Give records to the workers that they concern."""
        for message in messages:
            for worker in self._concerned(message):
                worker.on_message(message)
                self._due_at[worker.name] = 0.0

    def _concerned(self, message: Message) -> list[Worker]:
        if isinstance(message.value, Command):
            worker = self.workers.get(message.value.worker)
            return [] if worker is None else [worker]
        if isinstance(message.value, Policy):
            return list(self.workers.values())
        # One dead letter about an unreadable record is enough.
        place = (message.topic, message.partition)
        return [w for w in self.workers.values() if place in w.positions][:1]

    def wait(self) -> float:
        """Seconds that may pass before the next turn, unless a record arrives."""
        now = self._clock()
        earliest = min(self._due_at.values(), default=now)
        return max(0.0, earliest - now, self._turned_at + TURN_SECONDS - now)

    def turn(self) -> None:
        """A turn for every worker that has something to do: those longest due first."""
        now = self._turned_at = self._clock()
        due = sorted(
            (w for w in self.workers.values() if self._due_at[w.name] <= now or w.heartbeat_due),
            key=lambda worker: self._due_at[worker.name],
        )
        for worker in due:
            worker.step()
        if any(worker.has_results for worker in due):
            self._writer.flush(self._flush_seconds)
        for worker in due:
            worker.absorb()
        reporting = [worker for worker in due if worker.heartbeat_due]
        if reporting:
            self._writer.flush(self._flush_seconds)
        for worker in reporting:
            worker.heartbeat()
        for worker in due:
            self._due_at[worker.name] = now + worker.wait()
        for worker in [w for w in due if w.stop_received]:
            worker.end()
            del self.workers[worker.name], self._due_at[worker.name]

    def end(self) -> None:
        """Hand back what is inflight, and report the end."""
        for worker in self.workers.values():
            worker.end()

    def report_failure(self, error: Exception) -> None:
        """All of them end with `error`."""
        for worker in self.workers.values():
            worker.report_failure(error)


def fleet_names(first: str, count: int) -> list[str]:
    """Names of the workers that a process hosts: counted on from the number at the end of `first`,
    or with numbers put behind it. A single worker is called `first`."""
    if count == 1:
        return [first]
    stem = first.rstrip("0123456789")
    if stem == first:
        return [f"{first}-{number}" for number in range(count)]
    start = int(first[len(stem) :])
    return [f"{stem}{number}" for number in range(start, start + count)]


def wait_for_free_ids(
    settings: ClusterSettings,
    run: str,
    workers: Collection[str],
    *,
    heartbeat_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once no other process uses one of these worker ids; InUseError if one goes on to.

    A process that died without a last status differs from a living one by its heartbeats: waits
    for at most three of them where the last status under an id was not a final one.
    """
    used: set[str] = set()

    def in_use(status: Status) -> bool:
        if status.process not in workers:
            return False
        (used.discard if status.state in GONE else used.add)(status.process)
        return status.state not in GONE

    with LogReader(settings, client_id=min(workers)) as reader:
        reader.assign({(RunTopics(run).workers, 0): BEGINNING})
        for message in reader.read_to_end(READ_SECONDS):
            if isinstance(message.value, Status):
                in_use(message.value)
        deadline = clock() + 3 * heartbeat_seconds
        while used and clock() < deadline:
            for message in reader.poll(timeout=0.1):
                other = message.value
                if isinstance(other, Status) and in_use(other):
                    raise InUseError(
                        f"worker id {other.process} is in use by process {other.pid} on "
                        f"{other.host}",
                        hint="give this worker another id (--worker-id), or stop the other one",
                    )


def watch_main_loop(seconds: float) -> None:
    """End this process unless it calls again within `seconds`.

    A call that never returns (an engine, a driver, a library) cannot be interrupted. So the
    process then writes the stacks of its threads to standard error and ends with exit code 1,
    without cleaning up; its supervisor starts it again.
    """
    # the real stream: one put in its place may have no file to write to
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def run_workers(
    config: Config,
    settings: ClusterSettings,
    first: str,
    stop: threading.Event,
    *,
    count: int = 1,
) -> None:
    """Runs the worker named `first`, or `count` emulated ones named from there on, until told to
    stop; raises what makes it impossible to go on.

    What can be refused (worker id in use, model, tokenizer, data set, verifier) is refused before
    an engine starts.
    """
    emulated = config.rollout.engine == "emulated"
    if count > 1 and not emulated:
        raise UsageError(
            f"{count} workers in one process need rollout.engine = emulated, not "
            f"{config.rollout.engine}"
        )
    names = fleet_names(first, count)
    # generation is one thread's work; more threads of numeric libraries only get in its way
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    wait_for_free_ids(
        settings, config.run.name, names, heartbeat_seconds=config.rollout.heartbeat_seconds
    )
    if not emulated:
        check_length(config)
    tokenizer = tokenizer_of(config)
    task = create_task(config, tokenizer)
    if config.task.verifier is not None:
        # the scorer's processes load it too, but would report it only once the engine is there
        load_hook(config.task.verifier, config.home, "task.verifier")
    if not emulated:
        log.info("the verifier: %s", summary(try_verifier(config, task)))
    stops = stop_token_ids(config, tokenizer)
    opened: list[Engine | Scorer | EmulatedScorer] = []

    def make(name: str, writer: LogWriter, catch_up: Callable[[], None]) -> Worker:
        scorer = (
            EmulatedScorer(config.rollout.emulated.success_rate)
            if emulated
            else Scorer(config.task, config.home)
        )
        opened.append(scorer)
        engine = create_engine(config, name)
        opened.append(engine)
        installer = Installer(
            engine,
            WeightStore.of(config),
            config.run_directory / "cache" / name,
            # the emulated engine has no weights that could be wrong
            tolerance=math.inf if emulated else config.rollout.canary_tolerance,
            clock=time.monotonic,
        )
        return Worker(
            config, writer, name, engine=engine, installer=installer, task=task,
            tokenizer=tokenizer, scorer=scorer, stop_token_ids=stops, alive=watch_main_loop,
            catch_up=catch_up,
        )  # fmt: skip

    try:
        work(settings, names, make, stop, flush_seconds=config.kafka.request_timeout_seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for each in opened:
            each.close()
