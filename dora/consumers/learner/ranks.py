"""Several processes that train together: rank 0 decides, the others do what it says.

Invariant: rank 0 alone reads the log as a whole, plans, commits and speaks for the trainer. Before
each collective operation it tells the others which one, so that all of them are in the same one or
in none; meanwhile they wait for its word, however long, as long as it lives.
"""

import hashlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from dora.config import Config
from dora.consumers.learner.rank_links import (
    Link,
    Message,
    Peer,
    Watch,
    end_silent,
    failure_of,
    first_trouble,
    missing,
)
from dora.errors import ConfigError, RankError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
_BLAME_SECONDS = 5.0
_TURN_SECONDS = 0.5
_HELLO_SECONDS = 10.0
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("127.0.0.1", "localhost", "::1")


class Ranks(Protocol):
    """What the learner needs to know of the others."""

    rank: int
    world: int
    timeout: float
    store: "torch.distributed.Store"

    def blame(self, error: BaseException) -> None:
        """Raise RankError if `error` comes from another rank's end."""


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(config: Config) -> "Leader | Member":
    """Meet the other ranks. The launcher says who is who: RANK, WORLD_SIZE, MASTER_ADDR and
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


def _end(error: RankError) -> None:
    """End this process from a thread, while its main thread is stuck."""
    print(f"error: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(error.exit_code)


class Leader:
    """Rank 0's side."""

    def __init__(
        self, config: Config, store: "torch.distributed.Store", world: int, host: str
    ) -> None:
        self.rank, self.world = 0, world
        self.timeout = config.trainer.rank_timeout_seconds
        self.store = store
        self.complete = False
        """Whether the run is complete: what the others are told when they are let go."""
        self._links: dict[Peer, Link] = {}
        address = "127.0.0.1" if host in _LOCAL else ""
        with socket.create_server((address, 0)) as server:
            token = secrets.token_hex(16)
            store.set("links", f"{server.getsockname()[1]} {token}")
            self._admit(server, token, _digest(config))
        self._watch = Watch(self._links, self.timeout, GRACE_SECONDS, _end)

    def _admit(self, server: socket.socket, token: str, digest: str) -> None:
        until = time.monotonic() + self.timeout
        server.settimeout(_TURN_SECONDS)
        joined: dict[int, Peer] = {}
        while len(joined) < self.world - 1:
            if time.monotonic() > until:
                absent = missing(range(1, self.world), joined)
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
            self._links[peer] = link
            joined[peer.rank] = peer
            if hello["digest"] != digest:
                raise self.failed(
                    RankError(
                        f"{peer} was started with another configuration than rank 0",
                        hint="Start every rank with the same file and the same --set.",
                    )
                )
            link.send({"kind": "welcome", "host": socket.gethostname(), "pid": os.getpid()})

    def order(self, kind: str, **content: Any) -> None:
        """Tell all others what comes next. RankError if one of them is lost."""
        self.check()
        for link in self._links.values():
            link.send({"kind": kind, **content})

    def order_each(self, kind: str, shared: Message, shares: Sequence[Any]) -> None:
        """The same, with a share for each rank (rank 0's is not sent)."""
        self.check()
        for peer, link in self._links.items():
            link.send({"kind": kind, **shared, "share": shares[peer.rank]})

    def check(self, seconds: float = 0.0) -> None:
        """RankError if another rank is lost, or turns out to be so in the next `seconds`."""
        error = _trouble_within(self._links, seconds)
        if error is not None:
            raise error

    def blame(self, error: BaseException) -> None:
        """Raise RankError if `error` comes from another rank's end."""
        _blame(self._links, error)

    def failed(self, error: BaseException) -> Any:
        """Tell the others about the error that ends this process; returns it."""
        for link in self._links.values():
            link.send(failure_of(error))
        return error

    def close(self) -> None:
        """Let the others go; they end by themselves."""
        for link in self._links.values():
            link.send({"kind": "stop", "complete": self.complete})
        self._watch.stop()
        for peer, link in self._links.items():
            end_silent(peer, link)
        until = time.monotonic() + GRACE_SECONDS
        # the store lives in this process: the others go first
        while time.monotonic() < until and not all(link.closed for link in self._links.values()):
            time.sleep(0.02)
        for link in self._links.values():
            link.close()


class Member:
    """Another rank's side."""

    def __init__(
        self, config: Config, store: "torch.distributed.Store", rank: int, world: int, host: str
    ) -> None:
        self.rank, self.world = rank, world
        self.timeout = config.trainer.rank_timeout_seconds
        self.store = store
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
        leader = Peer(0, world, str(welcome["host"]), int(welcome["pid"]))
        self._links = {leader: self._link}
        self._watch = Watch(self._links, self.timeout, GRACE_SECONDS, _end)

    def next_order(self) -> Message:
        """Wait for rank 0's word, as long as it lives. RankError if it is lost."""
        while True:
            order = self._link.receive(_TURN_SECONDS)
            if order is not None and order["kind"] != "failed":
                return order
            error = first_trouble(self._links)
            if error is not None:
                raise error

    def blame(self, error: BaseException) -> None:
        """Raise RankError if `error` comes from another rank's end."""
        _blame(self._links, error)

    def failed(self, error: BaseException) -> None:
        """Tell rank 0 about the error that ends this process."""
        self._link.send(failure_of(error))

    def close(self) -> None:
        """Leave."""
        self._watch.stop()
        for peer, link in self._links.items():
            end_silent(peer, link)
        self._link.close()


def _blame(links: dict[Peer, Link], error: BaseException) -> None:
    trouble = _trouble_within(links, _BLAME_SECONDS)
    if trouble is not None:
        raise trouble from error


def _trouble_within(links: dict[Peer, Link], seconds: float) -> RankError | None:
    until = time.monotonic() + seconds
    while (trouble := first_trouble(links)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return trouble


@contextmanager
def joined(config: Config) -> Iterator["Leader | Member | None"]:
    """The other ranks, if a launcher started several; they learn how this one ended."""
    if not launched():
        yield None
        return
    ranks = join(config)
    try:
        yield ranks
    except Exception as error:
        ranks.failed(error)
        raise
    finally:
        ranks.close()


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Around a collective operation: names the rank that it failed because of."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for a lost peer
        if ranks is not None:
            ranks.blame(error)
        raise
