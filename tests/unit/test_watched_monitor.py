"""Whether a part that was fenced has a rival, or only stood still for too long."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dora.bus.reader import Message
from dora.cli.run.watched_monitor import WatchedMonitor
from dora.consumers.monitor.run_view import RunView
from dora.errors import BusError
from tests.factories import run_started, status

NOW = 100_000


class Heard:
    """A monitor that has heard the trainer."""

    def __init__(self, **fields: Any) -> None:
        self._view = RunView("r", heartbeat_timeout=30)
        at = fields.pop("at", NOW - 1_000)
        for record in (run_started(), status("trainer", "training", at=at, **fields)):
            self._view.handle(Message("r.x", 0, 0, None, 0, {}, record))

    def catch_up(self, deadline: float) -> None:
        """Nothing more is there."""

    def snapshot(self) -> Any:
        return self._view.snapshot(NOW)


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def replaced(monitor: Any, pid: int) -> bool:
    display: Any = SimpleNamespace(note=lambda text: None)
    return WatchedMonitor(monitor).replaced("trainer", pid, display)


def test_the_fenced_ones_own_last_word_is_no_rivals(gone: int) -> None:
    assert not replaced(Heard(host=os.uname().nodename, pid=gone), gone)


def test_a_rank_that_ended_with_its_launcher_is_no_rival(gone: int) -> None:
    assert not replaced(Heard(host=os.uname().nodename, pid=gone), os.getpid())


def test_another_process_that_lives_is_one_here_and_elsewhere(gone: int) -> None:
    assert replaced(Heard(host=os.uname().nodename, pid=os.getpid()), gone)
    assert replaced(Heard(host="elsewhere", pid=4711), gone)


def test_one_that_has_been_silent_for_long_is_none(gone: int) -> None:
    assert not replaced(Heard(host="elsewhere", pid=4711, at=NOW - 31_000), gone)


def test_without_the_cluster_nobody_is_known(gone: int) -> None:
    class Lost(Heard):
        def catch_up(self, deadline: float) -> None:
            raise BusError("Kafka did not answer")

    assert not replaced(Lost(host="elsewhere", pid=4711), gone)
