"""Several processes that train together: rank 0 decides, the others do what it orders.

Rank 0 alone reads the log as a whole, builds batches, commits and reports for the trainer. Before
each collective operation it orders the others to join it, so that all of them are in the same one
or in none. They wait for an order however long, as long as rank 0 lives.

The orders go over TCP connections of their own, as JSON lines, and only to processes that know the
run's token. Each side sends a beat about every second: a closed connection is a rank that ended, a
silent one a rank that hangs, and the error names it whatever the others are doing. (torch's own
control group was tried instead: `monitored_barrier` over gloo finds a lost rank as soon, but often
names only a port, cannot tell a killed rank from a hanging one, and carries no reason.)
"""

import hashlib
import json
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dora.config import Config
from dora.errors import ConfigError, DoraError, RankError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Message = dict[str, Any]

GRACE_SECONDS = 10.0
_BLAME_SECONDS = 5.0
_TURN_SECONDS = 0.5
_HELLO_SECONDS = 10.0
_POLL_SECONDS = 0.2
_LONGEST_BEAT = 1.0
_BLOCK = 1 << 16
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end."""

    rank: int
    world: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} (pid {self.pid} on {self.host})"


class Link:
    """The connection to `peer`. `timeout` (seconds) bounds sending and the other side's silence."""

    peer: Peer

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.timeout = timeout
        self._received_at = time.monotonic()
        self.closed = False
        self.hung = False
        self.failure: Message | None = None
        self._connection = connection
        self._sending = threading.Lock()
        self._received: queue.Queue[Message] = queue.Queue()
        connection.settimeout(min(_POLL_SECONDS, timeout))
        threading.Thread(target=self._read, name="rank-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send; a connection that breaks or stays full for `timeout` counts as closed."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        until = time.monotonic() + self.timeout
        with self._sending:
            while data and not self.closed:
                try:
                    data = data[self._connection.send(data) :]
                except TimeoutError:
                    self.closed = self.closed or time.monotonic() > until
                except OSError:
                    self.closed = True

    def receive(self, timeout: float) -> Message | None:
        """The next message; None if none comes within `timeout` seconds."""
        try:
            return self._received.get(timeout=timeout)
        except queue.Empty:
            return None

    def _read(self) -> None:
        rest = b""
        while not self.closed:
            try:
                block = self._connection.recv(_BLOCK)
            except TimeoutError:
                continue
            except OSError:
                block = b""
            if not block:
                self.closed = True
                return
            self._received_at = time.monotonic()
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self.closed = True  # not from a rank
            return
        if message["kind"] == "failed":
            self.failure = message
        if message["kind"] != "beat":
            self._received.put(message)

    @property
    def silent_for(self) -> float:
        """Seconds since anything was received from the other side."""
        return time.monotonic() - self._received_at

    def trouble(self) -> RankError | None:
        """The error that keeps this rank from going on with the peer, if there is one."""
        if self.failure is not None:
            message, hint = self.failure["message"], self.failure.get("hint")
            error = RankError(f"{self.peer} failed: {message}", hint=hint)
            error.exit_code = int(self.failure["exit_code"])
            error.permanent = bool(self.failure["permanent"])
            return error
        hint = (
            "What was committed is safe: start the trainer again, it goes on where the ledger ends."
        )
        if self.silent_for > self.timeout and not self.closed:
            self.hung = True  # and stays so: a rank that is killed for it did not end by itself
        if self.hung:
            return RankError(
                f"{self.peer} has been silent for {self.silent_for:.0f} s "
                f"(trainer.rank_timeout_seconds = {self.timeout:g}): it hangs, or its machine is "
                "unreachable",
                hint=hint,
            )
        if self.closed:
            text = f"{self.peer} ended without a word: it was killed, or crashed"
            return RankError(text, hint=hint)
        return None

    def kill_if_hung(self) -> None:
        """Kill the peer if it hangs on this machine. As long as the connection is open, so is its
        pid."""
        here = self.peer.host == socket.gethostname() and self.peer.pid != os.getpid()
        if self.hung and not self.closed and here:
            with suppress(ProcessLookupError):  # it may end at this moment
                os.kill(self.peer.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection; the other side sees it at once."""
        self.closed = True
        with suppress(OSError):  # it may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def failure_of(error: BaseException) -> Message:
    """The message to the other ranks about an error that ends this one."""
    if not isinstance(error, DoraError):
        text = f"{type(error).__name__}: {error}"
        return {"kind": "failed", "message": text, "exit_code": 1, "permanent": False}
    return {
        "kind": "failed",
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "permanent": error.permanent,
    }


class Ranks:
    """The other ranks, as one of them sees them.

    A thread sends beats to them, and ends this process GRACE_SECONDS after one of them is lost.
    Usually the main thread notices by itself, reports it and ends in order; but a collective
    operation whose peer is gone may never return.
    """

    def __init__(
        self, config: Config, store: "torch.distributed.Store", rank: int, world: int
    ) -> None:
        self.rank, self.world = rank, world
        self.timeout = config.trainer.rank_timeout_seconds
        self.store = store
        self._links: list[Link] = []
        self._interval = min(_LONGEST_BEAT, self.timeout / 5)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def _watch(self) -> None:
        lost_at: float | None = None
        while not self._stopped.wait(self._interval):
            for link in self._links:
                link.send({"kind": "beat"})
            error = self._trouble()
            if error is None:
                continue
            for link in self._links:
                link.kill_if_hung()
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > GRACE_SECONDS:
                print(f"error: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(error.exit_code)

    def _trouble(self) -> RankError | None:
        """Trouble with any peer. One that reported why it failed comes before those that were lost
        with it."""
        found = [(link.failure is None, link.trouble()) for link in self._links]
        errors = [(late, error) for late, error in found if error is not None]
        return min(errors, key=lambda each: each[0])[1] if errors else None

    def check(self, seconds: float = 0.0) -> None:
        """RankError if another rank is lost, or turns out to be lost in the next `seconds`."""
        self._raise_trouble(seconds, None)

    def blame(self, error: BaseException) -> None:
        """Raise RankError if `error` comes from another rank's end."""
        self._raise_trouble(_BLAME_SECONDS, error)

    def _raise_trouble(self, seconds: float, cause: BaseException | None) -> None:
        until = time.monotonic() + seconds
        while (trouble := self._trouble()) is None and time.monotonic() < until:
            time.sleep(0.05)
        if trouble is not None:
            raise trouble from cause

    def send_failure(self, error: BaseException) -> None:
        """Send the error that ends this process to the others."""
        for link in self._links:
            link.send(failure_of(error))

    def close(self) -> None:
        """Leave the others."""
        self._stopped.set()
        self._watcher.join(self._interval + 1.0)  # a daemon: it holds nothing up
        for link in self._links:
            link.kill_if_hung()
        self._wait_for_end()
        for link in self._links:
            link.close()

    def _wait_for_end(self) -> None:
        """Wait until the others may be left."""


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(config: Config) -> "Leader | Member":
    """Meet the other ranks. The launcher sets who is which rank: RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. RankError, naming who is missing, after `trainer.rank_timeout_seconds`."""
    import torch

    lacking = [name for name in _ENVIRONMENT if name not in os.environ]
    if lacking:
        raise ConfigError(
            f"WORLD_SIZE is set, so this is one of several trainer ranks, but {lacking[0]} is not",
            hint="A launcher sets all of them. For one rank unset WORLD_SIZE.",
        )
    rank, world, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host, timeout = os.environ["MASTER_ADDR"], config.trainer.rank_timeout_seconds
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = torch.distributed.PrefixStore(
            f"dora/{restart}",
            torch.distributed.TCPStore(
                host,
                port,
                None,
                hosts,
                timedelta(seconds=timeout),
                wait_for_workers=False,
            ),
        )
        log.info("rank %d of %d, pid %d", rank, world, os.getpid())
        if rank == 0:
            return Leader(config, store, world, host)
        return Member(config, store, rank, world, host)
    except torch.distributed.DistError as error:
        raise RankError(
            f"rank {rank} of {world} did not reach rank 0 at {host}:{port} in "
            f"{timeout:g} s: {error}",
            hint="MASTER_ADDR and MASTER_PORT must name rank 0's machine and a free port there.",
        ) from error


def _digest(config: Config) -> str:
    """What must be equal on all ranks for them to compute the same."""
    text = config.model_dump_json(include={"policy", "task", "window", "rollout", "trainer"})
    return hashlib.sha256(text.encode()).hexdigest()


class Leader(Ranks):
    """Rank 0's side."""

    def __init__(
        self, config: Config, store: "torch.distributed.Store", world: int, host: str
    ) -> None:
        super().__init__(config, store, 0, world)
        self.complete = False
        """Whether the run is complete; sent to the others at the end."""
        address = "127.0.0.1" if host in _LOCAL else ""
        with socket.create_server((address, 0)) as server:
            token = secrets.token_hex(16)
            store.set("links", f"{server.getsockname()[1]} {token}")
            self._admit(server, token, _digest(config))
        self._watcher.start()

    def _admit(self, server: socket.socket, token: str, digest: str) -> None:
        until = time.monotonic() + self.timeout
        server.settimeout(_TURN_SECONDS)
        while len(self._links) < self.world - 1:
            if time.monotonic() > until:
                joined = {link.peer.rank for link in self._links}
                absent = ", ".join(str(rank) for rank in range(1, self.world) if rank not in joined)
                raise RankError(
                    f"rank {absent} of {self.world} did not join in {self.timeout:g} s",
                    hint="Its own output says why. trainer.rank_timeout_seconds is how long ranks "
                    "wait for one another.",
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            link = Link(connection, self.timeout)
            hello = link.receive(_HELLO_SECONDS)
            if hello is None or hello.get("token") != token:
                link.close()
                continue
            peer = Peer(int(hello["rank"]), self.world, str(hello["host"]), int(hello["pid"]))
            link.peer = peer
            self._links.append(link)
            if hello["digest"] != digest:
                error = RankError(
                    f"{peer} was started with another configuration than rank 0",
                    hint="Start every rank with the same file and the same --set.",
                )
                self.send_failure(error)
                raise error
            link.send({"kind": "welcome", "host": socket.gethostname(), "pid": os.getpid()})

    def order(self, kind: str, shards: Sequence[Any] | None = None, **content: Any) -> None:
        """Order all others what comes next, each with its own of `shards` (by rank) if given.
        RankError if one of them is lost."""
        self.check()
        for link in self._links:
            own = {} if shards is None else {"shard": shards[link.peer.rank]}
            link.send({"kind": kind, **content, **own})

    def close(self) -> None:
        """Let the others go; they end by themselves."""
        for link in self._links:
            link.send({"kind": "stop", "complete": self.complete})
        super().close()

    def _wait_for_end(self) -> None:
        until = time.monotonic() + GRACE_SECONDS
        # the store lives in this process: the others go first
        while time.monotonic() < until and not all(link.closed for link in self._links):
            time.sleep(0.02)


class Member(Ranks):
    """Another rank's side."""

    def __init__(
        self, config: Config, store: "torch.distributed.Store", rank: int, world: int, host: str
    ) -> None:
        super().__init__(config, store, rank, world)
        port, token = store.get("links").decode().split()
        try:
            connection = socket.create_connection((host, int(port)), self.timeout)
        except OSError as error:
            raise RankError(f"rank 0 does not answer at {host}:{port}: {error}") from error
        self._link = Link(connection, self.timeout)
        self._link.send(
            {
                "kind": "hello",
                "token": token,
                "rank": rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "digest": _digest(config),
            }
        )
        welcome = self._link.receive(self.timeout)
        if welcome is None or welcome["kind"] == "failed":
            failure = self._link.failure or {"message": "rank 0 did not welcome this rank"}
            raise RankError(str(failure["message"]))
        self._link.peer = Peer(0, world, str(welcome["host"]), int(welcome["pid"]))
        self._links.append(self._link)
        self._watcher.start()

    def next_order(self) -> Message:
        """Wait for rank 0's next order, as long as it lives. RankError if it is lost."""
        while True:
            order = self._link.receive(_TURN_SECONDS)
            if order is not None and order["kind"] != "failed":
                return order
            self.check()


@contextmanager
def joined(config: Config) -> Iterator["Leader | Member | None"]:
    """The other ranks, if a launcher started several. They are told how this one ended."""
    if not launched():
        yield None
        return
    ranks = join(config)
    try:
        yield ranks
    except Exception as error:
        ranks.send_failure(error)
        raise
    finally:
        ranks.close()


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Around a collective operation: if it fails because a rank was lost, the error names that
    rank."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for a lost peer
        if ranks is not None:
            ranks.blame(error)
        raise
