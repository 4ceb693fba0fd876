"""What lies in a run's topics, as other tools see it: CloudEvents, and the AsyncAPI document."""

from pathlib import Path

import yaml

from dora.schemas.codec import decode
from dora.schemas.framing import UndecodableRecord
from dora.schemas.registry import RECORD_NAMES
from tests.cloud_events import event_of
from tests.raw_log import raw_messages
from tests.written_run import WrittenRun

CHANNELS = yaml.safe_load((Path(__file__).parents[2] / "docs" / "asyncapi.yaml").read_text())[
    "channels"
]


def test_every_record_is_a_cloud_event_of_a_kind_that_its_topic_is_documented_to_carry(
    written: WrittenRun,
) -> None:
    seen: dict[str, set[str]] = {}
    events: set[tuple[str, str]] = set()
    for message in raw_messages(written.settings.bootstrap_servers, *written.topics.all):
        topic, value = str(message.topic()), message.value()
        assert value is not None
        try:
            expected = decode(value)
        except UndecodableRecord:
            continue  # foreign: not dora's to describe
        attributes, record = event_of(list(message.headers() or ()), message.key(), value)
        assert record == expected
        name = RECORD_NAMES[type(record)]
        assert attributes["type"] == f"dora.{name}.v1"
        assert attributes["source"].startswith(f"/dora/{record.run}/")
        events.add((attributes["source"], attributes["id"]))
        suffix = topic.rpartition(".")[2]
        assert name in CHANNELS[suffix]["messages"], f"a {name} in {topic}"
        seen.setdefault(suffix, set()).add(name)
    assert len(events) > 50
    assert seen["dispatch"] == {"admission", "command"}
    assert seen["steps"] == {"run_started", "step"}
    assert {"chunks", "trajectories", "policies"} <= seen.keys()
