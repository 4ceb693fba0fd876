"""The processes of a chaos run: started, struck, thawed, and all gone at the end.

Invariant: every process that was started has a group of its own, is in one list here until its end
has been seen, and takes its group with it. `Processes.end` kills whatever is left.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dora.cli.main import SUPERVISOR
from dora.faults import VARIABLE
from tests.chaos.plan import Fault

_KILL_SECONDS = 20.0


@dataclass(slots=True, eq=False)
class Child:
    """One process. `post` is its place in the run, such as `trainer` or `w1`; `name` is a worker's
    id, and the post elsewhere."""

    post: str
    name: str
    log: Path
    started_at: float
    armed: Fault | None
    """The fault that it will make itself."""
    popen: "subprocess.Popen[bytes]" = field(repr=False)
    killed_by: Fault | None = None
    frozen_by: Fault | None = None
    frozen_at: float = 0.0
    thaw_at: float | None = None
    """When it is to go on, while it is frozen."""
    replaced: bool = False
    """Whether another process has its place now."""
    thawed_at: float | None = None
    asked_to_end: bool = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    @property
    def stopped(self) -> bool:
        """Whether it is suspended by a signal."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: int) -> None:
        """Signal the process and its children."""
        with suppress(ProcessLookupError):  # it is gone, and its end will be seen
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """Ask for an orderly end."""
        self.asked_to_end = True
        self.popen.send_signal(signal.SIGTERM)


class Processes:
    """Starts `dora` commands in `directory` and keeps account of them."""

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory = directory
        self._logs = logs
        self.children: list[Child] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self, post: str, name: str, arguments: Sequence[str], armed: Fault | None = None
    ) -> Child:
        """Start `dora ARGUMENTS`; its output is added to the log of the post."""
        environment = _environment()
        if armed is not None and armed.variable is not None:
            environment[VARIABLE] = armed.variable
        log = self._logs / f"{post}.log"
        with log.open("ab") as output:
            made = f"with {environment[VARIABLE]}" if VARIABLE in environment else ""
            output.write(f"=== {time.strftime('%H:%M:%S')} {name} starts {made}\n".encode())
            output.flush()
            popen = subprocess.Popen(
                [sys.executable, "-m", "dora", *arguments],
                cwd=self._directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        child = Child(post, name, log, time.monotonic(), armed, popen)
        self.children.append(child)
        return child

    def ended(self) -> list[tuple[Child, int]]:
        """Processes that have ended since the last call, with their exit codes."""
        over = []
        for child in list(self.children):
            code = child.popen.poll()
            if code is not None:
                child.signal(signal.SIGKILL)  # what it left behind in its group
                self.children.remove(child)
                over.append((child, code))
        return over

    def end(self) -> None:
        """Kill everything that is left."""
        for child in self.children:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGKILL)
        for child in self.children:
            child.popen.wait(_KILL_SECONDS)
        self.children.clear()

    def tails(self, lines: int = 25) -> str:
        """The end of every log."""
        parts = []
        for path in sorted(self._logs.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *text]))
        return "\n".join(parts)


def _environment() -> dict[str, str]:
    own: Mapping[str, str] = {
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # It ends with the harness, however that goes.
        SUPERVISOR: str(os.getpid()),
    }
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**inherited, **own}
