"""A cluster's ACLs, and whether a process has the rights of its role.

A process that lacks rights fails when it starts, with a list of all that it lacks, not when it
first needs one. Only `grant` changes anything.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from dora.bus.access import CLUSTER, ROLES, Grant, Operation, Resource, Right
from dora.bus.admin import Admin
from dora.bus.failures import (
    explain,
    is_forbidden,
    is_passing,
    is_unknown_topic,
    kafka_error,
    missing_rights,
)
from dora.bus.settings import ClusterSettings

_OPERATIONS: dict[Operation, AclOperation] = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Delete": AclOperation.DELETE,
    "Alter": AclOperation.ALTER,
    "Describe": AclOperation.DESCRIBE,
    "IdempotentWrite": AclOperation.IDEMPOTENT_WRITE,
}
_RESOURCES: dict[Resource, ResourceType] = {
    "Topic": ResourceType.TOPIC,
    "Group": ResourceType.GROUP,
    "TransactionalId": ResourceType.TRANSACTIONAL_ID,
    "Cluster": ResourceType.BROKER,
}
_ANY_HOST = "*"
_ASKING_SECONDS = 10.0


class AclAdmin(Admin):
    """Grants rights, and asks which ones this client's user has."""

    def grant(self, grants: Iterable[Grant]) -> None:
        """Allow it from any host; what is allowed already stays. AccessError without the right."""
        self.ping()
        futures = self._admin.create_acls(
            list(dict.fromkeys(map(binding, grants))),
            request_timeout=self._settings.request_timeout,
        )
        for future in futures.values():
            self._result(future, "granting rights", Right("Cluster", CLUSTER, "Alter"))

    def lacking(self, rights: Sequence[Right]) -> list[Right]:
        """Those of `rights` on topics and groups that this user lacks (KIP-430).

        Where the cluster does not answer this, or cannot for the moment (a new one has no
        coordinator of groups yet), and for a topic that does not exist, no right counts as missing.
        A right on a transactional id shows when the id is taken over.
        """
        self.ping()
        topics = sorted({right.name for right in rights if right.resource == "Topic"})
        groups = sorted({right.name for right in rights if right.resource == "Group"})
        asking: dict[str, Any] = {
            "include_authorized_operations": True,
            "request_timeout": min(_ASKING_SECONDS, self._settings.request_timeout),
        }
        answers: list[tuple[Resource, str, Future[Any]]] = []
        if topics:
            described = self._admin.describe_topics(TopicCollection(topics), **asking)
            answers += [("Topic", name, future) for name, future in described.items()]
        if groups:
            described = self._admin.describe_consumer_groups(groups, **asking)
            answers += [("Group", name, future) for name, future in described.items()]
        missing = []
        for resource, name, future in answers:
            allowed = self._allowed(future, f"describing {name}")
            if allowed is not None:
                wanted = [r for r in rights if (r.resource, r.name) == (resource, name)]
                missing += [r for r in wanted if _OPERATIONS[r.operation] not in allowed]
        return missing

    def _allowed(self, future: "Future[Any]", doing: str) -> Collection[AclOperation] | None:
        """What this user may do with a topic or group; None if the cluster does not say."""
        try:
            allowed: Collection[AclOperation] | None
            allowed = self._answer(future, doing).authorized_operations
            return allowed
        except KafkaException as exception:
            error = kafka_error(exception)
            if is_forbidden(error):
                return ()
            if is_unknown_topic(error) or is_passing(error):
                return None
            raise explain(error, self._settings, doing, self._failures) from exception


def check_rights(role: str, run: str, settings: ClusterSettings) -> None:
    """AccessError, naming the principal and every missing right, unless it may act as `role`."""
    with AclAdmin(settings) as admin:
        missing = admin.lacking(ROLES[role].rights(run))
    if missing:
        raise missing_rights(settings, missing, f"the role {role} of run {run}")


def binding(grant: Grant) -> AclBinding:
    """The right as an ACL of Kafka."""
    right = grant.right
    return AclBinding(
        _RESOURCES[right.resource],
        right.name,
        ResourcePatternType.LITERAL,
        grant.principal,
        _ANY_HOST,
        _OPERATIONS[right.operation],
        AclPermissionType.ALLOW,
    )
