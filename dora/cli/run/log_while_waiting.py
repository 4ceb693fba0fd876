"""Log a wait without a limit once a minute: a user's own code runs, and may take long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 60.0


@contextmanager
def log_while_waiting(
    emit: Callable[[str], None], what: str, *, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """While the block runs, emit every `every` seconds how long `what` has been awaited."""
    ended = threading.Event()
    began = time.monotonic()

    def report() -> None:
        while not ended.wait(every):
            emit(f"waiting for {what} for {time.monotonic() - began:.0f} s; Ctrl-C ends it")

    thread = threading.Thread(target=report, name="log-while-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(every)
