"""The loop of a process that is one rollout worker.

Invariant: one thread; between two turns of the worker it takes what has arrived and waits no longer
than the worker may.
"""

import threading
from collections.abc import Callable

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.writer import LogWriter
from dora.producers.worker import Worker

MakeWorker = Callable[[LogWriter, Callable[[], None]], Worker]


def work(settings: ClusterSettings, name: str, make: MakeWorker, stop: threading.Event) -> None:
    """Run the worker that `make` puts on a writer until `stop` is set or the coordinator says stop.

    `make` also gets what reads newly arrived records while the worker itself is busy. Raises
    CanaryError or WeightsError when a version cannot be put into the engine, BusError when Kafka
    refuses, and whatever the engine itself dies of; the last status says so.
    """
    reader = LogReader(settings, client_id=name)
    writer = LogWriter(settings, client_id=name)

    def catch_up(seconds: float = 1.0) -> None:
        for message in reader.poll(timeout=seconds):
            worker.receive(message)

    try:
        worker = make(writer, catch_up)
        try:
            reader.assign(worker.positions)
            worker.begin()
            while not (stop.is_set() or worker.told_to_stop):
                catch_up(worker.wait())
                worker.turn()
            worker.end()
        except Exception as error:
            worker.failed(error)
            raise
    finally:
        reader.close()
        writer.close()
