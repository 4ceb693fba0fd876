"""A rank that dies, freezes or fails is noticed by the others and named, whatever they do."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dora.broker.process import free_port
from dora.config import Config
from dora.consumers.learner import ranks
from dora.consumers.learner.ranks import Leader, Member, join
from dora.errors import ConfigError, RankError

TIMEOUT = 6.0

OTHER = """
import os, sys, time
import torch  # seconds of work, which are not to count against the timeout
from dora.config import Config
from dora.consumers.learner import ranks
from dora.errors import DoraError, PolicyError

ranks.GRACE_SECONDS = 0.5
config = Config.model_validate_json(sys.stdin.readline())
print("ready", flush=True)
sys.stdin.readline()
try:
    with ranks.joined(config) as joined:
        print("joined", flush=True)
        while os.environ["RANK"] == "0":
            joined.check()
            time.sleep(0.05)
        while (kind := joined.next_order()["kind"]) != "stop":
            if kind == "fail":
                raise PolicyError("the gradient is nan")
            if kind == "block":
                print("blocked", flush=True)
                time.sleep(1000.0)
except DoraError as error:
    print(f"error: {error.message}", flush=True)
    sys.exit(error.exit_code)
"""


def config(**trainer: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "ranks"},
            "policy": {"model": "m"},
            "task": {"kind": "reasoning-gym", "name": "x"},
            "trainer": {"steps": 1, "rank_timeout_seconds": TIMEOUT, **trainer},
        }
    )


@dataclass
class Other:
    """The other rank, in a process of its own."""

    process: "subprocess.Popen[str]"

    def says(self, text: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert text in line, line + self.process.stdout.read()

    def join(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    both = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(set())),
    }
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    return both


def start(rank: int, environment: dict[str, str], settings: Config) -> Other:
    import os

    process = subprocess.Popen(
        [sys.executable, "-c", OTHER],
        env={**os.environ, **environment, "RANK": str(rank)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(settings.model_dump_json() + "\n")
    process.stdin.flush()
    other = Other(process)
    other.says("ready")
    other.join()
    return other


@pytest.fixture
def leader(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Leader, Other]]:
    """This process is rank 0."""
    other = start(1, environment, config())
    monkeypatch.setenv("RANK", "0")
    leader = join(config())
    assert isinstance(leader, Leader)
    try:
        other.says("joined")
        yield leader, other
    finally:
        other.process.kill()
        leader.close()


@pytest.fixture
def member(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Member, Other]]:
    """This process is rank 1."""
    other = start(0, environment, config())
    monkeypatch.setenv("RANK", "1")
    member = join(config())
    assert isinstance(member, Member)
    try:
        other.says("joined")
        yield member, other
    finally:
        other.process.kill()
        member.close()


def until_lost(leader: Leader, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        leader.check()
        time.sleep(0.02)


def test_a_frozen_rank_is_named_after_the_timeout_and_ended(leader: tuple[Leader, Other]) -> None:
    ranks, other = leader
    until_lost(ranks, 1.5 * TIMEOUT)  # nothing is wrong as long as it lives
    other.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 of 2 .* has been silent for 6 s"):
        until_lost(ranks, 3 * TIMEOUT)
    assert other.process.wait(TIMEOUT) == -signal.SIGKILL


def test_a_killed_rank_is_named_at_once(leader: tuple[Leader, Other]) -> None:
    ranks, other = leader
    other.process.kill()
    with pytest.raises(RankError, match=r"rank 1 of 2 .* ended without a word"):
        until_lost(ranks, TIMEOUT / 2)
    with pytest.raises(RankError, match="ended without a word"):
        ranks.order("update")


def test_a_rank_that_fails_says_why_and_all_end_as_it_does(leader: tuple[Leader, Other]) -> None:
    ranks, other = leader
    ranks.order("fail")
    with pytest.raises(RankError, match=r"rank 1 of 2 .*failed: the gradient is nan") as caught:
        ranks.blame(RuntimeError("Connection closed by peer"))
    assert caught.value.permanent and caught.value.exit_code == 1
    other.says("error: the gradient is nan")


def test_a_frozen_rank_0_ends_the_others(member: tuple[Member, Other]) -> None:
    ranks, other = member
    other.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 0 of 2 .* has been silent for 6 s"):
        ranks.next_order()
    assert other.process.wait(TIMEOUT) == -signal.SIGKILL


def test_a_rank_stuck_in_a_collective_operation_ends_when_another_is_lost(
    leader: tuple[Leader, Other],
) -> None:
    ranks, other = leader
    ranks.order("block")
    other.says("blocked")
    ranks.send_failure(ConfigError("the file is gone"))
    assert other.process.wait(3 * TIMEOUT) == 2, "with the exit code of what went wrong"


def test_ranks_of_different_configurations_refuse_each_other(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start(1, environment, config(updates_per_step=2))
    monkeypatch.setenv("RANK", "0")
    try:
        with pytest.raises(RankError, match=r"rank 1 of 2 .* another configuration than rank 0"):
            join(config())
        other.says("another configuration")
    finally:
        other.process.kill()


def test_a_rank_that_does_not_come_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RankError, match=r"rank 1 of 2 did not join in 6 s"):
        join(config())
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not"):
        join(config())
    assert ranks.launched()
