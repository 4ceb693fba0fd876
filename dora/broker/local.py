"""The local broker: one Apache Kafka node on this machine, for users without a cluster.

At most one broker runs per directory, and every command finds it again: starts and stops hold the
directory's lock, and a process is the broker only if it has the recorded id and start time and runs
Kafka. A stop is a controlled shutdown: Kafka flushes everything before it ends.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dora.broker.directory import BrokerDirectory, BrokerState
from dora.broker.jars import fetch_jars, find_java, java_command
from dora.broker.launch import Launch, await_answer, log_lines
from dora.broker.process import HOST, await_end, port_answers, recorded_process
from dora.errors import BrokerError, UsageError

__all__ = [
    "BrokerInfo",
    "broker_log",
    "broker_process",
    "fetch_jars",
    "java_command",
    "running_broker",
    "start_broker",
    "stop_broker",
]

MINIMUM_HEAP_MB = 128
CLASS_ARCHIVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A running local broker; `started_at` is in seconds since the epoch."""

    bootstrap_servers: str
    pid: int
    directory: Path
    cluster_id: str
    kafka_version: str
    started_at: float


def start_broker(
    directory: Path,
    *,
    port: int | None = None,
    heap_mb: int = 512,
    deadline_seconds: float = 60.0,
) -> BrokerInfo:
    """Start the broker of `directory`, or find the one that runs; it answers when this returns.

    Without `port` the broker takes the port of its last start if that is free, else any free one.
    The broker outlives this process. Raises BrokerError with what to do when it cannot run: no
    Java, no Maven, port in use, a foreign or corrupt directory, or a start that fails.
    """
    if heap_mb < MINIMUM_HEAP_MB:
        raise UsageError(f"a heap of {heap_mb} MB is too small: at least {MINIMUM_HEAP_MB} MB")
    place = BrokerDirectory(directory.absolute())
    place.check_owned()
    running = running_broker(place.root)
    if running is not None:
        return _same_port(running, port)
    java, jars = find_java(), fetch_jars()
    try:
        place.root.mkdir(parents=True, exist_ok=True)
        with place.locked(deadline_seconds):
            state = place.read_state()
            process = recorded_process(state)
            if state is None or process is None:
                launch = Launch(place, java, jars, heap_mb, time.monotonic() + deadline_seconds)
                return _info(place, launch.run(state, port))
            await_answer(place, state, process, 0, deadline_seconds)
            return _same_port(_info(place, state), port)
    except OSError as error:
        raise BrokerError(
            f"cannot start a broker in {place.root}: {error}",
            hint="The broker needs a directory that it can write to: choose one with --dir.",
        ) from error


def stop_broker(directory: Path, *, force: bool = False, deadline_seconds: float = 30.0) -> bool:
    """Stop the broker of `directory` in a controlled way; False if none runs.

    Raises BrokerError if it has not ended by the deadline; with `force` it is killed then, and the
    next start has to recover the log.
    """
    place = BrokerDirectory(directory.absolute())
    if recorded_process(place.read_state()) is None:
        return False
    with place.locked(deadline_seconds):
        state = place.read_state()
        process = recorded_process(state)
        if state is None or process is None:
            return False
        process.terminate()
        if state.class_archive is not None:
            # Kafka ends first; then, once per user, Java writes the class archive.
            deadline_seconds += CLASS_ARCHIVE_SECONDS
        if await_end(process, deadline_seconds):
            _adopt_class_archive(state)
            return True
        if not force:
            raise BrokerError(
                f"the broker in {place.root} (process {process.pid}) did not stop within"
                f" {deadline_seconds:.0f} s",
                hint="It may still be writing: wait and stop it again. `dora broker stop --force`"
                " kills it; the next start then has to recover the log.",
            )
        process.kill()
        if not await_end(process, deadline_seconds):
            raise BrokerError(
                f"the broker in {place.root} (process {process.pid}) survives being killed",
                hint="The system holds it, usually for a disk that does not answer.",
            )
        return True


def running_broker(directory: Path) -> BrokerInfo | None:
    """The broker of `directory` if its process lives and its port answers.

    Raises BrokerError if the directory's `broker.json` is damaged.
    """
    place = BrokerDirectory(directory.absolute())
    state = place.read_state()
    if state is None or state.port is None or recorded_process(state) is None:
        return None
    return _info(place, state) if port_answers(state.port) else None


def broker_process(directory: Path) -> int | None:
    """Process id of the broker of `directory`, whether its port answers (yet) or not."""
    process = recorded_process(BrokerDirectory(directory.absolute()).read_state())
    return None if process is None else process.pid


def broker_log(directory: Path, lines: int = 50) -> list[str]:
    """Last `lines` lines of what the broker logged, then of what its process printed, if it did.

    Raises BrokerError if no broker ever logged in `directory`.
    """
    place = BrokerDirectory(directory.absolute())
    if not place.kafka_log.exists() and not place.console_log.exists():
        raise BrokerError(
            f"there is no broker's log in {place.root}",
            hint="Start a broker with `dora broker start`, or name its directory with --dir.",
        )
    return (log_lines(place.kafka_log) + log_lines(place.console_log))[-lines:] if lines > 0 else []


def _info(place: BrokerDirectory, state: BrokerState) -> BrokerInfo:
    assert state.pid is not None
    assert state.started_at is not None
    return BrokerInfo(
        bootstrap_servers=f"{HOST}:{state.port}",
        pid=state.pid,
        directory=place.root,
        cluster_id=state.cluster_id,
        kafka_version=state.kafka_version,
        started_at=state.started_at,
    )


def _same_port(running: BrokerInfo, port: int | None) -> BrokerInfo:
    if port is not None and running.bootstrap_servers != f"{HOST}:{port}":
        raise BrokerError(
            f"the broker in {running.directory} runs already, at {running.bootstrap_servers}, not"
            f" at port {port}",
            hint="Stop it first with `dora broker stop`, or use the address that it has.",
        )
    return running


def _adopt_class_archive(state: BrokerState) -> None:
    """The process ended in order, so the class archive that it was to write is whole."""
    if state.class_archive is not None and os.path.exists(state.class_archive):
        part = Path(state.class_archive)
        part.replace(part.with_name(part.name.split(".")[0] + ".jsa"))
