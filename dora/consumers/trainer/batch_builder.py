"""Which groups the trainer trains next, and which it sets aside.

Invariant: every group that is complete is either a candidate for a batch or set aside for a reason;
none is forgotten. Samples are kept for outstanding groups only, so memory is bounded by the window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dora.config.trainer import LossSection
from dora.consumers.learner.batches import Sample, group_samples
from dora.core.groups import has_signal
from dora.core.state import Group, RunState, finished_facts
from dora.core.streaming import next_group
from dora.core.window import Blocked, Candidate, pick_batch
from dora.errors import RecordError
from dora.schemas.records import GroupRef, SampleRef, Step, Trajectory, unpack_tokens

NO_SIGNAL = "no_signal"
_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group that can be trained: where it lies in the log, and its samples in order."""

    ref: GroupRef
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the trainer can do now: train `batch` (empty if `blocked` says why not), or take the
    `following` group of a streamed step, and set groups aside."""

    batch: tuple[Prepared, ...]
    set_aside: tuple[GroupRef, ...]
    blocked: Blocked | None
    following: Prepared | None = None


def prepare_samples(
    trajectories: Sequence[Trajectory],
    version: int,
    vocabulary: int,
    settings: LossSection,
    newest: int | None = None,
) -> tuple[Sample, ...]:
    """Samples of a complete group of `version`, in order of sample index.

    Raises RecordError if a trajectory cannot be trained: tokens outside the vocabulary, tokens of
    another version (C1), or no prompt. With `newest` (schedule `partial`) tokens may be of any
    version from the group's to that one.
    """
    for trajectory in trajectories:
        tokens = unpack_tokens(trajectory.token_ids)
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary):
            raise RecordError(
                f"trajectory {trajectory.trajectory_id} holds tokens outside the vocabulary of "
                f"{vocabulary}"
            )
        last = version if newest is None else newest
        foreign = [r.version for r in trajectory.version_runs if not version <= r.version <= last]
        if foreign:
            raise RecordError(
                f"trajectory {trajectory.trajectory_id} holds tokens of version {foreign[0]} "
                f"in a group of version {version}"
                + ("" if newest is None else f" at version {newest}")
            )
    return tuple(group_samples(trajectories, settings))


def group_ref(group: Group, reason: str | None = None) -> GroupRef:
    """The ledger's reference to a complete group."""
    samples = tuple(
        SampleRef(sample, facts.attempt, facts.partition, facts.offset)
        for sample, facts in sorted(group.samples.items())
    )
    short = None if reason is None else reason[:_LONGEST_REASON]
    return GroupRef(group.group_id, group.ordinal, group.version, samples, short)


class Planner:
    """Holds the samples of outstanding groups and decides over `state`; with `mixed`, trajectories
    may be of several versions."""

    def __init__(
        self, state: RunState, settings: LossSection, vocabulary: int, *, mixed: bool = False
    ) -> None:
        self._mixed = mixed
        self._state = state
        self._settings = settings
        self._vocabulary = vocabulary
        self._trajectories: dict[str, dict[tuple[int, int], Trajectory]] = {}  # by group
        self._ready: dict[str, Prepared] = {}
        self._set_aside: dict[str, GroupRef] = {}

    def take(self, trajectory: Trajectory, partition: int, offset: int) -> None:
        """A trajectory of a training group was read.

        One whose group is not admitted yet may turn out to be a duplicate or foreign: it is kept
        until its group is complete or its version leaves the window. None of a version that this
        trainer has not made can ever count, so none is kept.
        """
        outcome = self._state.finish(finished_facts(trajectory, partition, offset))
        if outcome in ("counted", "unknown") and trajectory.policy_version <= self._state.newest:
            kept = self._trajectories.setdefault(trajectory.group_id, {})
            kept[partition, offset] = trajectory

    def decide(self) -> Decision:
        """Judge new complete groups and pick a batch if one is admissible."""
        state = self._state
        candidates, outstanding, aside = self._view()
        picked = pick_batch(state.window, state.newest, candidates, outstanding, state.known_to)
        if isinstance(picked, Blocked):
            return Decision((), aside, picked)
        return Decision(tuple(self._ready[c.group_id] for c in picked), aside, None)

    def stream(self, taken: Sequence[Prepared]) -> Decision:
        """Judge new complete groups and pick the one to take next, if one may be, in a step that
        has `taken` groups; these are the batch if it is complete."""
        state = self._state
        candidates, outstanding, aside = self._view()
        by_id = {candidate.group_id: candidate for candidate in candidates}
        held = [by_id[prepared.ref.group_id] for prepared in taken]
        picked = next_group(
            state.window, state.newest, held, candidates, outstanding, state.known_to
        )
        if isinstance(picked, Blocked):
            return Decision((), aside, picked)
        if picked is None:
            return Decision(tuple(taken), aside, None)
        return Decision((), aside, None, self._ready[picked.group_id])

    def _view(self) -> tuple[list[Candidate], dict[int, int], tuple[GroupRef, ...]]:
        """Groups that may be trained, outstanding ones by version, and those to be set aside, which
        are in neither."""
        state = self._state
        complete = state.complete_groups()
        for group in complete:
            if group.group_id not in self._ready and group.group_id not in self._set_aside:
                self._judge(group)
        outstanding = dict(state.outstanding)
        for ref in self._set_aside.values():
            outstanding[ref.version] -= 1
        candidates = [group.candidate for group in complete if group.group_id in self._ready]
        aside = sorted(self._set_aside.values(), key=lambda ref: (ref.version, ref.ordinal))
        return candidates, outstanding, tuple(aside)

    def _judge(self, group: Group) -> None:
        kept = self._trajectories.pop(group.group_id)
        trajectories = [
            kept[facts.partition, facts.offset] for _, facts in sorted(group.samples.items())
        ]
        reason = group.failure
        rewards = [reward for reward in group.rewards if reward is not None]
        if reason is None and self._settings.drop_no_signal and not has_signal(rewards):
            reason = NO_SIGNAL
        if reason is None:
            try:
                newest = self._state.newest if self._mixed else None
                samples = prepare_samples(
                    trajectories, group.version, self._vocabulary, self._settings, newest
                )
            except RecordError as error:
                reason = f"invalid: {error.message}"
            else:
                self._ready[group.group_id] = Prepared(group_ref(group), samples)
                return
        self._set_aside[group.group_id] = group_ref(group, reason)

    def probes(self, batch: Iterable[Prepared], limit: int) -> list[Sample]:
        """Up to `limit` samples of the current version that are at hand but not in `batch`."""
        taken = {prepared.ref.group_id for prepared in batch}
        found = [
            sample
            for prepared in self._ready.values()
            if prepared.ref.version == self._state.newest and prepared.ref.group_id not in taken
            for sample in prepared.samples
        ]
        return found[:limit]

    def committed(self, step: Step) -> None:
        """Forget what `step`, which `state` holds already, took."""
        for ref in (*step.trained, *step.set_aside):
            self._ready.pop(ref.group_id, None)
            self._set_aside.pop(ref.group_id, None)
            self._trajectories.pop(ref.group_id, None)
        oldest = self._state.window.oldest_live(self._state.newest)
        for group_id, kept in list(self._trajectories.items()):
            if all(trajectory.policy_version < oldest for trajectory in kept.values()):
                del self._trajectories[group_id]

    @property
    def kept(self) -> int:
        """Trajectories held in memory, ready groups aside."""
        return sum(map(len, self._trajectories.values()))

    def waiting_for(self) -> str:
        """What is outstanding, for people: by version, groups complete and missing samples."""
        parts = []
        for version, count in sorted(self._state.outstanding.items()):
            missing = sum(
                len(samples)
                for group, samples in self._state.unfinished(version)
                if group.purpose == "train"
            )
            parts.append(f"version {version}: {count} groups, {missing} trajectories unfinished")
        return "; ".join(parts) or "no group is outstanding"
