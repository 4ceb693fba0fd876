"""Children of `dora run`: restarted when they die, never left behind."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dora.cli.run.log_while_waiting import log_while_waiting
from dora.cli.run.supervisor import ChildSpec, SupervisionError, Supervisor
from tests.waiting import until

DEADLINE = 30.0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Case:
    """A supervisor over Python programs; its clock jumps, so that no restart delay is waited."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[str] = []
        self.finished: Callable[[str], bool] = lambda name: True
        self.replaced: Callable[[str, int], bool] = lambda name, pid: True

    def start(self, *programs: str, max_restarts: int = 5) -> Supervisor:
        specs = [
            ChildSpec(f"p{i}", (sys.executable, "-S", "-c", textwrap.dedent(program)))
            for i, program in enumerate(programs)
        ]
        ticks = itertools.count(step=100)
        supervisor = Supervisor(
            specs,
            self.directory / "logs",
            max_restarts=max_restarts,
            on_event=self.events.append,
            finished=lambda name: self.finished(name),
            replaced=lambda name, pid: self.replaced(name, pid),
            clock=lambda: float(next(ticks)),
        )
        supervisor.start()
        return supervisor


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def poll_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    def step() -> bool:
        supervisor.poll()
        return condition()

    until(step, "the supervisor", DEADLINE)


def failure(supervisor: Supervisor) -> str:
    with pytest.raises(SupervisionError) as caught:
        poll_until(supervisor, lambda: False)
    return str(caught.value)


def test_a_child_that_dies_is_started_again_until_it_is_done(case: Case) -> None:
    counter = case.directory / "count"
    supervisor = case.start(
        f"""
        import os
        path = {str(counter)!r}
        with open(path, "a") as file: file.write("x")
        size = os.path.getsize(path)
        if size == 1: os.kill(os.getpid(), 9)
        raise SystemExit(1 if size == 2 else 0)
        """
    )
    poll_until(supervisor, lambda: supervisor.done("p0"))
    assert counter.read_text() == "xxx"
    assert supervisor.views()[0].restarts == 2
    told = "\n".join(case.events)
    assert "signal SIGKILL" in told and "exit code 1" in told and "p0 is done" in told


def test_when_the_restarts_are_used_up_the_log_is_shown(case: Case) -> None:
    supervisor = case.start("print('the reason'); raise SystemExit(1)", max_restarts=2)
    message = failure(supervisor)
    assert "2 restarts of run.max_restarts are used up" in message
    assert "the reason" in message
    assert supervisor.log_path("p0").read_text().count("the reason") == 3


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (2, "cannot run with this configuration"),
        (3, "starting it again would not help"),
        (4, "was fenced"),
    ],
)
def test_a_child_that_would_only_fail_again_is_not_started_again(
    case: Case, code: int, expected: str
) -> None:
    supervisor = case.start(f"print('why'); raise SystemExit({code})")
    message = failure(supervisor)
    assert expected in message and "why" in message
    assert supervisor.views()[0].restarts == 0


def test_a_child_that_lost_its_role_to_nobody_is_started_again(case: Case) -> None:
    """Its transaction expired while it was stopped: Kafka tells that like a replacement."""
    marker = case.directory / "marker"
    asked: list[tuple[str, int]] = []

    def replaced(name: str, pid: int) -> bool:
        asked.append((name, pid))
        return False

    case.replaced = replaced
    supervisor = case.start(
        f"""
        import pathlib
        marker = pathlib.Path({str(marker)!r})
        code = 0 if marker.exists() else 4
        marker.touch()
        raise SystemExit(code)
        """
    )
    (before,) = supervisor.views()
    poll_until(supervisor, lambda: supervisor.done("p0"))
    assert asked == [("p0", before.pid)]
    assert supervisor.views()[0].restarts == 1
    assert any("ended with an expired transaction; starts again" in each for each in case.events)


def test_a_frozen_child_is_killed_and_started_again(case: Case) -> None:
    marker = case.directory / "marker"
    supervisor = case.start(
        f"""
        import os, pathlib, signal
        marker = pathlib.Path({str(marker)!r})
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    (view,) = supervisor.views()
    assert view.pid is not None
    frozen = psutil.Process(view.pid)
    until(lambda: frozen.status() == psutil.STATUS_STOPPED, "the child to freeze", DEADLINE)
    supervisor.poll()
    assert supervisor.views()[0].state == "running", "a stopped process has not ended"
    supervisor.end_hung("p0", "it has been silent for 9 s")
    poll_until(supervisor, lambda: supervisor.done("p0"))
    assert "p0 is killed: it has been silent for 9 s" in case.events
    assert supervisor.views()[0].restarts == 1


def test_a_child_that_ends_before_the_run_is_complete_is_started_again(case: Case) -> None:
    answers = iter([False, True])
    case.finished = lambda name: next(answers)
    supervisor = case.start("")
    poll_until(supervisor, lambda: supervisor.done("p0"))
    assert supervisor.views()[0].restarts == 1


def test_stop_ends_willing_children_and_kills_stubborn_ones(case: Case) -> None:
    ready = [case.directory / "a", case.directory / "b"]
    program = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, {handler})
        pathlib.Path({path!r}).touch()
        while True: time.sleep(60)
        """
    supervisor = case.start(
        program.format(handler="lambda *_: os._exit(0)", path=str(ready[0])),
        program.format(handler="signal.SIG_IGN", path=str(ready[1])),
    )
    pids = [view.pid for view in supervisor.views()]
    until(lambda: all(path.exists() for path in ready), "the children", DEADLINE)
    supervisor.stop(grace=0.5)
    assert not any(pid is not None and alive(pid) for pid in pids)
    assert [view.state for view in supervisor.views()] == ["done", "stopped"]
    assert "p1 did not stop within 0.5 s: killed" in case.events


def test_what_a_crashed_child_had_started_is_cleaned_up(case: Case) -> None:
    note = case.directory / "grandchild"
    supervisor = case.start(
        f"""
        import os, pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(note)!r}).write_text(str(child.pid))
        os.kill(os.getpid(), 9)
        """,
        max_restarts=0,
    )
    failure(supervisor)
    until(lambda: not alive(int(note.read_text())), "the grandchild to end", DEADLINE)


def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    note = tmp_path / "child"
    child = f"""
        import os, pathlib, time
        from dora.cli.parent_watch import follow_supervisor
        follow_supervisor()
        pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
        while True: time.sleep(60)
        """
    program = f"""
        import pathlib, sys, textwrap, time
        from dora.cli.run.supervisor import ChildSpec, Supervisor
        spec = ChildSpec("p", (sys.executable, "-c", textwrap.dedent({child!r})))
        supervisor = Supervisor(
            [spec], pathlib.Path({str(tmp_path)!r}), max_restarts=0, on_event=print
        )
        supervisor.start()
        while True:
            supervisor.poll()
            time.sleep(0.05)
        """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        until(lambda: note.exists() and bool(note.read_text()), "the child to start", DEADLINE)
        pid = int(note.read_text())
        assert alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        until(lambda: not alive(pid), "the child to end", DEADLINE)
    finally:
        parent.kill()
        parent.wait()


def test_a_wait_for_somebody_elses_code_is_told_of_now_and_then() -> None:
    said: list[str] = []
    with log_while_waiting(said.append, "policy.prepare", every=0.05):
        until(lambda: len(said) >= 2, "two lines", DEADLINE)
    assert re.fullmatch(r"waiting for policy.prepare for \d+ s; Ctrl-C ends it", said[0])
