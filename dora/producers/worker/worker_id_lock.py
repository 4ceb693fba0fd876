"""One worker per id.

Invariant: workers start only if no other process speaks under one of their ids. A process that
died without a word is told from a living one by its heartbeats: they go on, or they do not.
"""

import time
from collections.abc import Callable, Collection

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.errors import InUseError
from dora.schemas.records import Status

READ_SECONDS = 60.0


def claim_worker_ids(
    settings: ClusterSettings,
    run: str,
    workers: Collection[str],
    *,
    heartbeat_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once the ids are free; InUseError if another process goes on speaking under one.

    Waits for at most three heartbeats when the last word under an id was not a goodbye.
    """
    reader = LogReader(settings, client_id=min(workers))
    try:
        reader.assign({(RunTopics(run).workers, 0): -2})
        taken: set[str] = set()
        for message in reader.read_to_end(READ_SECONDS):
            if isinstance(message.value, Status):
                _note(message.value, workers, taken)
        deadline = clock() + 3 * heartbeat_seconds
        while taken and clock() < deadline:
            for message in reader.poll(timeout=0.1):
                heard = message.value
                if isinstance(heard, Status) and _note(heard, workers, taken):
                    raise InUseError(
                        f"worker id {heard.process} is in use by process {heard.pid} on "
                        f"{heard.host}",
                        hint="give this worker another id (--worker-id), or stop the other one",
                    )
    finally:
        reader.close()


def _note(heard: Status, workers: Collection[str], taken: set[str]) -> bool:
    """Whether somebody speaks under one of the ids, which is taken until its goodbye."""
    if heard.process not in workers:
        return False
    if heard.state in ("stopped", "failed"):
        taken.discard(heard.process)
        return False
    taken.add(heard.process)
    return True
