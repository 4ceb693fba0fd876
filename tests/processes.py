"""Parts of a run as processes of their own, for tests that freeze, kill and compare them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dora.bus import BEGINNING, ClusterSettings, LogReader
from dora.schemas.records import Status
from tests import waiting
from tests.small_run import SmallRun

DEADLINE = 60.0


class Process:
    """`dora ...` as a process of its own; what it says goes to a file."""

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] = {}) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dora", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll()

    @property
    def stopped(self) -> bool:
        """Whether a SIGSTOP has taken effect."""
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
        return state == "T"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: self.stopped, "the process to freeze", self)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def process(
    small: SmallRun, name: str, command: str, *options: str, env: Mapping[str, str] = {}
) -> Iterator[Process]:
    log = small.directory / f"{name}.log"
    child = Process(log, command, str(small.path), "-b", small.address, *options, env=env)
    try:
        yield child
    finally:
        child.end()


def until(condition: Callable[[], object], what: str, *children: Process) -> None:
    """Wait for it; should it not come, what the children said is told."""

    def story() -> str:
        return "\n".join([what, *(f"== {child.log.name}\n{child.said}" for child in children)])

    waiting.until(condition, story, DEADLINE)


def statuses(settings: ClusterSettings, topic: str) -> list[Status]:
    with LogReader(settings, client_id="test") as reader:
        reader.assign({(topic, 0): BEGINNING})
        found = [message.value for message in reader.read_to_end(DEADLINE)]
    return [value for value in found if isinstance(value, Status)]
