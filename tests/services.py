"""Programs with an HTTP API that tests start and end."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora.broker.jars import java_command
from dora.errors import BrokerError

START_SECONDS = 240.0
STOP_SECONDS = 60.0

Service = subprocess.Popen[bytes]


def started(command: Sequence[str | os.PathLike[str]], log: Path, **options: Any) -> Service:
    """The program as a process; what it says goes to the end of `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options
        )


def java(what: str) -> tuple[str, ...]:
    """Java that starts quickly; fails the test, saying that `what` needs it, without it."""
    try:
        return java_command(), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"
    except BrokerError as error:
        pytest.fail(f"{what} needs Java: {error}", pytrace=False)


def await_answer(url: str, service: Service, log: Path) -> None:
    """Until `url` answers with 200; AssertionError with the end of `log` if it does not."""
    until = time.monotonic() + START_SECONDS
    while True:
        assert service.poll() is None and time.monotonic() < until, log.read_text()[-5000:]
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.1)


def ended(service: Service) -> None:
    """Ask it to end (SIGTERM), then insist."""
    service.terminate()
    try:
        service.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
