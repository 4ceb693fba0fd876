"""The trainer's knowledge at start holds what concerns the live versions, and no more."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from dora.core.state import RunState
from dora.core.window import Window
from dora.log.ledger import History, resume
from dora.schemas.records import Admission, Step
from tests import factories
from tests.factories import B, G, K


def ledger(steps: int) -> tuple[list[Admission], list[Step]]:
    """Admissions and entries of a run that trains each group one version after it began."""
    groups = [factories.admission(i, max(0, i // B - 1)) for i in range(B * (steps + 2))]
    records = [factories.trajectory(group, s) for group in groups for s in range(G)]
    places = factories.places_of(records)
    entries = [factories.step(v, v, groups[B * v : B * (v + 1)], places) for v in range(steps)]
    return groups, entries


@given(steps=st.integers(0, 9))
def test_a_resumed_state_agrees_with_the_whole_fold(steps: int) -> None:
    groups, entries = ledger(steps)
    whole, resumed = RunState(Window(K, B), G), RunState(Window(K, B), G)
    whole.start()
    for entry in entries:
        whole.commit(entry)
    oldest = whole.window.oldest_live(whole.newest)
    recent = deque(entry for entry in entries if entry.version_out >= oldest)
    resume(resumed, History(started=factories.run_started(), recent=recent))
    for group in groups:
        whole.admit(group)
        if group.policy_version >= oldest:
            resumed.admit(group)
    assert resumed.newest == whole.newest == steps
    assert resumed.last_step == whole.last_step
    assert resumed.outstanding == whole.outstanding
    assert list(resumed.groups) == list(whole.groups)
    assert resumed.next_ordinal == whole.next_ordinal


def test_nothing_is_resumed_before_the_run_has_begun() -> None:
    state = RunState(Window(K, B), G)
    resume(state, History())
    assert state.newest == -1
