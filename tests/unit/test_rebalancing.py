"""Moving requests between workers: whole workers come free, memory is relieved, no thrashing."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.estimates import FASTEST, Speeds
from dora.core.scheduling.pending import PendingQueue
from dora.core.scheduling.pool import Pool, WorkerView
from dora.core.scheduling.prefixes import Prefix
from dora.core.scheduling.rebalancing import Rebalancing, shares
from dora.core.scheduling.scheduler import Decision, Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.scheduling.workers import lease_name
from dora.core.window import Window
from dora.schemas.records import (
    Chunk,
    Command,
    Record,
    Status,
    pack_tokens,
)
from tests.factories import admission, chunk_of, run_started, step, trajectory

CAPACITY = 4


def pool_of(*workers: WorkerView, newest: int = 5) -> Pool:
    pool = Pool()
    pool.turn_to(newest)
    for worker in workers:
        pool.put(worker)
    return pool


def emptied(pool: Pool, demand: int = 100, settled: float = float("-inf")) -> list[str]:
    made = Rebalancing(30.0, 0.9).consolidate(
        pool, PendingQueue(), newest=5, demand=demand, quiet_since=lambda name: settled, now=100.0
    )
    return [each.worker for each in made]


def test_the_least_loaded_worker_is_emptied_once_the_others_have_room_for_its_requests() -> None:
    full = [WorkerView("a", 4, 8, 6), WorkerView("b", 4, 8, 7), WorkerView("c", 4, 8, 4)]
    assert emptied(pool_of(*full)) == [], "three places are free, four are needed"
    assert emptied(pool_of(*full[:2], WorkerView("c", 4, 8, 3))) == ["c"]


def test_several_workers_are_emptied_at_once_where_the_rest_has_room() -> None:
    views = [WorkerView(name, 4, 8, 2) for name in "abcd"]
    assert emptied(pool_of(*views)) == ["a", "b", "c"]


def test_the_last_worker_of_a_version_and_the_newest_version_are_left_alone() -> None:
    assert emptied(pool_of(WorkerView("a", 4, 8, 1))) == []
    assert emptied(pool_of(WorkerView("a", 5, 8, 1), WorkerView("b", 5, 8, 1))) == []


def test_no_worker_is_emptied_for_a_newest_version_that_has_no_use_for_it() -> None:
    pool = pool_of(WorkerView("a", 4, 8, 1), WorkerView("b", 4, 8, 1), WorkerView("c", 5, 8, 2))
    assert emptied(pool, demand=6) == []
    assert emptied(pool, demand=12) == ["a"]


def test_a_worker_that_just_got_a_version_or_requests_is_left_alone_for_a_period() -> None:
    pool = pool_of(WorkerView("a", 4, 8, 1), WorkerView("b", 4, 8, 1))
    assert emptied(pool, settled=80.0) == []
    assert emptied(pool, settled=60.0) == ["a"]


def test_shares_follow_the_unfinished_requests_and_the_newest_gets_what_is_left() -> None:
    assert shares({3: 30, 4: 10, 5: 400}, 5, 80, 8.0) == {3: 3.0, 4: 1.0, 5: 4.0}
    assert shares({4: 10, 5: 10}, 5, 80, 8.0) == {4: 4.0, 5: 4.0}
    assert shares({4: 0, 5: 0}, 5, 80, 8.0) == {4: 0.0, 5: 0.0}


def test_where_workers_are_fewer_than_versions_the_oldest_is_served_first() -> None:
    pool = pool_of(WorkerView("a", 5, 8, 8), WorkerView("b", 4, 8, 8))
    balance = Rebalancing(30.0, 0.9)
    assert [e.worker for e in balance.evict(pool, [2, 3], 5)] == ["a", "b"]
    pool.put(replace(pool.view("a"), leaving=True))
    assert [e.worker for e in balance.evict(pool, [2], 5)] == [], "one is on its way"
    assert balance.evict(pool_of(WorkerView("a", 3, 8, 8)), [4], 5) == [], (
        "an older one comes first"
    )


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -5.0, 0.0, 1e12, 1e-9])
def test_a_nonsense_rate_changes_no_speed(nonsense: float) -> None:
    speeds = Speeds()
    for _ in range(20):
        speeds.observe("a", 100.0, 4)
        speeds.observe("b", 100.0, 4)
        speeds.observe("a", nonsense, 4)
    assert speeds.of("a") == speeds.of("b") == 1.0


def test_a_worker_is_as_fast_as_its_peers_of_equal_load_say() -> None:
    speeds = Speeds()
    for _ in range(60):
        for name, factor in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
            speeds.observe(name, 400.0 * factor, 4)
            speeds.observe(name, 1600.0 * factor, 64)
    assert 1.75 <= speeds.of("a") / speeds.of("b") <= 2.25
    assert speeds.of("b") == speeds.of("c")
    assert speeds.of("nobody") == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(), st.integers(-1, 300))))
@example([("a", 5e-324, 2), ("a", 1.0, 2)])
@example([("a", 1e308, 2), ("b", 50.0, 2)])
def test_speeds_stay_within_bounds_whatever_is_reported(
    reports: list[tuple[str, float, int]],
) -> None:
    speeds = Speeds()
    for name, rate, running in reports:
        speeds.observe(name, rate, running)
        assert 0 < speeds.of(name) <= FASTEST


class Cluster:
    """A coordination with workers that do at once what they are told, at a second a tick."""

    def __init__(self, workers: int, schedule: Schedule, capacity: int = CAPACITY) -> None:
        rules = Rules(Window(3, 4), group_size=2, steps=50, heartbeat_timeout=10, schedule=schedule)
        self.core = Coordination(rules, "me")
        self.core.handle(run_started(), 0, 0, now=0.0)
        self.now = 0.0
        self.capacity = capacity
        self.versions = {f"w{i}": -1 for i in range(workers)}
        self.running: dict[str, dict[str, int]] = {name: {} for name in self.versions}
        self.commands: dict[str, Command] = {}
        self.metrics: dict[str, dict[str, float]] = {name: {} for name in self.versions}
        self.hands_over = True

    def tick(self, seconds: float = 1.0) -> list[Record]:
        self.now += seconds
        for name in self.versions:
            self.say(name)
        decision = self.core.decide(self.now)
        records = self.records(decision)
        self.core.committed(decision, records, self.now)
        for record in records:
            if isinstance(record, Command):
                self.carry_out(record)
        for identity in list(self.core.scans):
            self.core.scanned(identity, Prefix())
        return records

    def say(self, name: str) -> None:
        running = tuple(lease_name(i, n) for i, n in self.running[name].items())
        status = Status(
            "r", name, "rollout", name, "ready", 0, version=self.versions[name],
            capacity=self.capacity, running=running, metrics=self.metrics[name],
        )  # fmt: skip
        self.core.handle(status, 0, 0, now=self.now)

    def records(self, decision: Decision) -> list[Record]:
        made: list[Record] = [admission(a.ordinal, a.version) for a in decision.plan.admissions]

        def command(worker: Status, kind: str, **fields: object) -> Command:
            return Command("r", worker.process, worker.incarnation, kind, 0, **fields)  # type: ignore[arg-type]

        for each in decision.moves:
            made.append(
                command(each.worker, "move", trajectory_id=each.trajectory_id, attempt=each.attempt)
            )
        for switch in decision.plan.switches:
            worker = decision.addressees[switch.worker]
            made.append(command(worker, "switch", policy_version=switch.version))
        for start in decision.plan.starts:
            work = start.work
            made.append(
                command(
                    decision.addressees[start.worker], "start", group_id=work.group_id,
                    trajectory_id=f"{work.group_id}/{work.sample}", sample=work.sample,
                    attempt=work.attempt, policy_version=work.version, ordinal=work.ordinal,
                    prefix_token_ids=work.prefix_token_ids, prefix_logprobs=work.prefix_logprobs,
                )
            )  # fmt: skip
        return made

    def carry_out(self, command: Command) -> None:
        name = command.worker
        match command.kind:
            case "start":
                assert command.policy_version == self.versions[name], "another version"
                self.running[name][command.trajectory_id] = command.attempt
                self.commands[command.trajectory_id] = command
                assert len(self.running[name]) <= self.capacity
            case "switch":
                assert not self.running[name], "it holds work"
                self.versions[name] = command.policy_version
            case "move":
                del self.running[name][command.trajectory_id]
                if self.hands_over:
                    self.core.handle(self.handover(command.trajectory_id), 0, 0, now=self.now)

    def handover(self, identity: str, tokens: int = 3) -> Chunk:
        start = self.commands[identity]
        group = admission(start.ordinal, start.policy_version)
        fields = {"attempt": start.attempt, "last": True, "worker": start.worker}
        return chunk_of(group, start.sample, 0, 0, range(tokens), **fields)

    def finish(self, name: str, count: int) -> None:
        for identity in list(self.running[name])[:count]:
            del self.running[name][identity]
            start = self.commands[identity]
            group = admission(start.ordinal, start.policy_version)
            self.core.handle(trajectory(group, start.sample), 0, 0, now=self.now)

    def newer(self) -> None:
        """Another version is committed; it trains nothing that matters here."""
        newest = self.core.state.newest
        made = step(newest, newest, [admission(99, 0)], {"g99/0": (0, 0), "g99/1": (0, 0)})
        self.core.handle(replace(made, trained=()), 0, 0, now=self.now)


def draining(hands_over: bool = True, **schedule: object) -> Cluster:
    """Two full workers at version 0, both half done when version 1 comes."""
    cluster = Cluster(2, Schedule(rebalance_seconds=5.0, **schedule))  # type: ignore[arg-type]
    cluster.hands_over = hands_over
    cluster.tick()
    cluster.tick()
    assert [len(running) for running in cluster.running.values()] == [4, 4]
    cluster.newer()
    for _ in range(6):
        assert not [r for r in cluster.tick() if isinstance(r, Command)]
    cluster.finish("w0", 3)
    cluster.finish("w1", 1)
    return cluster


def test_a_freed_worker_goes_to_the_newest_version_and_its_requests_go_on_elsewhere() -> None:
    cluster = draining()
    moved = next(iter(cluster.running["w0"]))
    cluster.tick()
    assert cluster.core.migrations == 1 and cluster.core.takeovers == 0
    cluster.tick()
    assert cluster.running["w1"][moved] == 1
    resumed = cluster.commands[moved]
    assert resumed.attempt == 1 and resumed.prefix_token_ids == pack_tokens([0, 1, 2])
    assert cluster.versions == {"w0": 1, "w1": 0}
    cluster.tick()
    assert len(cluster.running["w0"]) == 4, "it generates under the newest version"


def test_without_migration_nothing_moves() -> None:
    cluster = draining(migration=False)
    for _ in range(20):
        cluster.tick()
    assert cluster.versions == {"w0": 0, "w1": 0} and not cluster.core.migrations


def test_a_handover_that_does_not_come_costs_a_scan_after_the_timeout_and_no_trajectory() -> None:
    cluster = draining(hands_over=False)
    moved = next(iter(cluster.running["w0"]))
    for _ in range(9):
        cluster.tick()
    hold = cluster.core.workers.held(moved)
    assert hold is not None and hold.moving
    for _ in range(4):
        cluster.tick()
    assert (cluster.core.takeovers, cluster.core.migrations) == (1, 0)
    assert any(moved in running for running in cluster.running.values())


def test_a_handover_that_comes_late_is_as_good() -> None:
    cluster = draining(hands_over=False)
    moved = next(iter(cluster.running["w0"]))
    cluster.tick()
    for _ in range(11):
        cluster.now += 1
        for name in cluster.versions:
            cluster.say(name)
        cluster.core.decide(cluster.now)
    assert moved in cluster.core.scans
    cluster.core.handle(cluster.handover(moved), 0, 0, now=cluster.now)
    assert cluster.core.pending[moved].attempt == 1 and not cluster.core.scans
    cluster.core.handle(cluster.handover(moved), 0, 0, now=cluster.now)
    assert cluster.core.migrations == 1, "it counts once"


def test_a_move_whose_source_dies_is_taken_over_from_the_chunks() -> None:
    cluster = draining(hands_over=False)
    moved = next(iter(cluster.running["w0"]))
    cluster.tick()
    gone = Status("r", "w0", "rollout", "w0", "failed", 0, version=0, capacity=4)
    cluster.core.handle(gone, 0, 0, now=cluster.now)
    cluster.core.decide(cluster.now)
    assert moved in cluster.core.scans


def test_a_migration_whose_target_dies_is_taken_over() -> None:
    cluster = draining()
    moved = next(iter(cluster.running["w0"]))
    cluster.tick()
    cluster.tick()
    assert moved in cluster.running["w1"]
    gone = Status("r", "w1", "rollout", "w1", "failed", 0, version=0, capacity=4)
    cluster.core.handle(gone, 0, 0, now=cluster.now)
    cluster.core.decide(cluster.now)
    assert cluster.core.scans[moved].attempt == 2


def test_moves_do_not_count_as_attempts_that_nobody_survives() -> None:
    cluster = draining()
    workers, identity = cluster.core.workers, next(iter(cluster.running["w0"]))
    for attempt in range(7):
        workers.on_command(
            Command("r", "w0", "w0", "move", 0, trajectory_id=identity, attempt=attempt), 0.0
        )
    assert workers.moved(identity, 0) == 7
    cluster.core.scans[identity] = replace(
        cluster.core.pending.get(identity) or _work(cluster, identity), attempt=7
    )
    cluster.core.scanned(identity, Prefix())
    assert identity not in cluster.core.given_up


def _work(cluster: Cluster, identity: str):  # type: ignore[no-untyped-def]
    work = cluster.core._unheld(identity)
    assert work is not None
    return work


def test_a_worker_whose_memory_runs_high_gives_some_requests_away_once_a_period() -> None:
    cluster = Cluster(2, Schedule(rebalance_seconds=20.0, memory_threshold=0.8), capacity=16)
    cluster.tick()
    cluster.tick()
    before = {name: len(running) for name, running in cluster.running.items()}
    assert before == {"w0": 16, "w1": 16}
    cluster.finish("w1", 8)
    cluster.metrics["w0"] = {"kv_used_share": 0.9}
    records = cluster.tick()
    moves = [r for r in records if isinstance(r, Command) and r.kind == "move"]
    assert {move.worker for move in moves} == {"w0"}
    assert 1 <= len(moves) <= 5
    cluster.tick()
    assert len(cluster.running["w0"]) == 16 - len(moves)
    for _ in range(10):
        assert not [r for r in cluster.tick() if isinstance(r, Command) and r.kind == "move"]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=12),
    st.booleans(),
)
def test_a_state_that_does_not_change_comes_to_rest(
    workers: int, events: list[tuple[int, int, bool]], hands_over: bool
) -> None:
    cluster = Cluster(workers, Schedule(rebalance_seconds=3.0))
    cluster.hands_over = hands_over
    for worker, count, newer in events:
        cluster.finish(f"w{worker % workers}", count)
        if newer and cluster.core.state.newest < 3:
            cluster.newer()
        cluster.tick()
    for _ in range(60):
        cluster.tick()
    for _ in range(15):
        records = [r for r in cluster.tick() if isinstance(r, Command)]
        assert not records, "nothing happened, and something moved"
    started = cluster.core.state.unfinished()
    versions = sorted({group.version for group, _ in started})
    hosted = set(cluster.versions.values())
    assert not versions or versions[0] in hosted, "the oldest unfinished version starves"
