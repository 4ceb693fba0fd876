"""Parts of a played run (`tests.played_trainer`) as processes of their own, to freeze and kill."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import psutil

from dora.bus import cluster_settings
from dora.config import Config
from tests.played_trainer import DEADLINE, Cluster, coordinate, work

Part = Callable[[SimpleNamespace], Callable[[threading.Event], None]]


def _worker(place: SimpleNamespace) -> Callable[[threading.Event], None]:
    return work(place, place.name)  # type: ignore[arg-type]


def _coordinator(place: SimpleNamespace) -> Callable[[threading.Event], None]:
    return coordinate(place)  # type: ignore[arg-type]


def _run(part: Part, config: str, tmp: Path, name: str) -> None:
    made = Config.model_validate_json(config)
    settings = cluster_settings(made.kafka)
    part(SimpleNamespace(config=made, settings=settings, tmp=tmp, name=name))(threading.Event())


@contextmanager
def _process(cluster: Cluster, part: Part, name: str) -> Iterator[BaseProcess]:
    config = cluster.config.model_dump_json()
    made = multiprocessing.get_context("spawn").Process(
        target=_run, args=(part, config, cluster.tmp, name), name=name, daemon=True
    )
    made.start()
    try:
        yield made
    finally:
        made.kill()
        made.join(DEADLINE)


def worker_process(cluster: Cluster, name: str):
    """An emulated worker; killed at the end."""
    return _process(cluster, _worker, name)


def coordinator_process(cluster: Cluster):
    """A coordinator; killed at the end."""
    return _process(cluster, _coordinator, "coordinator")


def freeze(process: BaseProcess) -> None:
    """Stop it, and return once it stands still."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def thaw(process: BaseProcess) -> None:
    """Let it go on."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
