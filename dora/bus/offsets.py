"""Where partitions begin and end, as asked of their leaders (never from librdkafka's cache).

Elections and brokers that are away are retried until the deadline; a topic that does not exist is
an error at once.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from dora.bus.access import Operation, Right
from dora.bus.failures import (
    Failures,
    explain,
    is_forbidden,
    is_transient,
    is_unknown_topic,
    kafka_error,
    missing_rights,
)
from dora.bus.settings import ClusterSettings
from dora.errors import TopicError

Partition = tuple[str, int]
"""Topic and partition number."""

_PAUSE_SECONDS = 0.05


def ask_offsets(
    consumer: Consumer,
    settings: ClusterSettings,
    failures: Failures,
    partitions: Sequence[Partition],
    symbol: int,
    operation: Operation = "Describe",
) -> dict[Partition, int]:
    """Offsets of `partitions`, of which there is at least one, asked for in one go.

    A `symbol` of -1 or -2 asks for the end or the beginning (ListOffsets, KIP-79), under the
    consumer's isolation level. `operation` is what the caller is about to do, for the message when
    it may not. TopicError if a topic does not exist; BusError if the cluster refuses or does not
    answer within `request_timeout`.
    """
    asked = [KafkaPartition(topic, number, symbol) for topic, number in partitions]
    deadline = time.monotonic() + settings.request_timeout
    doing = f"asking for offsets of {asked[0].topic}"
    while True:
        try:
            found = consumer.offsets_for_times(
                asked, timeout=max(0.1, min(10.0, deadline - time.monotonic()))
            )
            failed = next((place for place in found if place.error is not None), None)
            error, topic = (None, "") if failed is None else (failed.error, failed.topic)
        except KafkaException as exception:
            error, topic = kafka_error(exception), asked[0].topic
        if error is None:
            return {(place.topic, place.partition): place.offset for place in found}
        if is_unknown_topic(error):
            _raise_if_missing(consumer, settings, asked, error, operation)
        elif not is_transient(error):
            raise explain(error, settings, doing, failures, needs=Right("Topic", topic, operation))
        if time.monotonic() >= deadline:
            raise explain(error, settings, doing, failures)
        _learn_leaders(consumer, {place.topic for place in asked})
        time.sleep(_PAUSE_SECONDS)


def _learn_leaders(consumer: Consumer, topics: set[str]) -> None:
    """librdkafka asks the leaders that it knows, and does not ask anew who leads when they refuse
    because there was an election since (FENCED_LEADER_EPOCH)."""
    for topic in topics:
        with suppress(KafkaException):  # the next turn asks again, and tells
            consumer.list_topics(topic, timeout=2.0)


def _raise_if_missing(
    consumer: Consumer,
    settings: ClusterSettings,
    asked: list[KafkaPartition],
    error: KafkaError,
    operation: Operation,
) -> None:
    """TopicError if the cluster lacks what was asked for, AccessError if it keeps it from this
    user. Otherwise it is only being found again: a broker that slept has no leader for its
    partitions until it is let back in."""
    try:
        known = consumer.list_topics(timeout=10.0).topics
        topics = {place.topic for place in asked}
        missing = sorted(topics - set(known))
        # only where it is asked for by name is a topic said to be kept from this user
        named = {topic: consumer.list_topics(topic, timeout=10.0) for topic in missing}
    except KafkaException:
        return
    hidden = [
        topic
        for topic, found in named.items()
        if found.topics[topic].error is not None and is_forbidden(found.topics[topic].error)
    ]
    if hidden:
        rights = [Right("Topic", topic, operation) for topic in hidden]
        raise missing_rights(settings, rights, f"asking for {', '.join(hidden)}")
    if missing:
        raise TopicError(
            f"Kafka at {settings.bootstrap_servers} has no topic {', '.join(missing)}",
            hint="create a run's topics with: dora topics create CONFIG",
        )
    if any(place.partition not in known[place.topic].partitions for place in asked):
        raise explain(error, settings, f"asking for offsets of {', '.join(sorted(topics))}")
