"""Weights that somebody needs are never deleted."""

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dora.core.processes import WeightUser, allowed_silence, needless, weight_user
from tests import factories

VERSIONS = st.integers(-1, 40)
USERS = st.lists(st.builds(WeightUser, VERSIONS, VERSIONS, st.floats(0, 100)), max_size=6)


@given(
    stored=st.sets(st.integers(0, 40)),
    newest=st.integers(0, 40),
    staleness=st.integers(0, 8),
    keep=st.integers(1, 4),
    users=USERS,
    now=st.floats(0, 100),
)
def test_what_window_redo_or_a_live_worker_needs_is_never_deleted(
    stored: set[int],
    newest: int,
    staleness: int,
    keep: int,
    users: list[WeightUser],
    now: float,
) -> None:
    gone = needless(stored, newest, staleness, keep, users, now)
    assert gone <= stored
    # the window generates, the newest is what a redo is compared with
    assert gone.isdisjoint(range(newest - staleness, newest + 1))
    assert gone.isdisjoint(range(newest - staleness - keep, newest + 1))
    for user in users:
        if user.until >= now:
            assert user.holds not in gone and user.loads not in gone
    # and nothing else is kept, so the store stays bounded
    used = {v for user in users if user.until >= now for v in (user.holds, user.loads)}
    assert all(v >= newest - staleness - keep or v in used for v in stored - gone)


@given(state=st.sampled_from(["starting", "loading", "ready"]), loading=VERSIONS, version=VERSIONS)
def test_a_worker_that_downloads_may_be_silent_as_long_as_loading_may_take(
    state: str, loading: int, version: int
) -> None:
    status = factories.status("w0", state, version=version, loading=loading)
    user = weight_user(status, 5.0, heartbeat_timeout=3.0, load_timeout=60.0)
    assert user is not None and (user.holds, user.loads) == (version, loading)
    slow = state != "ready" or loading >= 0
    assert user.until == (65.0 if slow else 8.0)
    stored = {v for v in (version, loading) if v >= 0}
    assert not needless(stored, 100, 1, 1, [user], user.until)
    assert needless(stored, 100, 1, 1, [user], user.until + 0.1) == stored


def test_how_long_a_process_may_be_silent() -> None:
    def allowed(*, switching: bool = False, longest: float = 60.0, **status: Any) -> float:
        return allowed_silence(
            factories.status("w0", status.pop("state", "ready"), **status),
            heartbeat_timeout=3.0,
            load_timeout=longest,
            switching=switching,
        )

    assert allowed() == allowed(state="waiting") == allowed(state="training") == 3.0
    assert allowed(state="starting") == allowed(state="loading") == 60.0
    assert allowed(loading=0) == 60.0, "an adapter is loaded while others generate"
    assert allowed(switching=True) == 60.0, "what it was told has not shown in a status yet"
    assert allowed(state="loading", longest=1.0) == 3.0, "loading never shortens it"
    assert allowed(state="stopped", loading=4) == allowed(state="failed", switching=True) == inf


def test_who_has_ended_or_generates_nothing_needs_no_weights() -> None:
    for process, state in (("w0", "stopped"), ("w0", "failed"), ("coordinator", "ready")):
        status = factories.status(process, state, version=3, loading=4)
        assert weight_user(status, 0.0, heartbeat_timeout=3.0, load_timeout=60.0) is None
