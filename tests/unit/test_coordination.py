"""The coordinator's decisions: takeovers, giving up, zombies, and where a fold may begin."""

from dataclasses import replace

import pytest

from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.placement import Switch
from dora.core.scheduling.prefixes import Prefix
from dora.core.scheduling.scheduler import Rules
from dora.core.scheduling.workers import lease_name
from dora.core.window import Window
from dora.schemas.records import Command, Record, Status, pack_logprobs, pack_tokens
from tests.factories import admission, places_of, run_started, step, trajectory

WORKER = Status("r", "w0", "rollout", "one", "ready", 0, version=0, capacity=4)
OTHER = replace(WORKER, process="w1", incarnation="two")
PREFIX = Prefix(pack_tokens([4, 5]), pack_logprobs([-1, -2]), barren_since=1)


def rules(**changes: int) -> Rules:
    return replace(Rules(Window(1, 2), group_size=2, steps=5, heartbeat_timeout=10), **changes)


class Played:
    """A coordination whose decisions are committed as they come."""

    def __init__(self, given: Rules | None = None) -> None:
        self.core = Coordination(given or rules(), "me")
        self.now = 0.0
        self.core.handle(run_started(), 0, 0, now=0.0)

    def hear(self, *statuses: Status) -> None:
        for status in statuses:
            self.core.handle(status, 0, 0, now=self.now)

    def tick(self, seconds: float = 0.0) -> list[Record]:
        """Decides and commits; the records are those that the coordinator would write."""
        self.now += seconds
        decision = self.core.decide(self.now)
        records: list[Record] = [
            admission(admit.ordinal, admit.version) for admit in decision.plan.admissions
        ]
        for start in decision.plan.starts:
            status = decision.addressees[start.worker]
            work = start.work
            records.append(
                Command(
                    "r",
                    status.process,
                    status.incarnation,
                    "start",
                    0,
                    trajectory_id=f"{work.group_id}/{work.sample}",
                    group_id=work.group_id,
                    sample=work.sample,
                    attempt=work.attempt,
                    policy_version=work.version,
                    ordinal=work.ordinal,
                    prefix_token_ids=work.prefix_token_ids,
                    prefix_logprobs=work.prefix_logprobs,
                )
            )
        for each in decision.yields:
            records.append(
                Command(
                    "r",
                    each.worker.process,
                    each.worker.incarnation,
                    "yield",
                    0,
                    trajectory_id=each.trajectory_id,
                    attempt=each.attempt,
                )
            )
        self.core.committed(decision, records, self.now)
        return records

    def wait(self, seconds: int) -> None:
        """Lets time pass, tick by tick."""
        for _ in range(seconds):
            assert not self.tick(1.0)

    def starts(self, seconds: float = 0.0) -> dict[str, Command]:
        records = self.tick(seconds)
        return {r.trajectory_id: r for r in records if isinstance(r, Command) and r.kind == "start"}


def test_a_trajectory_that_was_begun_goes_on_from_its_chunks_as_a_new_attempt() -> None:
    played = Played()
    played.hear(WORKER)
    assert set(played.starts()) == {"g0/0", "g0/1", "g1/0", "g1/1"}
    played.wait(20)
    played.hear(OTHER)
    assert not played.starts(), "the chunks are read first"
    assert set(played.core.scans) == {"g0/0", "g0/1", "g1/0", "g1/1"}
    played.core.scanned("g0/0", PREFIX)
    played.core.scanned("g0/1", Prefix())
    started = played.starts()
    assert set(started) == {"g0/0", "g0/1"}
    assert started["g0/0"].attempt == 1 and started["g0/0"].prefix_token_ids == PREFIX.token_ids
    assert started["g0/0"].prefix_logprobs == PREFIX.logprobs
    assert started["g0/0"].policy_version == 0
    assert started["g0/1"].prefix_token_ids == b""
    assert (played.core.takeovers, played.core.resumed_tokens) == (2, 2)


def test_a_trajectory_that_finishes_while_its_chunks_are_read_is_not_started_again() -> None:
    played = Played()
    played.hear(WORKER)
    played.starts()
    played.wait(20)
    played.hear(OTHER)
    played.tick()
    played.core.handle(trajectory(admission(0, 0)), 0, 7, now=20.0)
    played.core.scanned("g0/0", PREFIX)
    assert "g0/0" not in played.starts()


def lose_again(played: Played, times: int, found: Prefix) -> None:
    for _ in range(times):
        played.hear(replace(WORKER, incarnation=f"at {played.now}"))
        played.starts()
        played.wait(11)
        for identity in list(played.core.scans):
            played.core.scanned(identity, found)


def test_a_trajectory_that_nobody_survives_is_given_up() -> None:
    played = Played(rules(max_attempts=3))
    lose_again(played, 2, Prefix())
    assert not played.core.given_up
    lose_again(played, 1, Prefix())
    assert {(work.group_id, work.attempt) for work in played.core.given_up.values()} == {
        ("g0", 3),
        ("g1", 3),
    }


def test_attempts_that_added_tokens_do_not_count_towards_giving_up() -> None:
    played = Played(rules(max_attempts=3))
    for attempt in range(8):
        lose_again(played, 1, replace(PREFIX, barren_since=attempt + 1))
    assert not played.core.given_up


def test_a_worker_that_was_given_up_and_speaks_again_hands_back_what_others_took_over() -> None:
    played = Played()
    played.hear(WORKER)
    played.starts()
    played.wait(20)
    played.hear(OTHER)
    played.tick()
    for identity in list(played.core.scans):
        played.core.scanned(identity, PREFIX)
    assert len(played.starts()) == 4
    frozen = replace(WORKER, running=(lease_name("g0/0", 0), lease_name("g1/1", 0)))
    played.hear(replace(OTHER, running=tuple(lease_name(i, 1) for i in ("g0/0", "g1/1"))), frozen)
    records = played.tick()
    yields = [r for r in records if isinstance(r, Command) and r.kind == "yield"]
    assert {(y.worker, y.trajectory_id, y.attempt) for y in yields} == {
        ("w0", "g0/0", 0), ("w0", "g1/1", 0),
    }  # fmt: skip
    assert played.core.workers.held("g0/0") is not None, "the other one keeps it"
    played.hear(frozen)
    assert not played.tick(), "it is told once"


def test_a_version_that_a_worker_did_not_load_because_it_left_is_not_waited_for() -> None:
    played = Played()
    played.hear(replace(WORKER, version=-1))
    switches = played.core.decide(0.0).plan.switches
    assert switches == (Switch("w0", 0, switches[0].reason),)
    played.hear(replace(WORKER, version=-1, state="loading", loading=0))
    assert played.core.workers.pool.views()[0].switching_to == 0
    played.hear(replace(WORKER, version=-1))
    assert played.core.workers.pool.views()[0].switching_to is None


def ledger(versions: int) -> tuple[list[Record], list[Record]]:
    """Journal and ledger of a run in which every group is trained by the version that made it."""
    journal = [admission(ordinal, ordinal // 2) for ordinal in range(2 * versions)]
    log = [trajectory(group, sample) for group in journal for sample in (0, 1)]
    places = places_of(log)
    steps = [step(v, v, journal[2 * v : 2 * v + 2], places) for v in range(versions)]
    return list(journal), list(steps)


def test_a_fold_that_begins_at_a_version_knows_what_a_whole_one_knows() -> None:
    journal, steps = ledger(6)
    journal += [admission(12, 6), admission(13, 6)]
    whole, late = Coordination(rules(), "a"), Coordination(rules(), "b")
    whole.handle(run_started(), 0, 0, now=0.0, live=False)
    for record in (*steps, *journal):
        whole.handle(record, 0, 0, now=0.0, live=False)
    late.state.begin_at(4)
    # the ledger from the step that made version 4; the journal from its first admission
    for record in (*steps[3:], *journal[8:]):
        late.handle(record, 0, 0, now=0.0, live=False)
    for core in (whole, late):
        core.rebuilt(0.0)
    assert late.state.newest == whole.state.newest == 6
    assert dict(late.state.outstanding) == dict(whole.state.outstanding) == {6: 2}
    assert late.state.next_ordinal == whole.state.next_ordinal == 14
    assert late.pending == whole.pending
    assert late.opened == whole.opened


def test_an_admission_of_a_closed_version_only_says_where_the_prompts_go_on() -> None:
    _, steps = ledger(6)
    late = Coordination(rules(), "b")
    late.state.begin_at(6)
    late.handle(steps[5], 0, 0, now=0.0, live=False)
    late.handle(admission(11, 5), 0, 0, now=0.0, live=False)
    late.rebuilt(0.0)
    assert late.state.next_ordinal == 12
    assert late.state.outstanding_total == 0 and not late.pending


def test_a_fold_cannot_begin_twice() -> None:
    core = Coordination(rules(), "a")
    core.handle(run_started(), 0, 0, now=0.0)
    with pytest.raises(ValueError, match="before its first record"):
        core.state.begin_at(3)


def test_a_recovered_worker_takes_no_traffic_before_its_weights_are_right() -> None:
    played = Played()
    for state, version, loading in (("ready", -1, -1), ("ready", -1, 0), ("loading", -1, 0)):
        played.hear(replace(WORKER, state=state, version=version, loading=loading))
        assert not played.starts(), (state, version)
    played.hear(replace(WORKER, state="failed", version=-1))
    assert not played.starts(), "the canary failed"
    played.hear(replace(WORKER, incarnation="again"))
    assert len(played.starts()) == 4


ME = Status("r", "coordinator", "coordinator", "me", "ready", 0)


def test_a_coordinator_that_stood_still_does_not_blame_the_workers() -> None:
    played = Played()
    played.hear(WORKER)
    played.starts()
    for _ in range(4):
        played.tick(1.0)
    played.tick(60.0)
    assert not played.core.scans, "it was itself that did not listen"
    for _ in range(12):
        played.tick(1.0)
    assert len(played.core.scans) == 4, "but now it did"


def test_silence_during_an_outage_of_the_cluster_is_nobodys_fault() -> None:
    played = Played()
    played.hear(WORKER, ME)
    played.starts()
    for _ in range(30):
        played.tick(1.0)
    assert not played.core.scans, "its own words did not come back either"
    for _ in range(12):
        played.hear(ME)
        played.tick(1.0)
    assert len(played.core.scans) == 4


def test_a_coordinator_of_a_complete_run_with_nobody_left_ends() -> None:
    played = Played(rules(steps=0))
    played.hear(replace(WORKER, state="stopped"))
    played.tick()
    played.wait(10)
    assert played.core.stopped_at is None, "somebody may be about to speak"
    played.wait(2)
    assert played.core.stopped_at is not None
