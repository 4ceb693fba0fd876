"""Named points at which a process can be made to die or freeze, for tests of recovery.

Without the environment variable `DORA_FAULT` a point calls an empty function. With
`DORA_FAULT=<point>:<kill|freeze>[:<passage>]` the process sends itself SIGKILL or SIGSTOP when it
passes that point for the given time, counted from 1 (the default).
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Literal, get_args

from dora.errors import ConfigError

VARIABLE = "DORA_FAULT"

Point = Literal[
    "trainer.weights_stored",
    "trainer.checkpoint_stored",
    "trainer.before_transaction",
    "trainer.inside_transaction",
    "trainer.after_transaction",
    "coordinator.inside_transaction",
    "coordinator.after_transaction",
    "worker.chunk_sent",
    "worker.trajectory_sent",
    "worker.version_loading",
    "worker.version_loaded",
    "export.batch_read",
    "export.version_written",
    "export.version_placed",
    "export.version_exported",
]
POINTS: tuple[Point, ...] = get_args(Point)
"""Every point, in the order in which a process passes its own."""

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


Prepare = Callable[[], object] | None


def _nothing(point: Point, prepare: Prepare = None) -> None:
    """No fault is set."""


def _armed(text: str) -> Callable[..., None]:
    name, _, rest = text.partition(":")
    kind, _, count = rest.partition(":")
    if name not in POINTS or kind not in _SIGNALS or not (count or "1").isdecimal():
        raise ConfigError(
            f"{VARIABLE}={text}: not of the form <point>:<kill|freeze>[:<passage>]",
            hint=f"The points are {', '.join(POINTS)}.",
        )
    left = int(count or "1")

    def fire(point: Point, prepare: Prepare = None) -> None:
        nonlocal left
        if point != name:
            return
        left -= 1
        if left == 0:
            if prepare is not None:
                prepare()
            print(f"fault: {kind} at {point}", file=sys.stderr, flush=True)  # noqa: T201
            os.kill(os.getpid(), _SIGNALS[kind])

    return fire


_text = os.environ.get(VARIABLE)
point: Callable[..., None] = _armed(_text) if _text else _nothing
"""Called where a process passes a point; `prepare` is called before a fault, and only then."""
