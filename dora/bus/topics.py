"""Creating, checking, describing and deleting the topics of a run.

A run's topics are made once, all of them, with a fixed number of partitions; processes that use
them need no right to create topics. Nothing is deleted unless `delete` is called.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import (
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from dora.bus.access import Right
from dora.bus.admin import Admin
from dora.bus.failures import explain, is_transient, kafka_error
from dora.bus.topic_plan import (
    SHOWN_CONFIGS,
    RunTopics,
    TopicInfo,
    TopicSpec,
    config_problems,
    topic_plan,
    unknown_run_hint,
)
from dora.errors import AccessError, DeadlineError, TopicError

__all__ = [
    "RunTopics",
    "TopicAdmin",
    "TopicInfo",
    "TopicSpec",
    "topic_plan",
]

_VISIBLE_SECONDS = 30.0
_SETTLE_SECONDS = 0.05


class TopicAdmin(Admin):
    """Creates, checks, describes and deletes topics."""

    def list_runs(self) -> list[str]:
        """Runs that have a ledger and a dispatch topic, in alphabetical order."""
        names = self._names()
        runs = {name.removesuffix(".steps") for name in names if name.endswith(".steps")}
        return sorted(run for run in runs if RunTopics(run).dispatch in names)

    def topic_ids(self, run: str) -> dict[str, str]:
        """Ids of the run's existing topics by name: a topic made anew has another id."""
        return {name: str(topic.topic_id) for name, topic in self._topics(run).items()}

    def existing(self, run: str) -> list[str]:
        """Names of the run's topics that exist."""
        names = self._names()
        return [name for name in RunTopics(run).all if name in names]

    def create(self, plan: Sequence[TopicSpec], *, exist_ok: bool = False) -> list[str]:
        """Create the topics and wait until they can be used; returns the names of the new ones.

        TopicError, before anything is created, if one exists; with `exist_ok` those that exist are
        left as they are, and checked.
        """
        names = self._names()
        existing = [spec.name for spec in plan if spec.name in names]
        if existing and not exist_ok:
            run = existing[0].rpartition(".")[0]
            raise TopicError(
                f"Kafka at {self._settings.bootstrap_servers} already has {', '.join(existing)}",
                hint=f"go on with that run, choose another run.name, or delete it for good: "
                f"dora topics delete {run} --yes",
            )
        new = [spec for spec in plan if spec.name not in existing]
        if new:
            self.check_visible([spec.name for spec in new])
            futures = self._admin.create_topics(
                [
                    NewTopic(
                        spec.name,
                        num_partitions=spec.partitions,
                        replication_factor=spec.replication_factor,
                        config=spec.configs,
                    )
                    for spec in new
                ],
                operation_timeout=_VISIBLE_SECONDS,
                request_timeout=self._settings.request_timeout,
            )
            for name, future in futures.items():
                self._created(name, future)
            self._await_visible({spec.name: spec.partitions for spec in new})
        if existing:
            self.verify(plan)
        return [spec.name for spec in new]

    def verify(self, plan: Sequence[TopicSpec]) -> None:
        """TopicError naming every topic that is missing or has another shape than the run needs.

        Where the cluster does not let configurations be read, only partitions are compared.
        """
        topics = self._describe([spec.name for spec in plan])
        self.check_visible([spec.name for spec in plan if spec.name not in topics])
        configs = self._configs(list(topics))
        problems = []
        for spec in plan:
            topic = topics.get(spec.name)
            if topic is None:
                problems.append(f"{spec.name} is missing")
                continue
            found = len(topic.partitions)
            if found != spec.partitions:
                problems.append(
                    f"{spec.name} has {found} partitions, the configuration needs {spec.partitions}"
                )
            problems += config_problems(spec, configs.get(spec.name, {}))
        if problems:
            run = plan[0].name.rpartition(".")[0]
            hints = []
            if len(topics) < len(plan):
                hints.append("Create what is missing: dora topics create CONFIG --exist-ok.")
            if len(problems) > len(plan) - len(topics):
                hints.append(
                    "Partitions follow from window.max_staleness, kafka.lanes and "
                    "kafka.dispatch_partitions, the rest from kafka.max_message_bytes: restore "
                    "what the topics were made with. While no step is committed they can be made "
                    f"anew: dora topics delete {run} --yes, then dora topics create CONFIG."
                )
            raise TopicError(
                f"the topics of run {run} at {self._settings.bootstrap_servers} do not fit: "
                + "; ".join(problems),
                hint=" ".join(hints),
            )

    def describe(self, run: str) -> list[TopicInfo]:
        """The run's topics that exist, as they are; empty for an unknown run.

        AccessError if only some may be seen: what is missing must not look like an empty topic.
        """
        topics = self._topics(run)
        if not topics:
            return []
        self.check_visible([name for name in RunTopics(run).all if name not in topics])
        configs = self._configs(list(topics))
        places = [
            KafkaPartition(name, partition.id)
            for name, topic in topics.items()
            for partition in topic.partitions
        ]
        begin = self._offsets(places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        end = self._offsets(places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return [
            TopicInfo(
                name=name,
                topic_id=str(topic.topic_id),
                partitions=len(topic.partitions),
                begin_offsets={p.id: begin[name, p.id] for p in topic.partitions},
                end_offsets={p.id: end[name, p.id] for p in topic.partitions},
                configs=configs.get(name, {}),
            )
            for name, topic in topics.items()
        ]

    def delete(self, run: str) -> list[str]:
        """Delete the run's topics, and with them all its records; returns their names.

        TopicError with similar names if there is none.
        """
        names = self.existing(run)
        if not names:
            raise self.unknown_run(run)
        futures = self._admin.delete_topics(
            names,
            operation_timeout=_VISIBLE_SECONDS,
            request_timeout=self._settings.request_timeout,
        )
        for name, future in futures.items():
            try:
                self._result(future, f"deleting {name}", Right("Topic", name, "Delete"))
            except TopicError:
                continue  # Gone already: what was wanted.
        self._await(lambda: not set(names) & self._names(), f"{', '.join(names)} to be deleted")
        self._delete_group(f"{run}.trainer")
        return names

    def _names(self) -> set[str]:
        return set(self._metadata().topics)

    def _topics(self, run: str) -> dict[str, Any]:
        return self._describe(RunTopics(run).all)

    def _describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Descriptions of those that exist, in the given order."""
        known = self._names()
        names = [name for name in names if name in known]
        if not names:
            return {}
        futures = self._admin.describe_topics(
            TopicCollection(names), request_timeout=self._settings.request_timeout
        )
        return {name: self._result(futures[name], f"describing {name}") for name in names}

    def _configs(self, names: list[str]) -> dict[str, dict[str, str]]:
        """Configurations that differ from the cluster's defaults or matter to dora."""
        if not names:
            return {}
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        futures = self._admin.describe_configs(
            resources, request_timeout=self._settings.request_timeout
        )
        found: dict[str, dict[str, str]] = {}
        for resource, future in futures.items():
            with suppress(AccessError):  # they may be kept from this user
                entries = self._result(future, f"describing {resource.name}")
                found[resource.name] = {
                    name: entry.value for name, entry in entries.items() if name in SHOWN_CONFIGS
                }
        return found

    def _offsets(self, places: list[KafkaPartition], which: OffsetSpec) -> dict[Any, int]:
        """Offsets by topic and partition; asked again while leaders of new topics settle."""
        deadline = time.monotonic() + self._settings.request_timeout
        found: dict[Any, int] = {}
        while len(found) < len(places):
            missing = [place for place in places if (place.topic, place.partition) not in found]
            futures = self._admin.list_offsets(
                dict.fromkeys(missing, which),
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=self._settings.request_timeout,
            )
            for place, future in futures.items():
                try:
                    answer = self._answer(future, f"listing offsets of {place.topic}")
                    found[place.topic, place.partition] = answer.offset
                except KafkaException as exception:
                    error = kafka_error(exception)
                    if not is_transient(error) or time.monotonic() >= deadline:
                        doing = f"asking for offsets of {place.topic}"
                        needs = Right("Topic", place.topic, "Describe")
                        raise explain(
                            error, self._settings, doing, self._failures, needs=needs
                        ) from exception
            if len(found) < len(places):
                time.sleep(_SETTLE_SECONDS)
        return found

    def _delete_group(self, group: str) -> None:
        """Committed offsets of a deleted run would mislead lag tools; not worth an error."""
        listed: Any = self._result(self._admin.list_consumer_groups(), "listing consumer groups")
        empty = [
            found
            for found in listed.valid
            if found.group_id == group and found.state == ConsumerGroupState.EMPTY
        ]
        if empty:
            for future in self._admin.delete_consumer_groups([group]).values():
                needs = Right("Group", group, "Delete")
                self._result(future, f"deleting consumer group {group}", needs)

    def _created(self, name: str, future: "Future[Any]") -> None:
        try:
            self._answer(future, f"creating {name}")
        except KafkaException as exception:
            error = kafka_error(exception)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                raise TopicError(
                    f"{name} was created by another process at the same time",
                    hint="look at it with: dora topics describe RUN",
                ) from exception
            if error.code() in (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_CONFIG):
                raise TopicError(
                    f"{name} cannot be created: {error.str()}",
                    hint="check kafka.replication_factor (at most the number of brokers), "
                    "kafka.retention_hours and kafka.max_message_bytes",
                ) from exception
            needs, doing = Right("Topic", name, "Create"), f"creating {name}"
            raise explain(error, self._settings, doing, self._failures, needs=needs) from exception

    def _await_visible(self, partitions: dict[str, int]) -> None:
        def usable() -> bool:
            topics = self._metadata().topics
            return all(
                name in topics
                and len(topics[name].partitions) == count
                and all(p.leader >= 0 for p in topics[name].partitions.values())
                for name, count in partitions.items()
            )

        self._await(usable, f"{', '.join(partitions)} to be usable")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not condition():
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"waited {_VISIBLE_SECONDS:g} s for {what} at "
                    f"{self._settings.bootstrap_servers}",
                    hint="look at the broker's log",
                )
            time.sleep(_SETTLE_SECONDS)

    def partitions_of(self, run: str) -> dict[str, int]:
        """Partitions of each topic of the run; TopicError, with similar names, without a ledger."""
        partitions = {info.name: info.partitions for info in self.describe(run)}
        if RunTopics(run).steps not in partitions:
            raise self.unknown_run(run)
        return partitions

    def unknown_run(self, run: str) -> TopicError:
        """The error to raise when a run has no topics: it names similar runs, if there are any.

        AccessError instead if it may have some, which are kept from this user.
        """
        self.check_visible(RunTopics(run).all)
        return TopicError(
            f"Kafka at {self._settings.bootstrap_servers} has no run {run}",
            hint=unknown_run_hint(run, self.list_runs()),
        )

    def check_visible(self, names: Sequence[str]) -> None:
        """AccessError for the first topic that is kept from this user.

        A cluster leaves topics without the right Describe out of its list, and says what they are
        only where they are asked for by name (whether they exist or not).
        """
        if names:
            futures = self._admin.describe_topics(
                TopicCollection(list(names)), request_timeout=self._settings.request_timeout
            )
            for name, future in futures.items():
                with suppress(TopicError):
                    self._result(future, f"describing {name}", Right("Topic", name, "Describe"))
