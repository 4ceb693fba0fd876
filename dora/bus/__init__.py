"""Kafka: the only package that imports confluent_kafka.

Code outside never sees an object or an error of librdkafka; failures are `dora.errors`.
"""

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, END, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin, TopicInfo, TopicSpec, topic_plan
from dora.bus.transactions import (
    Transaction,
    TransactionAbortedError,
    TransactionalWriter,
    UnknownOutcomeError,
)
from dora.bus.writer import LogWriter

__all__ = [
    "BEGINNING",
    "END",
    "ClusterSettings",
    "LogReader",
    "LogWriter",
    "Message",
    "Partition",
    "RunTopics",
    "TopicAdmin",
    "TopicInfo",
    "TopicSpec",
    "Transaction",
    "TransactionAbortedError",
    "TransactionalWriter",
    "UnknownOutcomeError",
    "Unreadable",
    "cluster_settings",
    "topic_plan",
]
