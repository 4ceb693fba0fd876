"""Kafka messages as the CloudEvents SDK reads them."""

from typing import Any

from cloudevents.core.base import BaseCloudEvent, EventFactory
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.base import Format

from dora.schemas.codec import decode, encode
from dora.schemas.records import Record


class AvroFormat(Format):
    """dora's values as the data of events; structured mode is not used."""

    def read(self, event_factory: EventFactory | None, data: str | bytes) -> BaseCloudEvent:
        raise AssertionError("dora writes no events in structured mode")

    def write(self, event: BaseCloudEvent) -> bytes:
        raise AssertionError("dora writes no events in structured mode")

    def write_data(self, data: Any, datacontenttype: str | None) -> bytes:
        return encode(data)

    def read_data(self, body: bytes, datacontenttype: str | None) -> Any:
        """The record, if the headers say what it is."""
        assert datacontenttype == "avro/binary"
        return decode(body)

    def get_content_type(self) -> str:
        return "avro/binary"


def event_of(
    headers: list[tuple[str, bytes]], key: bytes | None, value: bytes
) -> tuple[dict[str, Any], Record]:
    """Attributes and data of the event that a message is (CloudEvents' own validation included)."""
    names = [name for name, _ in headers]
    assert len(set(names)) == len(names), "a header twice"
    event = from_kafka(KafkaMessage(dict(headers), key, value), AvroFormat())
    record: Any = event.get_data()
    return event.get_attributes(), record
