"""The fold gives the same state however the topics interleave."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core import ring
from dora.core.groups import CommonReason, ReasonTally, SetAsideStreak
from dora.core.state import Finished, Group, RunState
from dora.core.window import Window, pick_batch
from dora.schemas.records import Admission, GroupRef, Purpose, SampleRef, Step
from tests.factories import G as SIZE
from tests.factories import admission, step

WINDOW = Window(1, 2)
RING, LANES = 3, 2


def evaluation(ordinal: int, version: int = 0) -> Admission:
    return admission(ordinal, version, purpose="eval")


def finished(
    group_id: str,
    sample: int,
    version: int = 0,
    *,
    offset: int = 0,
    attempt: int = 0,
    reward: float | None = 1.0,
    purpose: Purpose = "train",
) -> Finished:
    return Finished(
        trajectory_id=ring.trajectory_id(group_id, sample),
        group_id=group_id,
        sample=sample,
        attempt=attempt,
        policy_version=version,
        purpose=purpose,
        reward=reward,
        error=None if reward is not None else "verifier failed",
        generated_tokens=5 + sample,
        finish_reason="stop",
        worker="w",
        partition=ring.partition(version, group_id, RING, LANES),
        offset=offset,
    )


def refer(group: Group, reason: str | None = None) -> GroupRef:
    samples = tuple(
        SampleRef(sample, each.attempt, each.partition, each.offset)
        for sample, each in sorted(group.samples.items())
    )
    return GroupRef(group.group_id, group.ordinal, group.version, samples, reason)


def entry(
    sequence: int, version: int, trained: tuple[GroupRef, ...], aside: tuple[GroupRef, ...] = ()
) -> Step:
    made = step(sequence, version, trained, aside=aside)
    return made if trained else replace(made, kind="set_aside", version_out=version)


@pytest.fixture
def state() -> RunState:
    return RunState(WINDOW, SIZE)


def fill(state: RunState, ordinal: int, version: int = 0) -> GroupRef:
    """Admit and finish a train group."""
    state.admit(admission(ordinal, version))
    for sample in range(SIZE):
        assert state.finish(finished(f"g{ordinal}", sample, version, offset=sample)) == "counted"
    return refer(state.groups[f"g{ordinal}"])


def test_a_new_run_is_empty_until_version_0_is_committed(state: RunState) -> None:
    assert (state.newest, state.next_ordinal, state.outstanding_total) == (-1, 0, 0)
    state.start()
    state.start()
    assert state.newest == 0
    assert state.last_step is None


def test_groups_become_complete_and_leave_with_their_step(state: RunState) -> None:
    refs = [fill(state, ordinal) for ordinal in range(2)]
    state.admit(admission(2))
    assert state.finish(finished("g2", 1)) == "counted"
    assert [group.group_id for group in state.complete_groups()] == ["g0", "g1"]
    assert [(group.group_id, missing) for group, missing in state.unfinished()] == [("g2", (0,))]
    assert state.outstanding == {0: 3}
    state.commit(entry(0, 0, tuple(refs)))
    assert state.newest == 1
    assert state.outstanding == {0: 1}
    assert list(state.groups) == ["g2"]
    assert state.complete_groups() == []
    assert state.live_versions() == [0]
    assert state.counters.trained_groups == 2
    assert state.last_step is not None and state.last_step.sequence == 0


def test_an_unfinished_group_can_be_set_aside(state: RunState) -> None:
    state.admit(admission(0))
    state.commit(entry(0, 0, (), (GroupRef("g0", 0, 0, (), "gave up"),)))
    assert state.newest == 0
    assert state.outstanding == {}
    assert state.unfinished() == [] and state.live_versions() == []
    assert state.counters.set_aside_groups == 1


def test_the_first_finished_record_counts_and_later_ones_are_ignored(state: RunState) -> None:
    state.admit(admission(0))
    first = finished("g0", 0, offset=4)
    assert state.finish(first) == "counted"
    assert state.finish(finished("g0", 0, offset=9, attempt=1, reward=0.0)) == "duplicate"
    assert state.finish(first) == "duplicate"  # read again: no second record
    assert state.groups["g0"].samples[0] == first
    assert state.counters.duplicates == 1
    assert state.counters.trajectories == 1


def test_records_of_committed_groups_are_late(state: RunState) -> None:
    refs = fill(state, 0), fill(state, 1)
    state.commit(entry(0, 0, refs))
    assert state.finish(finished("g0", 0, offset=9, attempt=1)) == "late"
    assert state.counters.late == 1
    assert state.groups == {}


def test_records_of_another_version_sample_or_name_are_foreign(state: RunState) -> None:
    state.admit(admission(0))
    assert state.finish(finished("g0", 0, version=1)) == "foreign"
    assert state.finish(finished("g0", SIZE)) == "foreign"
    assert state.finish(replace(finished("g0", 0), trajectory_id="g0/1")) == "foreign"
    assert state.counters.foreign == 3
    assert not state.groups["g0"].samples


def test_who_reads_the_ledger_of_a_long_run_first_counts_its_trajectories_all_the_same(
    state: RunState,
) -> None:
    groups = WINDOW.groups_per_step
    lasting = RunState(WINDOW, SIZE, lasting=True)
    for version in range(5 * WINDOW.max_staleness):
        refs = tuple(fill(state, version * groups + each, version) for each in range(groups))
        step = entry(version, version, refs)
        state.commit(step)
        lasting.commit(step)
    count = state.next_ordinal
    for ordinal in range(count):
        lasting.admit(admission(ordinal, ordinal // groups))
    for _ in range(2):
        for ordinal in range(count):
            for sample in range(SIZE):
                lasting.finish(finished(f"g{ordinal}", sample, ordinal // groups, offset=sample))
    assert lasting.counters.trajectories == state.counters.trajectories == count * SIZE
    assert lasting.counters.late == count * SIZE, "read a second time"
    assert lasting.outstanding_total == 0


def test_a_trajectory_waits_for_its_admission(state: RunState) -> None:
    assert state.finish(finished("g0", 0)) == "unknown"
    assert state.finish(finished("g0", 0, offset=3)) == "unknown"
    assert state.counters.trajectories == 0
    state.admit(admission(0))
    assert list(state.groups["g0"].samples) == [0]
    assert state.counters.trajectories == 1
    assert state.counters.duplicates == 1


def test_a_group_that_the_ledger_named_first_is_never_outstanding(state: RunState) -> None:
    whole = RunState(WINDOW, SIZE)
    refs = fill(whole, 0), fill(whole, 1)
    state.commit(entry(0, 0, refs))
    state.admit(admission(0))
    state.admit(admission(1))
    assert state.outstanding_total == 0
    assert state.next_ordinal == 2
    assert state.finish(finished("g0", 0, offset=0)) == "late"  # counted, as the ledger says
    assert state.finish(finished("g0", 0, offset=7)) == "late"
    assert state.counters.trajectories == 1
    assert state.counters.late == 1


def test_failure_names_the_first_sample_without_reward(state: RunState) -> None:
    state.admit(admission(0))
    state.finish(finished("g0", 1, reward=None))
    group = state.groups["g0"]
    assert group.failure == "verifier failed"
    assert not group.complete
    state.finish(finished("g0", 0, reward=0.5))
    assert group.complete
    assert group.rewards == (0.5, None)
    assert group.candidate.ordinal == 0


def test_evaluations_are_tallied_and_do_not_count_in_the_window() -> None:
    state = RunState(WINDOW, SIZE, success_threshold=0.5)
    for ordinal in range(4):
        state.admit(evaluation(ordinal))
    for ordinal, reward in enumerate((0.5, 0.25, None)):
        outcome = state.finish(finished(f"e0-{ordinal}", 0, reward=reward, purpose="eval"))
        assert outcome == "counted"
    assert state.finish(finished("e0-0", 0, offset=8, purpose="eval")) == "late"
    tally = state.evaluations[0]
    assert (tally.admitted, tally.finished, tally.successes, tally.failed) == (4, 3, 1, 1)
    assert tally.success_rate == pytest.approx(1 / 2), "of the scored, as the mean reward"
    assert tally.reward_mean == pytest.approx(0.375)
    assert not tally.complete
    assert state.outstanding_total == 0 and state.live_versions() == []
    assert state.complete_groups() == []
    assert [group.group_id for group, _ in state.unfinished(0)] == ["e0-3"]
    assert state.next_ordinal == 0


def test_unfinished_groups_come_by_version(state: RunState) -> None:
    state.admit(admission(0, version=0))
    state.admit(admission(1, version=1))
    state.admit(evaluation(0, version=0))
    assert [group.group_id for group, _ in state.unfinished()] == ["g0", "e0-0", "g1"]
    assert [group.group_id for group, _ in state.unfinished(1)] == ["g1"]
    assert state.unfinished(7) == []
    assert state.live_versions() == [0, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (admission(1, version=3), "a second time"),
        (replace(admission(0, version=3), group_id="x"), "ordinal 0 again"),
        (admission(2, version=1), "after one of version 3"),
        (evaluation(0), "a second time"),
        (replace(admission(2, version=3), group_size=0), "size 0"),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(
    state: RunState, record: Admission, message: str
) -> None:
    state.admit(evaluation(0))
    state.finish(finished("e0-0", 0, purpose="eval"))
    state.admit(admission(0, version=3))
    state.admit(admission(1, version=3))
    with pytest.raises(ValueError, match=message):
        state.admit(record)
    assert state.outstanding == {3: 2}


Forge = Callable[[Step], Step]


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda step: replace(step, sequence=2), "where 1 is due"),
        (lambda step: replace(step, version_in=0, version_out=1), "1 to 2 is due"),
        (lambda step: replace(step, version_out=3), "1 to 2 is due"),
        (lambda step: replace(step, kind="set_aside"), "1 to 1 is due"),
        (lambda step: replace(step, trained=(GroupRef("g0", 0, 0, ()),)), "named before"),
        (lambda step: replace(step, set_aside=step.trained), "named before"),
        (lambda step: replace(step, trained=(GroupRef("e0-0", 0, 0, ()),)), "eval group"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(
    state: RunState, forge: Forge, message: str
) -> None:
    refs = [fill(state, ordinal) for ordinal in range(4)]
    state.admit(evaluation(0))
    state.commit(entry(0, 0, tuple(refs[:2])))
    before = summary(state)
    step = entry(1, 1, tuple(refs[2:]))
    with pytest.raises(ValueError, match=message):
        state.commit(forge(step))
    assert summary(state) == before
    state.commit(step)
    assert state.newest == 2


def test_memory_is_bounded_by_the_window(state: RunState) -> None:
    for version in range(200):
        refs = fill(state, 2 * version, version), fill(state, 2 * version + 1, version)
        state.finish(finished(f"x{version}", 0, version))  # never admitted
        state.commit(entry(version, version, refs))
    assert state.finish(finished("g0", 0, 0, offset=99)) == "late"
    kept = [state._closed, state._closed_by_version, state._pending, state._ahead, state._awaited]
    assert all(len(each) <= 2 * (2 * WINDOW.max_staleness + 4) for each in kept)
    assert state.groups == {}


def summary(state: RunState) -> dict[str, Any]:
    """Everything of a state that must not depend on how topics interleave."""
    counters = state.counters
    return {
        "newest": state.newest,
        "last": state.last_step,
        "next": state.next_ordinal,
        "outstanding": dict(state.outstanding),
        "total": state.outstanding_total,
        "groups": {group_id: dict(group.samples) for group_id, group in state.groups.items()},
        "complete": [group.group_id for group in state.complete_groups()],
        "unfinished": [(group.group_id, missing) for group, missing in state.unfinished()],
        "live": state.live_versions(),
        "evaluations": {
            version: (each.admitted, each.finished, each.successes, each.failed, each.reward_sum)
            for version, each in state.evaluations.items()
        },
        "surplus": counters.duplicates + counters.late,
        "counters": (
            counters.trajectories,
            counters.generated_tokens,
            counters.foreign,
            counters.trained_groups,
            counters.set_aside_groups,
        ),
    }


Topic = list[Admission | Finished | Step]


@dataclass
class Simulation:
    """A made-up run that keeps the rules; its topics, each in order.

    It ends before a version leaves the memory for late records: until then order is irrelevant.
    """

    rng: random.Random
    state: RunState = field(default_factory=lambda: RunState(WINDOW, SIZE))
    journal: Topic = field(default_factory=list)
    ledger: Topic = field(default_factory=list)
    partitions: list[Topic] = field(default_factory=lambda: [[] for _ in range(RING * LANES)])

    def run(self, actions: int) -> None:
        self.state.start()
        for _ in range(actions):
            self.rng.choice([self.admit, self.evaluate, *[self.finish] * 4, self.step])()

    def admit(self) -> None:
        if WINDOW.admits(self.state.outstanding_total):
            self.journal.append(admission(self.state.next_ordinal, self.state.newest))
            self.state.admit(self.journal[-1])  # type: ignore[arg-type]

    def evaluate(self) -> None:
        tally = self.state.evaluations.get(self.state.newest)
        ordinal = tally.admitted if tally else 0
        if ordinal < 3:
            self.journal.append(evaluation(ordinal, self.state.newest))
            self.state.admit(self.journal[-1])  # type: ignore[arg-type]

    def finish(self) -> None:
        """Mostly a missing sample; now and then any other, or one under a wrong version."""
        if not self.journal:
            return
        unfinished = self.state.unfinished()
        if unfinished and self.rng.random() < 0.8:
            group, missing = self.rng.choice(unfinished)
            group_id, version, purpose = group.group_id, group.version, group.purpose
            sample = self.rng.choice(missing)
        else:
            started = self.rng.choice(self.journal[-8:])
            assert isinstance(started, Admission)
            group_id, purpose = started.group_id, started.purpose
            version = started.policy_version + (self.rng.random() < 0.3)
            sample = self.rng.randrange(started.group_size)
        partition = self.partitions[ring.partition(version, group_id, RING, LANES)]
        record = finished(
            group_id,
            sample,
            version,
            offset=len(partition),
            attempt=self.rng.randrange(3),
            reward=None if self.rng.random() < 0.07 else self.rng.choice([0.0, 0.5, 1.0]),
            purpose=purpose,
        )
        partition.append(record)
        assert self.state.finish(record) != "unknown"

    def step(self) -> None:
        groups = self.state.complete_groups()
        aside = [group for group in groups if group.failure]
        outstanding = dict(self.state.outstanding)
        for group in aside:
            outstanding[group.version] -= 1
        batch = pick_batch(
            WINDOW,
            self.state.newest,
            [group.candidate for group in groups if not group.failure],
            outstanding,
        )
        trained = tuple(
            refer(self.state.groups[each.group_id])
            for each in (batch if isinstance(batch, tuple) else ())
        )
        last = 2 * WINDOW.max_staleness + 2
        if (trained and self.state.newest < last) or (aside and not trained):
            set_aside = tuple(refer(group, group.failure) for group in aside)
            step = entry(len(self.ledger), self.state.newest, trained, set_aside)
            self.ledger.append(step)
            self.state.commit(step)


def feed(state: RunState, record: Admission | Finished | Step) -> None:
    match record:
        case Admission():
            state.admit(record)
        case Finished():
            state.finish(record)
        case Step():
            state.commit(record)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 200), st.booleans())
def test_any_interleaving_of_the_topics_gives_the_same_state(
    seed: int, actions: int, one_by_one: bool
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(rng)
    simulation.run(actions)
    topics = [list(t) for t in (simulation.journal, simulation.ledger, *simulation.partitions)]
    rng.shuffle(topics)
    state = RunState(WINDOW, SIZE)
    state.start()
    while topics := [topic for topic in topics if topic]:
        topic = topics[0] if one_by_one else rng.choice(topics)
        feed(state, topic.pop(0))
    assert summary(state) == summary(simulation.state)


def test_simulated_runs_reach_steps_groups_set_aside_and_surplus() -> None:
    simulation = Simulation(random.Random(1))
    simulation.run(200)
    counters = simulation.state.counters
    assert simulation.state.newest >= 2
    assert counters.set_aside_groups and counters.late and counters.duplicates
    assert counters.foreign and simulation.state.evaluations


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_trajectories_seen_again_change_nothing_but_the_surplus(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    simulation.run(150)
    before = summary(simulation.state)
    for partition in simulation.partitions:
        for record in partition:
            assert isinstance(record, Finished)
            assert simulation.state.finish(record) in ("duplicate", "late", "foreign")
    after = summary(simulation.state)
    for volatile in ("surplus", "counters"):
        before.pop(volatile)
        after.pop(volatile)
    assert after == before


def test_a_streak_counts_reasons_that_differ_in_numbers_as_one_until_a_group_is_trained() -> None:
    streak = SetAsideStreak()
    assert streak.reasons.commonest is None
    for ordinal in range(3):
        ref = GroupRef(f"g{ordinal}", ordinal, 0, (), f"KeyError: 'answer' in row {ordinal}")
        streak.on_step(entry(ordinal, 0, (), (ref,)))
    streak.on_step(entry(3, 0, (), (GroupRef("g3", 3, 0, (), "no_signal"),)))
    assert streak.reasons.commonest == CommonReason("KeyError: 'answer' in row 0", 3, 4)
    assert streak.reasons.commonest.text == "3 of 4 because of: KeyError: 'answer' in row 0"
    streak.on_step(entry(4, 0, (GroupRef("g4", 4, 0, ()),), ()))
    assert streak.reasons.commonest is None


def test_of_endless_different_reasons_the_commonest_are_kept_and_the_rest_is_counted() -> None:
    tally = ReasonTally()
    for number in range(5_000):
        tally.add("letters " + "".join(chr(97 + int(digit)) for digit in str(number)))
    for _ in range(3):
        tally.add("letters a")
    assert tally.most(1) == (("letters a", 4), ("other reasons", 4_999))
    assert tally.commonest == CommonReason("letters a", 4, 5_003)
