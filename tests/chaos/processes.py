"""The processes of a chaos run: started, struck, thawed, and all gone at the end.

Invariant: every process that was started has a group of its own, is in one list here until its end
has been seen, and takes its group with it. Whatever is left is killed by `Processes.end`, or by the
nursery when the harness itself is gone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dora.cli.parent_watch import SUPERVISOR
from dora.errors import DoraError
from dora.faults import VARIABLE
from tests.chaos.plan import Fault

_IMPORT_SECONDS = 300.0
_START_SECONDS = 60.0
_KILL_SECONDS = 30.0
_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(slots=True, eq=False)
class Child:
    """One process. `post` is its place in the run, such as `trainer` or `w1`; `name` is a worker's
    id, and the post elsewhere. Times are seconds of the monotonic clock."""

    post: str
    name: str
    pid: int
    armed: Fault | None
    """The fault that it will make itself."""
    killed_by: Fault | None = None
    frozen_by: Fault | None = None
    frozen_at: float = 0.0
    thaw_at: float | None = None
    """When it is to go on, while it is frozen."""
    thawed_at: float | None = None
    replaced: bool = False
    """Whether another process has its place now."""
    asked_to_end: bool = False

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

    def kill(self) -> None:
        """Kill the process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Ask for an orderly end."""
        self.asked_to_end = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class Processes:
    """Starts `dora` commands in `directory`, through a nursery that has imported `modules`;
    `broker` is the directory of the run's broker."""

    def __init__(self, directory: Path, logs: Path, modules: Sequence[str], broker: Path) -> None:
        self._logs = logs
        self.children: list[Child] = []
        self._number = 0
        logs.mkdir(parents=True, exist_ok=True)
        paths = [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
        with (logs / "nursery.log").open("ab") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery", str(broker), *modules],
                cwd=directory,
                env={**_environment(), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        assert self._nursery.stdout is not None
        os.set_blocking(self._nursery.stdout.fileno(), False)
        self._buffer = b""
        self._answers: list[dict[str, Any]] = []

    def await_nursery(self) -> None:
        """Wait until it has imported everything."""
        self._await(lambda answer: not answer, _IMPORT_SECONDS)

    def start(
        self, post: str, name: str, arguments: Sequence[str], armed: Fault | None = None
    ) -> Child:
        """Start `dora ARGUMENTS`; its output is added to the log of the post."""
        # It ends with the nursery, and the nursery with the harness, however that goes.
        environment = {SUPERVISOR: str(self._nursery.pid)}
        if armed is not None and armed.variable is not None:
            environment[VARIABLE] = armed.variable
        log = self._logs / f"{post}.log"
        with log.open("a") as output:
            made = f" with {environment[VARIABLE]}" if VARIABLE in environment else ""
            output.write(f"=== {time.strftime('%H:%M:%S')} {name} starts{made}\n")
        number = self._number = self._number + 1
        order = {
            "number": number,
            "arguments": list(arguments),
            "environment": environment,
            "log": str(log),
        }
        assert self._nursery.stdin is not None
        try:
            self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
            self._nursery.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        answer = self._await(lambda answer: answer.get("number") == number, _START_SECONDS)
        child = Child(post, name, answer["pid"], armed)
        self.children.append(child)
        return child

    def ended(self) -> list[tuple[Child, int]]:
        """Processes that have ended since the last call, with their exit codes."""
        self._read()
        ends = {answer["pid"]: answer["code"] for answer in self._answers if "code" in answer}
        self._answers = [answer for answer in self._answers if "code" not in answer]
        over = [(child, ends[child.pid]) for child in self.children if child.pid in ends]
        for child, _ in over:
            child.signal(signal.SIGKILL)  # what it left behind in its group
            self.children.remove(child)
        return over

    def end(self) -> None:
        """Kill everything that is left, the nursery last."""
        for child in self.children:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGKILL)
        self.children.clear()
        if self._nursery.stdin is not None:
            with suppress(BrokenPipeError, ValueError):  # gone, or closed before
                self._nursery.stdin.write(b"{}\n")
                self._nursery.stdin.close()
        try:
            self._nursery.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait(_KILL_SECONDS)

    def tails(self, lines: int = 25) -> str:
        """The end of every log."""
        parts = []
        for path in sorted(self._logs.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *text]))
        return "\n".join(parts)

    def _await(self, wanted: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            self._read()
            for answer in self._answers:
                if wanted(answer):
                    self._answers.remove(answer)
                    return answer
            if self._nursery.poll() is not None:
                raise self._gone()
            if time.monotonic() > deadline:
                raise DoraError(f"the process that starts the others did not answer in {seconds} s")
            time.sleep(0.005)

    def _read(self) -> None:
        assert self._nursery.stdout is not None
        data = self._nursery.stdout.read(65_536)  # None while there is nothing
        if data:
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self._answers += [json.loads(line) for line in lines]

    def _gone(self) -> DoraError:
        told = (self._logs / "nursery.log").read_text(errors="replace")[-2000:]
        return DoraError(f"the process that starts the others is gone:\n{told}")


def _environment() -> dict[str, str]:
    own = {
        "PYTHONHASHSEED": "0",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # No threads before a fork, and little work for each process.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**inherited, **own}
