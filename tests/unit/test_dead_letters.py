"""What could not be used becomes a record that the topic takes."""

from dora.bus.dead_letters import dead_letter
from dora.bus.messages import Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.schemas.codec import decode, encode
from dora.schemas.records import DeadLetter, Record
from tests.run_records import admission, trajectory

SETTINGS = ClusterSettings("nowhere:9", max_message_bytes=2**20)


def letter(value: Record | Unreadable, reason: str = "why", key: str | None = "k") -> DeadLetter:
    message = Message("r.trajectories", 1, 7, key, 0, {}, value)
    return dead_letter(message, reason, run="r", process="export", settings=SETTINGS)


def test_a_dead_letter_says_what_it_is_and_where_it_lay() -> None:
    found = letter(Unreadable("bad_magic", "starts with 00", b"\0no record"))
    assert (found.code, found.reason, found.payload) == ("bad_magic", "why", b"\0no record")
    assert (found.topic, found.partition, found.offset) == ("r.trajectories", 1, 7)
    assert (found.trajectory_id, found.process) == ("k", "export")


def test_of_a_record_that_belongs_elsewhere_the_bytes_are_kept() -> None:
    record = trajectory(admission(0, 1))
    found = letter(record, key=None)
    assert found.code == "foreign" and decode(found.payload) == record


def test_it_fits_whatever_others_wrote() -> None:
    largest = b"x" * SETTINGS.max_message_bytes
    found = letter(Unreadable("bad_magic", "", largest), reason="y" * 2**20, key="z" * 2**20)
    assert len(encode(found)) < SETTINGS.max_message_bytes
    assert largest.startswith(found.payload) and len(found.payload) > 2**19
    assert found.reason.endswith(f"(the first {len(found.payload)} of 1048576 bytes are kept)")
