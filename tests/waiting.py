"""Waiting for a condition, with a deadline, in place of sleeping."""

import time
from collections.abc import Callable

_PAUSE_SECONDS = 0.02


def until(condition: Callable[[], object], what: str | Callable[[], str], seconds: float) -> None:
    """Wait until `condition` holds; AssertionError with `what` was waited for after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {seconds:g} s for {told}")
        time.sleep(_PAUSE_SECONDS)
