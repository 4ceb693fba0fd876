"""Starts `dora` commands quickly: forks them from a process that has imported what they need.

A worker or trainer spends most of its start on imports, seconds of a processor each; with hundreds
of restarts that would be most of a chaos run. A forked process runs the same `dora` command from
its beginning, in a process group and with an environment of its own.

The harness writes one JSON object a line: `number`, `arguments`, `environment`, `log`. The nursery
answers `{"number": ..., "pid": ...}`, and `{"pid": ..., "code": ...}` when a process has ended. An
empty object says that the harness ends in order.

Invariant: when the harness is gone (end of input), everything that was started here is killed, and
so is the run's broker if the harness did not end in order. No thread runs in this process, so that
forking it is safe.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from dora.broker.local import broker_process

_TICK_SECONDS = 0.02


def serve(broker: Path) -> dict[str, Any] | None:
    """Take orders until the harness is gone; in a started process, the order that it is to run."""
    children: set[int] = set()
    orderly = False
    buffer = b""
    while True:
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        readable, _, _ = select.select([0], [], [], _TICK_SECONDS)
        if not readable:
            continue
        data = os.read(0, 65_536)
        if not data:
            for pid in children:
                _kill(pid)
            if not orderly:
                end_broker(broker)
            return None
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            if not order:
                orderly = True
                continue
            pid = os.fork()
            if pid == 0:
                _settle(order)
                return order
            children.add(pid)
            _say({"number": order["number"], "pid": pid})


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _kill(pid: int) -> None:
    for number in (signal.SIGCONT, signal.SIGKILL):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return


def _settle(order: dict[str, Any]) -> None:
    """Make the forked process one that was started with the order's environment and log."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.update(order["environment"])
    sys.argv = ["dora", *order["arguments"]]


def end_broker(directory: Path) -> None:
    """Kill the broker in `directory`, in whatever state it is."""
    pid = broker_process(directory)
    if pid is not None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def main(broker: Path, modules: list[str]) -> None:
    """Import `modules`, say so with an empty object, and start what is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the harness's to handle
    for module in modules:
        importlib.import_module(module)
    if threading.active_count() > 1:
        raise RuntimeError(f"imports started threads: {threading.enumerate()}")
    gc.collect()
    gc.freeze()
    _say({})
    if serve(broker) is not None:
        # It reads its environment when it is imported.
        importlib.reload(importlib.import_module("dora.faults"))
        importlib.import_module("dora.cli.main").main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
