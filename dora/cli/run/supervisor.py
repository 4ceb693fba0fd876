"""Child processes of `dora run`: started, watched, restarted, stopped.

When the supervisor is gone, its children are too. Each child has its own process group,
so that a Ctrl-C reaches them only through the supervisor, in order, and what a crashed child leaves
behind is cleaned up with it. A child watches its supervisor (`dora.cli.parent_watch`).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from dora.cli.parent_watch import SUPERVISOR
from dora.errors import DoraError, ExitCode

_BACKOFF_SECONDS = 1.0
_BACKOFF_LIMIT = 30.0
# A child that ran this long before it died starts again without the delays of former deaths.
_STEADY_SECONDS = 60.0
_TAIL_LINES = 12
_KILLED_SECONDS = 10.0

ChildState = Literal["running", "restarting", "done", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to run: `arguments` is the whole command line. With `cores` it and all that it
    starts are kept to these processors."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ChildView:
    """A child at one moment; `note` says what happened to it last."""

    name: str
    state: ChildState
    pid: int | None
    restarts: int
    note: str


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    log: Path
    state: ChildState = "running"
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    resume_at: float = 0.0
    restarts: int = 0
    deaths: int = 0
    note: str = ""


class SupervisionError(DoraError):
    """A child ended for good although its work is not done."""


class Supervisor:
    """Runs children until they are done.

    `on_event` gets a line for people whenever a child's state changes. A child that exits with 0 is
    done if `finished(name)` agrees: one ended by hand exits with 0 too. One that is
    misconfigured (2), cannot go on (3) or fenced (4) ends the run; any other is started again after
    a delay, up to `max_restarts` times for all children together. One whose transaction expired
    because it was held up (by a debugger, a suspended machine) looks fenced too:
    `replaced(name, pid)` tells whether another process took its place.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        log_directory: Path,
        *,
        max_restarts: int,
        on_event: Callable[[str], None],
        finished: Callable[[str], bool] = lambda name: True,
        replaced: Callable[[str, int], bool] = lambda name, pid: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        log_directory.mkdir(parents=True, exist_ok=True)
        self._children = [_Child(spec, log_directory / f"{spec.name}.log") for spec in specs]
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._finished = finished
        self._replaced = replaced
        self._clock = clock
        self._restarts = 0

    def start(self) -> None:
        """Start all children."""
        for child in self._children:
            self._launch(child)

    def poll(self) -> None:
        """Notice ends and carry out restarts that are due.

        SupervisionError, with the end of the child's log, when a child cannot be started again.
        """
        now = self._clock()
        for child in self._children:
            if child.state == "restarting" and now >= child.resume_at:
                self._launch(child)
            elif child.state == "running" and child.process is not None:
                code = child.process.poll()
                if code is not None:
                    self._ended(child, code, now)

    def end_hung(self, name: str, reason: str) -> None:
        """Kill a child that runs and does nothing; `poll` then starts it again."""
        for child in self._children:
            if child.spec.name == name and child.state == "running":
                self._on_event(f"{name} is killed: {reason}")
                _signal(child, signal.SIGKILL)

    def running_seconds(self, name: str) -> float:
        """How long the child has been running; 0 if it is not."""
        return max(
            (
                self._clock() - child.started
                for child in self._children
                if child.spec.name == name and child.state == "running"
            ),
            default=0.0,
        )

    def done(self, name: str) -> bool:
        """Whether the child has finished its work."""
        return any(c.spec.name == name and c.state == "done" for c in self._children)

    def views(self) -> tuple[ChildView, ...]:
        """The children now."""
        return tuple(
            ChildView(
                child.spec.name,
                child.state,
                child.process.pid if child.process and child.state == "running" else None,
                child.restarts,
                child.note,
            )
            for child in self._children
        )

    def log_path(self, name: str) -> Path:
        """Where the child's output goes."""
        return next(child.log for child in self._children if child.spec.name == name)

    def stop(self, grace: float) -> None:
        """Ask all children to end and wait; those that do not within `grace` seconds are killed."""
        running = [child for child in self._children if child.state == "running" and child.process]
        for child in self._children:
            if child.state == "restarting":
                child.state = "stopped"
        for child in running:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + grace
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._on_event(f"{child.spec.name} did not stop within {grace:g} s: killed")
                _signal(child, signal.SIGKILL)
                self._await_end(child)
            child.state = "done" if child.process.returncode == 0 else "stopped"
            _signal(child, signal.SIGKILL)

    def _await_end(self, child: _Child) -> None:
        """A killed process ends at once, unless the kernel itself does not let it: then it is named
        and left."""
        assert child.process is not None
        try:
            child.process.wait(_KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            self._on_event(
                f"{child.spec.name}, pid {child.process.pid}, was killed and has not ended in "
                f"{_KILLED_SECONDS:g} s: it hangs in the kernel, on a disk or a device"
            )

    def _launch(self, child: _Child) -> None:
        environment = {**os.environ, **child.spec.environment, SUPERVISOR: str(os.getpid())}
        log: IO[bytes]
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                child.spec.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        if child.spec.cores:
            # It has barely begun: whatever it starts inherits this. One that has ended needs none.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(child.process.pid, child.spec.cores)
        child.state, child.started, child.note = "running", self._clock(), ""
        again = f" again (restart {child.restarts})" if child.restarts else ""
        self._on_event(f"{child.spec.name} started{again}, pid {child.process.pid}")

    def _ended(self, child: _Child, code: int, now: float) -> None:
        name = child.spec.name
        # What it started (verifier processes, engine cores) must not go on without it.
        _signal(child, signal.SIGKILL)
        if code == 0 and self._finished(name):
            child.state, child.note = "done", ""
            self._on_event(f"{name} is done")
            return
        child.note = _exit_text(code)
        assert child.process is not None
        expired = code == ExitCode.FENCED and not self._replaced(name, child.process.pid)
        if expired:
            child.note = "an expired transaction"
        hopeless = code in (ExitCode.USAGE, ExitCode.PERMANENT, ExitCode.FENCED) and not expired
        if hopeless or self._restarts >= self._max_restarts:
            child.state = "failed"
            if code == ExitCode.FENCED and not expired:
                what = f"{name} was fenced: another {name} took over this run"
            elif code == ExitCode.USAGE:
                what = f"{name} cannot run with this configuration"
            elif code == ExitCode.PERMANENT:
                what = f"{name} cannot run as things are, and starting it again would not help"
            else:
                what = (
                    f"{name} ended with {child.note}, "
                    f"and the {self._max_restarts} restarts of run.max_restarts are used up"
                )
            tail = "\n".join(f"    {line}" for line in _tail(child.log))
            raise SupervisionError(f"{what}; the end of {child.log}:\n{tail}")
        if now - child.started >= _STEADY_SECONDS:
            child.deaths = 0
        delay = min(_BACKOFF_SECONDS * 2**child.deaths, _BACKOFF_LIMIT)
        child.deaths += 1
        child.restarts += 1
        self._restarts += 1
        child.state, child.resume_at = "restarting", now + delay
        self._on_event(
            f"{name} ended with {child.note}; starts again in {delay:.0f} s ({child.log})"
        )


def _signal(child: _Child, number: signal.Signals) -> None:
    """Signal the child's whole group; what has ended already needs none."""
    assert child.process is not None
    if number == signal.SIGTERM:
        # The child itself ends its own children in order.
        child.process.send_signal(number)
        return
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


def _exit_text(code: int) -> str:
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16_384))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
