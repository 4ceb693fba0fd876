"""What could not be used becomes a record that the topic takes."""

from typing import Any

from dora.bus.reader import Message, Unreadable
from dora.log.dead_letters import dead_letter
from dora.schemas.codec import encode
from dora.schemas.records import DeadLetter

LARGEST = 2**20


def letter(reason: str = "why", **facts: Any) -> DeadLetter:
    limits = {"now_ms": 5, "max_message_bytes": LARGEST}
    return dead_letter("bad_magic", reason, run="r", process="export", **limits, **facts)


def test_a_dead_letter_says_what_it_is_and_where_it_lay() -> None:
    value = Unreadable("bad_magic", "starts with 00", b"\0no record")
    message = Message("r.trajectories", 1, 7, "k", 0, {}, value)
    found = letter(message=message, trajectory_id="k", payload=value.payload)
    assert (found.code, found.reason, found.payload) == ("bad_magic", "why", b"\0no record")
    assert (found.topic, found.partition, found.offset) == ("r.trajectories", 1, 7)
    assert (found.trajectory_id, found.process, found.created_ms) == ("k", "export", 5)


def test_what_lies_nowhere_in_the_log_is_told_by_its_name() -> None:
    found = letter(trajectory_id="g1/0")
    assert (found.topic, found.partition, found.offset) == ("", -1, -1)
    assert found.trajectory_id == "g1/0"


def test_it_fits_whatever_others_wrote() -> None:
    largest = b"x" * LARGEST
    found = letter(reason="y" * 2**20, trajectory_id="z" * 2**20, payload=largest)
    assert len(encode(found)) < LARGEST
    assert largest.startswith(found.payload) and len(found.payload) > 2**19
    assert found.reason.endswith(f"(the first {len(found.payload)} of 1048576 bytes are kept)")
