"""dora: asynchronous reinforcement learning of language models over Apache Kafka."""

__version__ = "0.1.0"
