"""A cluster's ACLs, and whether a process has the rights of its role.

Invariant: a role that lacks a right says so when it starts, with all that it lacks, and not when
the first incident needs it. Only `grant` and `revoke` change anything.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
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
    """Grants and revokes rights, and asks what the own user may do."""

    def grant(self, grants: Iterable[Grant]) -> None:
        """Allow it from any host; what is allowed already stays. AccessError without the right."""
        self.ping()
        bindings = list({_binding(grant): None for grant in grants})
        futures = self._admin.create_acls(bindings, request_timeout=self._settings.request_timeout)
        for future in futures.values():
            self._result(future, "granting rights", Right("Cluster", CLUSTER, "Alter"))

    def revoke(self, grants: Iterable[Grant]) -> None:
        """Take back what `grant` gave; what was not granted stays that way."""
        self.ping()
        filters = list({_filter(grant): None for grant in grants})
        futures = self._admin.delete_acls(filters, request_timeout=self._settings.request_timeout)
        for future in futures.values():
            self._result(future, "revoking rights", Right("Cluster", CLUSTER, "Alter"))

    def lacking(self, rights: Sequence[Right]) -> list[Right]:
        """Those of `rights` on topics and groups that this user has not (KIP-430).

        A cluster that does not tell, or cannot for the moment (a new one has no coordinator of
        groups yet), allows everything as far as this goes, and so does a topic that does not exist.
        What is asked of a transactional id shows when it is taken over.
        """
        self.ping()
        missing = self._lacking_topics([right for right in rights if right.resource == "Topic"])
        return missing + self._lacking_groups([r for r in rights if r.resource == "Group"])

    def _lacking_topics(self, rights: Sequence[Right]) -> list[Right]:
        names = sorted({right.name for right in rights})
        if not names:
            return []
        futures = self._admin.describe_topics(
            TopicCollection(names),
            include_authorized_operations=True,
            request_timeout=min(_ASKING_SECONDS, self._settings.request_timeout),
        )
        return self._unanswered(rights, futures)

    def _lacking_groups(self, rights: Sequence[Right]) -> list[Right]:
        names = sorted({right.name for right in rights})
        if not names:
            return []
        futures = self._admin.describe_consumer_groups(
            names,
            include_authorized_operations=True,
            request_timeout=min(_ASKING_SECONDS, self._settings.request_timeout),
        )
        return self._unanswered(rights, futures)

    def _unanswered(self, rights: Sequence[Right], futures: dict[str, Any]) -> list[Right]:
        missing = []
        for name, future in futures.items():
            wanted = [right for right in rights if right.name == name]
            doing = f"describing {name}"
            try:
                allowed = self._answer(future, doing).authorized_operations
            except KafkaException as exception:
                error = kafka_error(exception)
                if is_unknown_topic(error) or is_passing(error):
                    continue
                if not is_forbidden(error):
                    raise explain(error, self._settings, doing, self._failures) from exception
                allowed = ()
            if allowed is not None:
                missing += [r for r in wanted if _OPERATIONS[r.operation] not in allowed]
        return missing


def check_rights(role: str, run: str, settings: ClusterSettings) -> None:
    """AccessError that names the principal and every right which it lacks for `role` in `run`."""
    with AclAdmin(settings) as admin:
        missing = admin.lacking(ROLES[role].rights(run))
    if missing:
        raise missing_rights(settings, missing, f"the role {role} of run {run}")


def _binding(grant: Grant) -> AclBinding:
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


def _filter(grant: Grant) -> AclBindingFilter:
    right = grant.right
    return AclBindingFilter(
        _RESOURCES[right.resource],
        right.name,
        ResourcePatternType.LITERAL,
        grant.principal,
        _ANY_HOST,
        _OPERATIONS[right.operation],
        AclPermissionType.ALLOW,
    )
