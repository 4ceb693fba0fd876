"""One start of the local broker: ports, configuration, data directory, process, first answer.

The process is recorded before it is awaited, and a start that fails or is interrupted leaves no
process behind. The data directory is checked before Kafka sees it.
"""

import re
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import psutil

from dora.broker.directory import BrokerDirectory, BrokerState, escaped_property, new_cluster_id
from dora.broker.jars import Java, class_archive, class_path, kafka_version, ops_directory
from dora.broker.process import (
    HOST,
    POLL_SECONDS,
    alive,
    detached,
    ended_on_failure,
    free_port,
    port_answers,
    port_free,
)
from dora.bus.admin import ClusterProbe
from dora.errors import BrokerError

FORMAT_SECONDS = 60.0

_PORT_SECONDS = 5.0
_PORT_ATTEMPTS = 3
_SERIAL = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xlog:cds=error")
"""One collector thread and the quick compiler only: half the start-up time, and the processors are
for the engines."""
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:,.]+ +(\w+)")


class PortInUse(BrokerError):
    """Another program listens on a port that the broker was to have."""

    def __init__(self, port: int | None) -> None:
        super().__init__(
            f"port {port} on {HOST} is in use by another program",
            hint="Choose another with --port, or leave --port out to get a free one.",
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One start: what it needs, and until when (on the monotonic clock) it has to answer."""

    place: BrokerDirectory
    java: Java
    jars: Path
    heap_mb: int
    until: float

    def run(self, state: BrokerState | None, port: int | None) -> BrokerState:
        """Start it under the directory's lock; the state with its process, once it answers."""
        if state is None:
            self.place.check_unclaimed()
            state = BrokerState(new_cluster_id(), kafka_version(self.jars))
        elif state.formatted:
            self.place.check_data(state)
        attempt = 0
        while True:
            attempt += 1
            state = self._with_ports(state, port)
            self.place.write_state(state)
            self._write_properties(state)
            if not state.formatted:
                state = self._format(state)
            try:
                return self._spawn(state)
            except PortInUse:
                # Another program took the port between the check and Kafka's start.
                asked_for = port is not None and not port_free(port)
                if asked_for or attempt == _PORT_ATTEMPTS:
                    raise

    def _with_ports(self, state: BrokerState, port: int | None) -> BrokerState:
        if port is not None:
            if not port_free(port):
                raise PortInUse(port)
            broker_port = port
        elif state.port is not None and _comes_free(state.port):
            broker_port = state.port
        else:
            broker_port = free_port(set())
        controller_port = state.controller_port
        if controller_port in (None, broker_port) or not port_free(controller_port):
            controller_port = free_port({broker_port})
        return replace(
            state,
            port=broker_port,
            controller_port=controller_port,
            kafka_version=kafka_version(self.jars),
            pid=None,
            process_started=None,
        )

    def _write_properties(self, state: BrokerState) -> None:
        template = Template((ops_directory() / "server.properties").read_text(encoding="utf-8"))
        text = template.substitute(
            broker_port=state.port,
            controller_port=state.controller_port,
            data_directory=escaped_property(str(self.place.data)),
        )
        self.place.logs.mkdir(exist_ok=True)
        self.place.properties.write_text(text, encoding="ascii")

    def _format(self, state: BrokerState) -> BrokerState:
        """Prepare the data directory (KIP-853: a quorum of one, which knows itself)."""
        # Not formatted to the end means that no broker has served anything from it.
        if self.place.data.exists():
            shutil.rmtree(self.place.data)
        command = [
            *self._java(None),
            "kafka.tools.StorageTool",
            "format",
            "--standalone",
            f"--cluster-id={state.cluster_id}",
            f"--config={self.place.properties}",
        ]
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=FORMAT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BrokerError(
                f"Kafka did not format {self.place.data} within {FORMAT_SECONDS:.0f} s",
                hint="Is the disk slow, or the machine overloaded? Try again.",
            ) from error
        if result.returncode != 0:
            text = "\n".join(result.stdout.strip().splitlines()[-15:])
            raise BrokerError(f"Kafka could not format {self.place.data}:\n{text}")
        formatted = replace(state, formatted=True)
        self.place.check_data(formatted)
        self.place.write_state(formatted)
        return formatted

    def _spawn(self, state: BrokerState) -> BrokerState:
        archive = class_archive(self.jars, self.java)
        part = None
        if archive is not None and not archive.exists():
            part = archive.with_name(f"{archive.stem}.{state.cluster_id}.part")
            part.unlink(missing_ok=True)
        log = self.place.kafka_log
        log_start = log.stat().st_size if log.exists() else 0
        command = [*self._java(part), "kafka.Kafka", str(self.place.properties)]
        pid = detached(command, self.place.console_log, self.place.root)
        try:
            process = psutil.Process(pid)
            started = process.create_time()
        except psutil.NoSuchProcess as error:
            raise _failed(self.place, state, log_start) from error
        state = replace(
            state,
            pid=pid,
            process_started=started,
            started_at=time.time(),
            class_archive=None if part is None else str(part),
        )
        with ended_on_failure(process):
            self.place.write_state(state)
            remaining = self.until - time.monotonic()
            await_answer(self.place, state, process, log_start, remaining)
        return state

    def _java(self, part: Path | None) -> list[str]:
        """Java with its flags; `part` is a class archive to write at the end of the process."""
        archive = class_archive(self.jars, self.java)
        shared = []
        if part is not None:
            shared = [f"-XX:ArchiveClassesAtExit={part}", "-Xlog:cds+dynamic=error"]
        elif archive is not None and archive.exists():
            shared = ["-Xshare:auto", f"-XX:SharedArchiveFile={archive}"]
        return [
            self.java.path,
            f"-Xmx{self.heap_mb}m",
            *_SERIAL,
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
            *shared,
            f"-Dkafka.logs.dir={self.place.logs}",
            f"-Dlog4j2.configurationFile={(ops_directory() / 'log4j2.properties').as_uri()}",
            "-cp",
            class_path(self.jars),
        ]


def await_answer(
    place: BrokerDirectory,
    state: BrokerState,
    process: psutil.Process,
    log_start: int,
    seconds: float,
) -> None:
    """Wait until the broker answers a client with the cluster id that it should have."""
    assert state.port is not None
    until = time.monotonic() + seconds
    probe: ClusterProbe | None = None
    while time.monotonic() < until:
        if not alive(process):
            raise _failed(place, state, log_start)
        if probe is None and port_answers(state.port):
            # Only now: a client that meets a closed port waits longer and longer before it retries.
            probe = ClusterProbe(f"{HOST}:{state.port}")
        left = max(0.1, min(2.0, until - time.monotonic()))
        if probe is not None and probe.cluster_id(left) == state.cluster_id:
            return
        time.sleep(POLL_SECONDS)
    raise BrokerError(
        f"the broker in {place.root} did not answer within {seconds:.0f} s:\n"
        + "\n".join(_error_lines(place, log_start)),
        hint=f"The whole log is in {place.logs}. After a crash a long log takes long to recover:"
        " give it more time with --deadline.",
    )


def _failed(place: BrokerDirectory, state: BrokerState, log_start: int) -> BrokerError:
    lines = _error_lines(place, log_start)
    if any("Address already in use" in line for line in lines):
        return PortInUse(state.port)
    return BrokerError(
        f"the broker in {place.root} ended while it started:\n" + "\n".join(lines),
        hint=f"The whole log is in {place.logs}.",
    )


def _error_lines(place: BrokerDirectory, log_start: int) -> list[str]:
    """The lines since `log_start` that say what went wrong, else the last ones."""
    lines = log_lines(place.kafka_log, log_start)
    errors: list[str] = []
    following = 0
    for line in lines:
        match = _LOG_LINE.match(line)
        if match:
            following = 4 if match.group(1) in ("ERROR", "FATAL") else 0
        if following > 0:
            errors.append(line)
            following -= 1
    return (errors[:12] or lines[-12:]) + log_lines(place.console_log)[-12:]


def log_lines(path: Path, start: int = 0) -> list[str]:
    """Lines of a log from byte `start` on; all, if it was rolled over since."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start if start <= path.stat().st_size else 0)
        return file.read().decode("utf-8", errors="replace").splitlines()


def _comes_free(port: int) -> bool:
    """Whether a port can be had: a broker that was killed holds its own for a moment longer."""
    until = time.monotonic() + _PORT_SECONDS
    while not port_free(port):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True
