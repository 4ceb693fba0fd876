"""Processes and ports of this machine, as the local broker needs them.

A process counts as the broker only if it has the recorded id and start time and runs Kafka, so no
other program is ever signalled.
"""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom

import psutil

from dora.broker.directory import BrokerState
from dora.errors import BrokerError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of Linux: no outgoing connection takes the port of a stopped broker."""
POLL_SECONDS = 0.05

_START_TOLERANCE_SECONDS = 5.0
_SHELL_SECONDS = 30.0


def recorded_process(state: BrokerState | None) -> psutil.Process | None:
    """The recorded process if it lives and is still the one that was recorded."""
    if state is None or state.pid is None or state.process_started is None:
        return None
    try:
        process = psutil.Process(state.pid)
        if abs(process.create_time() - state.process_started) > _START_TOLERANCE_SECONDS:
            return None
        if "kafka.Kafka" not in process.cmdline():
            return None
    except psutil.Error:
        # It is gone, a zombie, or another user's.
        return None
    return process


def detached(command: list[str], console: Path, directory: Path) -> int:
    """Run `command` in a session of its own, not as a child of this process; its process id.

    The shell in between ends at once, so a caller that lives on keeps no zombie.
    """
    script = 'console="$1"; shift; "$@" </dev/null >"$console" 2>&1 & echo $!'
    result = subprocess.run(
        ["/bin/sh", "-c", script, "dora-broker", str(console), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=directory,
        text=True,
        timeout=_SHELL_SECONDS,
        check=True,
        start_new_session=True,
    )
    return int(result.stdout)


@contextmanager
def ended_on_failure(process: psutil.Process) -> Iterator[None]:
    """A start that fails or is interrupted leaves no process behind."""
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if not succeeded and alive(process):
            process.terminate()
            if not await_end(process, 10.0):
                process.kill()


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def await_end(process: psutil.Process, seconds: float) -> bool:
    """Wait for its end; False if it still runs after `seconds`."""
    until = time.monotonic() + seconds
    while alive(process):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def port_answers(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0):
            return True
    except OSError:
        return False


def port_free(port: int | None) -> bool:
    """Whether a broker could listen there."""
    if port is None:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does, so that connections of an earlier broker that linger do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
    return True


def free_port(taken: set[int]) -> int:
    """A free port, none of `taken`; BrokerError if there is none."""
    random = SystemRandom()
    for _ in range(200):
        port = random.choice(PORTS)
        if port not in taken and port_free(port):
            return port
    raise BrokerError(
        f"found no free port on {HOST} between {PORTS.start} and {PORTS.stop - 1}",
        hint="Choose one with --port.",
    )
