"""One worker per id.

Invariant: a worker starts only if no other process speaks under its id. A process that died without
a word is told from a living one by its heartbeats: they go on, or they do not.
"""

import time
from collections.abc import Callable

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.errors import InUseError
from dora.schemas.records import Status

READ_SECONDS = 60.0


def claim_worker_id(
    settings: ClusterSettings,
    run: str,
    worker: str,
    *,
    heartbeat_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once the id is free; InUseError if another process goes on speaking under it.

    Waits for at most three heartbeats when the last word under the id was not a goodbye.
    """
    reader = LogReader(settings, client_id=worker)
    try:
        reader.assign({(RunTopics(run).workers, 0): -2})
        last: Status | None = None
        for message in reader.read_to_end(READ_SECONDS):
            if isinstance(message.value, Status) and message.value.process == worker:
                last = message.value
        if last is None or last.state in ("stopped", "failed"):
            return
        deadline = clock() + 3 * heartbeat_seconds
        while clock() < deadline:
            for message in reader.poll(timeout=0.1):
                heard = message.value
                if isinstance(heard, Status) and heard.process == worker:
                    if heard.state in ("stopped", "failed"):
                        return
                    raise InUseError(
                        f"worker id {worker} is in use by process {heard.pid} on {heard.host}",
                        hint="give this worker another id (--worker-id), or stop the other one",
                    )
    finally:
        reader.close()
