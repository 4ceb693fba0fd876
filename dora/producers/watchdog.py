"""Ends a process whose main loop does not come back.

Invariant: between two calls of `alive` passes no more time than the former call allowed, or the
process writes where every thread stands to standard error and ends with exit code 1, without
cleaning up: a call that never returns (an engine, a driver, a library) cannot be interrupted
otherwise. Whoever started the process starts it again.
"""

import faulthandler
import sys


def alive(seconds: float) -> None:
    """The main loop is alive and will be heard again within `seconds`."""
    # the real one: a stream put in its place may have no file to write to
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def off() -> None:
    """The main loop has ended."""
    faulthandler.cancel_dump_traceback_later()
