"""What a run's log says so far: the state that coordinator, trainer, status and display share.

It depends on the records seen, not on how the topics interleave. Each
topic (each partition of trajectories) is fed in its own order; a trajectory seen before its group's
admission waits for it, and a group that the ledger names before its admission is never outstanding.
A trajectory is finished by the first record in its partition with the version of its group; later
ones change nothing. Only the split of the surplus between `duplicates` and `late` depends on the
interleaving, their sum does not.

Memory is bounded by the window: committed groups are forgotten. Their ids are kept, to recognise
late records, until their version is more than `K` plus one ring (`K + 2`) behind the newest; a
record of such a version is `late` without looking.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Literal

from dora.core.groups import (
    Counters,
    EvaluationTally,
    Finished,
    Group,
    TokenSums,
    finished_facts,
    misfit,
)
from dora.core.window import Window
from dora.schemas.records import Admission, GroupRef, Step

__all__ = [
    "Counters",
    "EvaluationTally",
    "Finished",
    "Group",
    "Outcome",
    "RunState",
    "finished_facts",
]

Outcome = Literal["counted", "duplicate", "late", "foreign", "unknown"]


class RunState:
    """Everything the parts of a run must know to decide, as the log says.

    Feed RunStarted to `start`, Steps to `commit`, the journal to `admit`, trajectories to `finish`.
    A ValueError means that the log contradicts itself and names the record. With `lasting` records
    that the ledger names are waited for however old they are: the whole ledger may be fed first.
    """

    def __init__(
        self,
        window: Window,
        group_size: int,
        success_threshold: float = 1.0,
        *,
        lasting: bool = False,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}, must be 1 or more")
        self.window = window
        self.group_size = group_size
        self.success_threshold = success_threshold
        self._lasting = lasting
        self.newest = -1
        self.last_step: Step | None = None
        self.next_ordinal = 0
        self.counters = Counters()
        self.evaluations: dict[int, EvaluationTally] = {}
        self._groups: dict[str, Group] = {}
        self._open: dict[int, dict[str, Group]] = {}  # by version: groups with missing samples
        self._complete: dict[str, Group] = {}  # train groups that could be trained
        self._outstanding: dict[int, int] = {}
        self._outstanding_total = 0
        self._journal_version = -1  # of the newest train admission
        self._lengths = TokenSums()
        self._floor = 0  # groups of older versions are closed; see `begin_at`
        self._evaluated: dict[int, set[str]] = {}  # by version: eval groups admitted
        self._pending: dict[str, list[Finished]] = {}  # seen before their group's admission
        self._closed: dict[str, int] = {}  # forgotten groups whose records may still come
        self._closed_by_version: dict[int, list[str]] = {}
        self._ahead: set[str] = set()  # named by the ledger before the journal was seen
        # Of closed groups: counted records that the ledger names and that were not seen yet.
        self._awaited: dict[str, dict[int, tuple[int, int]]] = {}

    @property
    def outstanding(self) -> Mapping[int, int]:
        """Train groups started and not committed, by version; versions without any are absent."""
        return self._outstanding

    @property
    def outstanding_total(self) -> int:
        """Train groups started and not committed."""
        return self._outstanding_total

    @property
    def known_to(self) -> int:
        """Version of the newest admission; none under a version before it can still come."""
        return self._journal_version

    @property
    def expected_tokens(self) -> float:
        """Generated tokens of the outstanding groups: those of finished samples, and the running
        mean for each that is not; 0 before the first has finished."""
        return self._lengths.expected

    def admissible(self, steps_left: int) -> int:
        """How many groups may start now, with `steps_left` steps to be committed."""
        return self.window.admissible(
            self._outstanding_total,
            steps_left,
            self._lengths.expected,
            self._lengths.mean * self.group_size,
            opened=self._journal_version >= self.newest,
        )

    @property
    def groups(self) -> Mapping[str, Group]:
        """Outstanding train groups and unfinished eval groups, in order of admission."""
        return self._groups

    def start(self) -> None:
        """Version 0 is committed (RunStarted was seen). Harmless when repeated."""
        self.newest = max(self.newest, 0)

    def begin_at(self, version: int) -> None:
        """The state begins with the ledger entries of the step that made `version`.

        For a caller that knows that every group of an older version is closed: such groups are not
        followed, and counters and evaluations count from here on. ValueError once records were fed.
        """
        if self.newest >= 0 or self.last_step is not None or self.next_ordinal:
            raise ValueError("a state can only begin before its first record")
        self._floor = version
        self.newest = version - 1

    def admit(self, admission: Admission) -> None:
        """A group started; the journal must be fed in its order.

        ValueError if the id repeats, or a train group's version or ordinal is not beyond what the
        journal said before.
        """
        group_id, version = admission.group_id, admission.policy_version
        if version < 0 or admission.group_size < 1:
            raise ValueError(
                f"admission of group {group_id} has version {version} "
                f"and size {admission.group_size}"
            )
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is admitted a second time")
        self.start()  # whatever generates, generates under a version that exists
        group = Group(group_id, admission.ordinal, version, admission.group_size, admission.purpose)
        if admission.purpose == "eval":
            self._admit_evaluation(group)
        else:
            self._admit_training(group)
        for finished in self._pending.pop(group_id, ()):
            self.finish(finished)

    def _admit_training(self, group: Group) -> None:
        if group.ordinal < self.next_ordinal:
            raise ValueError(
                f"group {group.group_id} admits ordinal {group.ordinal} again: "
                f"the journal is at {self.next_ordinal} already"
            )
        if group.version < self._journal_version - self.window.admitted_behind:
            raise ValueError(
                f"group {group.group_id} is admitted under version {group.version} "
                f"after one of version {self._journal_version}"
            )
        self._journal_version = max(self._journal_version, group.version)
        self.next_ordinal = group.ordinal + 1
        if group.version < self._floor:
            return
        if group.group_id in self._ahead:
            self._ahead.remove(group.group_id)
            return
        self._outstanding[group.version] = self._outstanding.get(group.version, 0) + 1
        self._outstanding_total += 1
        self._lengths.missing += group.size
        self._track(group)

    def _admit_evaluation(self, group: Group) -> None:
        if group.version < self._floor:
            return
        admitted = self._evaluated.setdefault(group.version, set())
        if group.group_id in admitted:
            raise ValueError(f"group {group.group_id} is admitted a second time")
        admitted.add(group.group_id)
        tally = self.evaluations.setdefault(group.version, EvaluationTally(group.version))
        tally.admitted += group.size
        self._track(group)

    def _track(self, group: Group) -> None:
        self._groups[group.group_id] = group
        self._open.setdefault(group.version, {})[group.group_id] = group

    def finish(self, finished: Finished) -> Outcome:
        """A finished trajectory was seen; each partition must be fed in its order.

        `counted`: it is the one that counts. `duplicate`: its group holds this sample already.
        `late`: its group is committed or, for evaluation, complete. `foreign`: it is none of the
        group's (`misfit`). `unknown`: its group is not admitted as far as seen; it is kept and
        counted when the admission comes.
        """
        group = self._groups.get(finished.group_id)
        if group is None:
            return self._finish_untracked(finished)
        if misfit(finished, group.version, group.size) is not None:
            self.counters.foreign += 1
            return "foreign"
        counted = group.samples.get(finished.sample)
        if counted is not None:
            # The very same record read again is no second one.
            if (counted.partition, counted.offset) != (finished.partition, finished.offset):
                self.counters.duplicates += 1
            return "duplicate"
        group.samples[finished.sample] = finished
        self._count(finished)
        if group.purpose == "eval":
            self._tally(group, finished)
        else:
            self._lengths.missing -= 1
            self._lengths.known += finished.generated_tokens
        if group.complete:
            self._drop_open(group)
            if group.purpose == "eval":
                del self._groups[group.group_id]
                self._close(group.group_id, group.version)
            else:
                self._complete[group.group_id] = group
        return "counted"

    def _finish_untracked(self, finished: Finished) -> Outcome:
        version = self._closed.get(finished.group_id, finished.policy_version)
        if finished.policy_version != version:
            self.counters.foreign += 1
            return "foreign"
        awaited = self._awaited.get(finished.group_id)
        if awaited and awaited.get(finished.sample) == (finished.partition, finished.offset):
            del awaited[finished.sample]
            if not awaited:
                del self._awaited[finished.group_id]
            self._count(finished)
            return "late"
        if finished.group_id in self._closed or finished.policy_version < self._horizon:
            self.counters.late += 1
            return "late"
        self._pending.setdefault(finished.group_id, []).append(finished)
        return "unknown"

    def _count(self, finished: Finished) -> None:
        self.counters.trajectories += 1
        self.counters.generated_tokens += finished.generated_tokens
        if finished.purpose == "train":
            self._lengths.samples += 1
            self._lengths.tokens += finished.generated_tokens

    def _tally(self, group: Group, finished: Finished) -> None:
        tally = self.evaluations[group.version]
        tally.generated_tokens += finished.generated_tokens
        tally.count(finished.reward, self.success_threshold)

    def commit(self, step: Step) -> None:
        """A ledger entry was seen; the ledger must be fed in its order, from its start.

        ValueError if sequence or versions do not continue the entry before, or if it names a group
        a second time or one of an evaluation. Nothing is changed then.
        """
        self._check_continues(step)
        self.start()
        for ref in chain(step.trained, step.set_aside):
            self._remove(ref)
        self.counters.trained_groups += len(step.trained)
        self.counters.set_aside_groups += len(step.set_aside)
        self.last_step = step
        if step.version_out > self.newest:
            self.newest = step.version_out
            self._forget()

    def _check_continues(self, step: Step) -> None:
        begins = self.last_step is None and self._floor > 0
        expected = 0 if self.last_step is None else self.last_step.sequence + 1
        if step.sequence != expected and not begins:
            raise ValueError(f"ledger entry {step.sequence} comes where {expected} is due")
        newest = max(self.newest, 0)
        due = newest + 1 if step.kind == "step" else newest
        if (step.version_in, step.version_out) != (newest, due):
            raise ValueError(
                f"ledger entry {step.sequence} leads from version {step.version_in} to "
                f"{step.version_out}, but {newest} to {due} is due"
            )
        seen: set[str] = set()
        for ref in chain(step.trained, step.set_aside):
            group_id = ref.group_id
            if group_id in seen or group_id in self._closed or group_id in self._ahead:
                raise ValueError(
                    f"ledger entry {step.sequence} names group {group_id}, "
                    "which the ledger has named before"
                )
            group = self._groups.get(group_id)
            if group is not None and group.purpose == "eval":
                raise ValueError(f"ledger entry {step.sequence} names eval group {group_id}")
            seen.add(group_id)

    def _remove(self, ref: GroupRef) -> None:
        if ref.version < self._floor:
            self._close(ref.group_id, ref.version)
            return
        group = self._groups.pop(ref.group_id, None)
        seen: set[int] = set()
        if group is None:
            self._ahead.add(ref.group_id)
        else:
            count = self._outstanding[group.version] - 1
            self._outstanding_total -= 1
            if count:
                self._outstanding[group.version] = count
            else:
                del self._outstanding[group.version]
            if self._complete.pop(group.group_id, None) is None:
                self._drop_open(group)
            seen.update(group.samples)
            self._lengths.missing -= len(group.missing)
            self._lengths.known -= group.tokens
        self._close(ref.group_id, ref.version)
        awaited = {
            sample.sample: (sample.partition, sample.offset)
            for sample in ref.samples
            if sample.sample not in seen
        }
        if awaited:
            self._awaited[ref.group_id] = awaited
        for finished in self._pending.pop(ref.group_id, ()):
            self._finish_untracked(finished)

    def _drop_open(self, group: Group) -> None:
        siblings = self._open[group.version]
        del siblings[group.group_id]
        if not siblings:
            del self._open[group.version]

    def _close(self, group_id: str, version: int) -> None:
        self._closed[group_id] = version
        self._closed_by_version.setdefault(version, []).append(group_id)

    @property
    def _horizon(self) -> int:
        """Oldest version whose closed groups are still known by id: the window and one ring."""
        return self.newest - self.window.max_staleness - (self.window.max_staleness + 2)

    def _forget(self) -> None:
        horizon = self._horizon
        for version in [known for known in self._closed_by_version if known < horizon]:
            for group_id in self._closed_by_version.pop(version):
                del self._closed[group_id]
                if not self._lasting:
                    self._awaited.pop(group_id, None)
        for version in [known for known in self._evaluated if known < horizon]:
            del self._evaluated[version]
        for group_id, waiting in list(self._pending.items()):
            if all(finished.policy_version < horizon for finished in waiting):
                self.counters.late += len(self._pending.pop(group_id))

    @property
    def complete_total(self) -> int:
        """Outstanding train groups whose samples are all finished."""
        return len(self._complete)

    def complete_groups(self) -> list[Group]:
        """Outstanding train groups whose samples are all finished, by version, then ordinal."""
        return sorted(self._complete.values(), key=lambda group: (group.version, group.ordinal))

    def unfinished(self, version: int | None = None) -> list[tuple[Group, tuple[int, ...]]]:
        """Groups of training and evaluation with missing samples, and these samples' indices.

        Of one version, or of all, oldest version first; within a version in order of admission.
        """
        versions = sorted(self._open) if version is None else [version]
        return [
            (group, group.missing)
            for each in versions
            for group in self._open.get(each, {}).values()
        ]

    def live_versions(self) -> list[int]:
        """Versions with unfinished train groups, in order."""
        return sorted(
            version
            for version, groups in self._open.items()
            if any(group.purpose == "train" for group in groups.values())
        )
