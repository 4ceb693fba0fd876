"""Topics as a program reads them that knows nothing of dora."""

from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

DEADLINE = 60.0


def raw_messages(bootstrap_servers: str, *topics: str) -> Iterator[Message]:
    """All committed messages of the topics, to the ends of their partitions."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    try:
        found = consumer.list_topics(timeout=DEADLINE).topics
        places = [TopicPartition(t, number, 0) for t in topics for number in found[t].partitions]
        consumer.assign(places)
        left = len(places)
        while left:
            message = consumer.poll(DEADLINE)
            assert message is not None, f"{left} partitions did not end"
            error = message.error()
            if error is None:
                yield message
                continue
            assert error.code() == KafkaError._PARTITION_EOF, error
            left -= 1
    finally:
        consumer.close()
