"""From trajectories that were read to the next batch: which groups the trainer trains next, which
it sets aside, and the wait until a batch is admissible.

Every complete group is either a candidate for a batch or set aside for a reason. Samples are kept
for outstanding groups only, so memory is bounded by the window.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dora.config import Config
from dora.config.trainer import LossSection
from dora.consumers.learner.batches import Sample, group_samples
from dora.consumers.learner.learner import Learner
from dora.consumers.trainer.heartbeat import Heartbeat
from dora.core.groups import NO_SIGNAL, CommonReason, has_signal
from dora.core.state import Group, RunState, finished_facts
from dora.core.step_metrics import PART
from dora.core.streaming import next_group
from dora.core.window import Blocked, Candidate, pick_batch
from dora.errors import DeadlineError, RecordError
from dora.schemas.records import GroupRef, SampleRef, Step, Trajectory, unpack_tokens

_LONGEST_REASON = 500
PARTS_KEPT = 32


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that can be trained: where it lies in the log, and its samples in order."""

    ref: GroupRef
    samples: tuple[Sample, ...]
    parts: tuple[Mapping[str, float], ...] = ()
    """Reward parts of its samples."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the trainer can do now: train `batch` (empty if `blocked` says why not), compute on the
    `next_group` of a streamed step, and set groups aside."""

    batch: tuple[ReadyGroup, ...]
    set_aside: tuple[GroupRef, ...]
    blocked: Blocked | None
    next_group: ReadyGroup | None = None


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


def part_means(groups: Iterable[ReadyGroup]) -> dict[str, float]:
    """Mean of each reward part over the samples that have it, as `reward_part_NAME`; of the first
    `PARTS_KEPT` parts by name."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for parts in group.parts:
            for name, value in parts.items():
                values.setdefault(name, []).append(value)
    return {f"{PART}{name}": fmean(values[name]) for name in sorted(values)[:PARTS_KEPT]}


class BatchBuilder:
    """Holds the samples of outstanding groups and decides over the run's `state`. With `mixed`,
    trajectories may be of several versions."""

    def __init__(
        self, state: RunState, settings: LossSection, vocabulary: int, *, mixed: bool = False
    ) -> None:
        self._mixed = mixed
        self._state = state
        self._settings = settings
        self._vocabulary = vocabulary
        self._trajectories: dict[str, dict[tuple[int, int], Trajectory]] = {}  # by group
        self._ready: dict[str, ReadyGroup] = {}
        self._set_aside: dict[str, GroupRef] = {}

    def add_trajectory(self, trajectory: Trajectory, partition: int, offset: int) -> None:
        """A trajectory of a training group was read at this place of the log.

        One whose group is not admitted yet may turn out to be a duplicate or foreign: it is kept
        until its group is complete or its version leaves the window. One of a version that this
        trainer has not made can never count and is not kept.
        """
        outcome = self._state.finish(finished_facts(trajectory, partition, offset))
        if outcome in ("counted", "unknown") and trajectory.policy_version <= self._state.newest:
            kept = self._trajectories.setdefault(trajectory.group_id, {})
            kept[partition, offset] = trajectory

    def next_batch(self) -> Decision:
        """Judge new complete groups and pick a batch if one is admissible."""
        state = self._state
        candidates, outstanding, aside = self._view()
        picked = pick_batch(state.window, state.newest, candidates, outstanding, state.known_to)
        if isinstance(picked, Blocked):
            return Decision((), aside, picked)
        return Decision(tuple(self._ready[c.group_id] for c in picked), aside, None)

    def next_streamed(self, taken: Sequence[ReadyGroup]) -> Decision:
        """Judge new complete groups and pick the next one of a streamed step that has computed on
        the `taken` groups; if the step is complete, these are its batch."""
        state = self._state
        candidates, outstanding, aside = self._view()
        by_id = {candidate.group_id: candidate for candidate in candidates}
        held = [by_id[group.ref.group_id] for group in taken]
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
                prompts = len({trajectory.prompt_hash for trajectory in trajectories})
                if prompts == 1:
                    reward_parts = tuple(each.reward_parts for each in trajectories)
                    self._ready[group.group_id] = ReadyGroup(
                        group_ref(group), samples, reward_parts
                    )
                    return
                reason = f"mixed_prompt: its {len(trajectories)} samples have {prompts} prompts"
        self._set_aside[group.group_id] = group_ref(group, reason)

    def probes(self, batch: Iterable[ReadyGroup], limit: int) -> list[Sample]:
        """Up to `limit` samples of the current version that are ready but not in `batch`."""
        taken = {group.ref.group_id for group in batch}
        found = [
            sample
            for group in self._ready.values()
            if group.ref.version == self._state.newest and group.ref.group_id not in taken
            for sample in group.samples
        ]
        return found[:limit]

    def drop_committed(self, step: Step) -> None:
        """Forget the groups of a committed `step`, which `state` holds already."""
        for ref in (*step.trained, *step.set_aside):
            self._ready.pop(ref.group_id, None)
            self._set_aside.pop(ref.group_id, None)
            self._trajectories.pop(ref.group_id, None)
        oldest = self._state.window.oldest_live(self._state.newest)
        for group_id, kept in list(self._trajectories.items()):
            if all(trajectory.policy_version < oldest for trajectory in kept.values()):
                del self._trajectories[group_id]

    @property
    def kept_trajectories(self) -> int:
        """Number of trajectories held in memory, without those of ready groups."""
        return sum(map(len, self._trajectories.values()))

    def outstanding_text(self) -> str:
        """What is outstanding, in words: groups and unfinished trajectories by version."""
        parts = []
        for version, count in sorted(self._state.outstanding.items()):
            missing = sum(
                len(samples)
                for group, samples in self._state.unfinished(version)
                if group.purpose == "train"
            )
            parts.append(f"version {version}: {count} groups, {missing} trajectories unfinished")
        return "; ".join(parts) or "no group is outstanding"


SET_ASIDE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PolledBatch:
    """A batch to be trained."""

    decision: Decision
    computed_seconds: float = 0.0
    """Spent on the groups of a streamed step already."""
    streamed_seconds: float = 0.0
    """The part of it that was spent before the last group was taken."""


class BatchPoller:
    """Polls the log until a step can be trained, sends heartbeats meanwhile, and sets groups aside
    that would fill the window. It waits for a bounded time and then says what is missing.

    `poll` reads the log for at most so many seconds, `check` raises where the trainer cannot go on,
    `set_aside` commits that groups are set aside, and `common_reason` says why they were since the
    last step.
    """

    def __init__(
        self,
        config: Config,
        builder: BatchBuilder,
        state: RunState,
        heartbeat: Heartbeat,
        *,
        poll: Callable[[float], None],
        check: Callable[[], None],
        set_aside: Callable[[tuple[GroupRef, ...]], None],
        common_reason: Callable[[], CommonReason | None],
    ) -> None:
        self._timeout = config.trainer.batch_timeout_seconds
        self._builder = builder
        self._state = state
        self._heartbeat = heartbeat
        self._poll = poll
        self._check = check
        self._set_aside = set_aside
        self._common_reason = common_reason

    def wait_for_batch(self, stop: threading.Event) -> PolledBatch | None:
        """Poll until a batch is admissible; None if `stop` was set first.

        Raises DeadlineError after `trainer.batch_timeout_seconds`.
        """
        decision = self._poll_until(stop, self._builder.next_batch)
        return None if decision is None else PolledBatch(decision)

    def stream_batch(self, stop: threading.Event, learner: Learner) -> PolledBatch | None:
        """Compute on groups as they finish, until they are a batch; None if `stop` was set first.
        What was computed by then is lost, and nothing else: nothing of it is committed.

        Raises DeadlineError if there is no next group for `trainer.batch_timeout_seconds`, and what
        `learner` raises.
        """
        taken: list[ReadyGroup] = []
        computed = last = 0.0
        learner.begin(self._state.newest)
        while True:
            decision = self._poll_until(stop, lambda: self._builder.next_streamed(taken))
            if decision is None:
                return None
            if decision.next_group is None:
                return PolledBatch(decision, computed, computed - last)
            began = time.monotonic()
            learner.add(decision.next_group.samples)
            taken.append(decision.next_group)
            last = time.monotonic() - began
            computed += last

    def _poll_until(self, stop: threading.Event, decide: Callable[[], Decision]) -> Decision | None:
        since = aside_at = time.monotonic()
        decided_on: tuple[int, int, int, int] | None = None
        decision = None
        self._poll(0.0)
        while not stop.is_set():
            self._check()
            state = self._state
            known = (state.newest, state.complete_total, state.outstanding_total, state.known_to)
            # Records of trajectories come by the thousand, and few of them complete a group.
            if decision is None or known != decided_on:
                decision, decided_on = decide(), known
            if decision.blocked is None:
                return decision
            now = time.monotonic()
            if decision.set_aside and now - aside_at >= SET_ASIDE_SECONDS:
                # Committed by itself, or an environment where all fails would fill the window.
                self._set_aside(decision.set_aside)
                aside_at = now
                continue
            if now - since > self._timeout:
                common = self._common_reason()
                aside = "" if common is None else f"; groups set aside since, {common.text}"
                raise DeadlineError(
                    f"no batch became admissible in {self._timeout:g} s at version "
                    f"{self._state.newest}: {decision.blocked.reason} "
                    f"({self._builder.outstanding_text()}){aside}",
                    hint="See which processes live with `dora status`; a longer wait is "
                    "trainer.batch_timeout_seconds.",
                )
            self._heartbeat.metrics = {
                "outstanding": float(self._state.outstanding_total),
                "complete_groups": float(self._state.complete_total),
            }
            self._heartbeat.report("waiting", decision.blocked.reason)
            self._poll(SET_ASIDE_SECONDS)
        return None
