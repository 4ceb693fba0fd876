"""The local broker's directory: what lies in it, and whether it may be used.

Nothing is ever written into a directory that is not the broker's own, and no data that a broker has
served is removed. `broker.json` marks ownership: it is written before Kafka's own files, and
replaced atomically.

    broker.json         identity, and the last process (this module)
    broker.lock         held while a broker is being started or stopped
    server.properties   as filled in at the last start
    data/               Kafka's log directory
    logs/               what Kafka logs (kafka.log) and prints (console.log)
"""

import base64
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dora.errors import BrokerError

NODE_ID = "1"

_OWN_NAMES = frozenset({"broker.lock", "broker.json.new", "server.properties", "data", "logs"})
_MOVE_AWAY = "Move the directory away, or choose another with --dir."


@dataclass(frozen=True, slots=True)
class BrokerState:
    """Content of `broker.json`; `process_started` and `started_at` are seconds since the epoch."""

    cluster_id: str
    kafka_version: str
    formatted: bool = False
    port: int | None = None
    controller_port: int | None = None
    pid: int | None = None
    process_started: float | None = None
    started_at: float | None = None
    class_archive: str | None = None


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """Paths in a broker's directory; `root` is absolute."""

    root: Path

    @property
    def state_file(self) -> Path:
        """Identity, and the last process."""
        return self.root / "broker.json"

    @property
    def properties(self) -> Path:
        """Kafka's configuration."""
        return self.root / "server.properties"

    @property
    def data(self) -> Path:
        """Kafka's log directory."""
        return self.root / "data"

    @property
    def logs(self) -> Path:
        """Where Kafka's messages go."""
        return self.root / "logs"

    @property
    def kafka_log(self) -> Path:
        """What Kafka logs."""
        return self.logs / "kafka.log"

    @property
    def console_log(self) -> Path:
        """What the Java process prints: usually nothing."""
        return self.logs / "console.log"

    def read_state(self) -> BrokerState | None:
        """The state; None when no broker was ever started here. BrokerError if it is damaged."""
        try:
            text = self.state_file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise BrokerError(f"cannot read {self.state_file}: {error}", hint=_MOVE_AWAY) from error
        try:
            return _state(json.loads(text))
        except (ValueError, TypeError) as error:
            raise BrokerError(
                f"{self.state_file} is damaged: {error}",
                hint="Restore it from a backup. " + _MOVE_AWAY,
            ) from error

    def write_state(self, state: BrokerState) -> None:
        """Replace the state; it survives a crash of the machine."""
        new = self.root / "broker.json.new"
        with new.open("w", encoding="utf-8") as file:
            json.dump(asdict(state), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.state_file)

    def check_owned(self) -> None:
        """Refuse a directory that something else uses, before anything is written into it."""
        if "," in str(self.root):
            raise BrokerError(
                f"{self.root} has a comma in its path, and Kafka takes that for two directories",
                hint="Choose another directory with --dir.",
            )
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise BrokerError(f"{self.root} is not a directory", hint=_MOVE_AWAY)
        if self.state_file.exists():
            return
        foreign = sorted({path.name for path in self.root.iterdir()} - _OWN_NAMES)
        if foreign:
            raise BrokerError(
                f"{self.root} is not a broker's directory: it holds {_some(foreign)}, and no"
                " broker.json",
                hint=_MOVE_AWAY,
            )

    def check_unclaimed(self) -> None:
        """Under the lock, without a `broker.json`: nothing of an earlier broker may lie here."""
        names = sorted({path.name for path in self.root.iterdir()} - {"broker.lock"})
        if names and not (names == ["broker.json.new"]):
            raise BrokerError(
                f"{self.root} holds {_some(names)}, and no broker.json that says whose it is",
                hint="Restore broker.json from a backup. " + _MOVE_AWAY,
            )

    def check_data(self, state: BrokerState) -> None:
        """Refuse Kafka data that is damaged, or another cluster's than `broker.json` names."""
        meta = self.data / "meta.properties"
        restore = f"Restore {self.data} from a backup. {_MOVE_AWAY}"
        try:
            found = _properties(meta.read_text(encoding="latin-1"))
        except FileNotFoundError as error:
            what = "its data is gone" if not self.data.exists() else f"{meta} is missing"
            raise BrokerError(
                f"{self.root} is corrupt: a broker ran here, and {what}", hint=restore
            ) from error
        except OSError as error:
            raise BrokerError(f"cannot read {meta}: {error.strerror or error}") from error
        missing = [name for name in ("version", "cluster.id", "node.id") if name not in found]
        if missing:
            raise BrokerError(
                f"{self.root} is corrupt: {meta} has no {' and no '.join(missing)}", hint=restore
            )
        if found["cluster.id"] != state.cluster_id:
            raise BrokerError(
                f"{self.data} belongs to the cluster {found['cluster.id']}, but {self.state_file}"
                f" says {state.cluster_id}: it was copied from elsewhere",
                hint=restore,
            )
        if found["node.id"] != NODE_ID:
            raise BrokerError(
                f"{self.data} belongs to the node {found['node.id']} of a cluster, not to a local"
                f" broker (node {NODE_ID})",
                hint=restore,
            )

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the directory for a start or a stop; it must exist. BrokerError after `seconds`."""
        lock = FileLock(self.root / "broker.lock")
        try:
            lock.acquire(timeout=seconds)
        except Timeout as error:
            raise BrokerError(
                f"another command has been starting or stopping the broker in {self.root} for over"
                f" {seconds:.0f} s",
                hint="Wait for it to end, or end it, and try again.",
            ) from error
        except OSError as error:
            raise BrokerError(
                f"cannot lock {self.root / 'broker.lock'}: {error.strerror or error}",
                hint="The broker needs a directory that it can write to: choose one with --dir.",
            ) from error
        try:
            yield
        finally:
            lock.release()


def new_cluster_id() -> str:
    """A random id in Kafka's form: 16 bytes, URL-safe base64 without padding."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        # Kafka avoids ids that look like an option of a command.
        if not text.startswith("-"):
            return text


def escaped_property(text: str) -> str:
    """A value for a Java properties file (Latin-1 with escapes; UTF-16 units beyond ASCII)."""
    units = text.replace("\\", "\\\\").encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes)


def _state(content: Any) -> BrokerState:
    if not isinstance(content, dict):
        raise TypeError("not an object")
    known = {field.name for field in fields(BrokerState)}
    state = BrokerState(**{name: value for name, value in content.items() if name in known})
    if not (isinstance(state.cluster_id, str) and isinstance(state.kafka_version, str)):
        raise TypeError("cluster_id and kafka_version must be strings")
    numbers = (state.port, state.controller_port, state.pid)
    if not all(number is None or type(number) is int for number in numbers):
        raise TypeError("port, controller_port and pid must be integers")
    times = (state.process_started, state.started_at)
    if not all(time is None or isinstance(time, int | float) for time in times):
        raise TypeError("process_started and started_at must be numbers")
    return state


def _properties(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith(("#", "!"))]
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
