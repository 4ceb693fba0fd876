"""The connections between the ranks of a trainer, apart from the collective operations.

Invariant: whoever dies, freezes or gives up is noticed and named, whatever the others are doing:
each side speaks every second or so, a closed connection is a rank that ended, a silent one a rank
that hangs. Nothing but JSON lines goes over a connection, and only to who knows the run's token.
"""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dora.errors import DoraError, RankError

Message = dict[str, Any]

_POLL_SECONDS = 0.2
_LONGEST_BEAT = 1.0
_BLOCK = 1 << 16


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
    """One connection. `timeout` (seconds) bounds sending and the other side's silence."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.timeout = timeout
        self.heard_at = time.monotonic()
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
            self.heard_at = time.monotonic()
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self.closed = True  # not one of ours
            return
        if message["kind"] == "failed":
            self.failure = message
        if message["kind"] != "beat":
            self._received.put(message)

    @property
    def silent_for(self) -> float:
        """Seconds since the other side was heard last."""
        return time.monotonic() - self.heard_at

    def close(self) -> None:
        """Close the connection; the other side sees it at once."""
        self.closed = True
        with suppress(OSError):  # it may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def failure_of(error: BaseException) -> Message:
    """What the other ranks are told about an error that ends this one."""
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


def trouble(peer: Peer, link: Link) -> RankError | None:
    """Why this rank cannot go on with that one, if it cannot."""
    if link.failure is not None:
        error = RankError(
            f"{peer} failed: {link.failure['message']}", hint=link.failure.get("hint")
        )
        error.exit_code = int(link.failure["exit_code"])
        error.permanent = bool(link.failure["permanent"])
        return error
    hint = "What was committed is safe: start the trainer again, it goes on where the ledger ends."
    if link.silent_for > link.timeout and not link.closed:
        link.hung = True  # and stays so: whoever is killed for it did not end by itself
    if link.hung:
        return RankError(
            f"{peer} has been silent for {link.silent_for:.0f} s (trainer.rank_timeout_seconds = "
            f"{link.timeout:g}): it hangs, or its machine is unreachable",
            hint=hint,
        )
    if link.closed:
        return RankError(f"{peer} ended without a word: it was killed, or crashed", hint=hint)
    return None


def end_silent(peer: Peer, link: Link) -> None:
    """Kill a rank of this machine that hangs. As long as its connection is open, so is its pid."""
    if (
        link.hung
        and not link.closed
        and peer.host == socket.gethostname()
        and peer.pid != os.getpid()
    ):
        with suppress(ProcessLookupError):  # it may end this very moment
            os.kill(peer.pid, signal.SIGKILL)


class Watch:
    """Speaks to all peers, and ends this process `grace` seconds after one of them is lost.

    Usually the main thread notices by itself, says so and ends in order. A collective operation
    whose peer is gone may never return, though: `end` (with the error) must not either.
    """

    def __init__(
        self,
        links: Mapping[Peer, Link],
        timeout: float,
        grace: float,
        end: Callable[[RankError], None],
    ) -> None:
        self._links = links
        self._grace = grace
        self._end = end
        self._interval = min(_LONGEST_BEAT, timeout / 5)
        self._stopped = threading.Event()
        self._lost_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more watching."""
        self._stopped.set()
        self._thread.join(self._interval + 1.0)  # a daemon: it holds nothing up

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            for link in self._links.values():
                link.send({"kind": "beat"})
            error = first_trouble(self._links)
            if error is None:
                continue
            for peer, link in self._links.items():
                end_silent(peer, link)
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            if now - self._lost_at > self._grace:
                self._end(error)


def first_trouble(links: Mapping[Peer, Link]) -> RankError | None:
    """Trouble with any peer; one that says why it failed before those that fell with it."""
    errors = [(link, trouble(peer, link)) for peer, link in links.items()]
    found = [(link.failure is None, error) for link, error in errors if error is not None]
    return min(found, key=lambda each: each[0])[1] if found else None


def missing(expected: Sequence[int], joined: Mapping[int, Any]) -> str:
    """The ranks that have not joined, for people."""
    return ", ".join(str(rank) for rank in expected if rank not in joined)
