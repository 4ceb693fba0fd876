"""Waits that nobody can put a limit to, because a user's own code runs: they are told of.

Invariant: whoever looks at the output sees at least once a minute what is being waited for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 60.0


@contextmanager
def telling(
    say: Callable[[str], None], what: str, *, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Through the block, say every `every` seconds that `what` is awaited, and for how long."""
    ended = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            say(f"waiting for {what} for {time.monotonic() - began:.0f} s; Ctrl-C ends it")

    thread = threading.Thread(target=tell, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(every)
