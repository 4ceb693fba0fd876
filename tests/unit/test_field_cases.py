"""What went wrong in other systems, case by case, on the pure core (see `tests.protocol`).

Cases that need weights, processes or a disk are tested where these are.
"""

from dataclasses import replace

from dora.core.audit.report import AuditReport
from dora.core.groups import NO_SIGNAL
from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.scheduler import Rules
from dora.core.window import Window
from dora.schemas.records import Admission, Command, Status, Step, Trajectory
from tests.factories import admission, run_started, step
from tests.protocol.log import DISPATCH, JOURNAL, STATUSES, TRAJECTORIES
from tests.protocol.run import HEARTBEAT_TIMEOUT, ModelRun
from tests.protocol.worker import ModelWorker

TICKS = 120


def started(*workers: str, **shape: int) -> ModelRun:
    run = ModelRun(**shape)
    run.begin(*(workers or ("w0", "w1")))
    return run


def go_on(run: ModelRun, version: int, frozen: int = 0) -> None:
    """Lets the run reach a version."""
    for _ in range(TICKS):
        if run.log.newest >= version:
            return
        run.tick(frozen)
    raise AssertionError(run.stuck(version))


def proved(run: ModelRun) -> AuditReport:
    report = run.log.audit()
    assert not report.violated, report.findings
    assert report.conserved
    return report


def admitted(run: ModelRun) -> list[int]:
    journal = run.log.partitions.get(JOURNAL, [])
    return [r.ordinal for r in journal if isinstance(r, Admission) and r.purpose == "train"]


def trained(run: ModelRun) -> list[int]:
    steps = [entry for entry in run.log.ledger if isinstance(entry, Step)]
    return sorted(ref.ordinal for step in steps for ref in step.trained)


def starts(run: ModelRun, trajectory_id: str) -> list[Command]:
    return [
        record
        for place, records in run.log.partitions.items()
        if place[0] == DISPATCH
        for record in records
        if isinstance(record, Command)
        and record.kind == "start"
        and record.trajectory_id == trajectory_id
    ]


def crash_everything(run: ModelRun) -> None:
    run.trainers.clear()
    run.coordinators.clear()
    run.workers.clear()


def start_everything(run: ModelRun, *workers: str) -> None:
    run.start_trainer()
    run.start_coordinator()
    for name in workers:
        run.start_worker(name)


def test_a_data_cursor_ahead_of_the_trained_frontier_skips_and_repeats_no_prompt() -> None:
    """Prompts were handed out beyond what was trained when everything died."""
    run = started(staleness=1, batch=2, group=2)
    go_on(run, 2)
    while len(admitted(run)) <= len(trained(run)):
        run.tick()
    cursor = len(admitted(run))
    crash_everything(run)
    start_everything(run, "w0", "w1")
    go_on(run, 6)
    proved(run)
    assert admitted(run) == list(range(len(admitted(run)))), "each once, in order"
    assert set(range(cursor)) <= set(trained(run)), "what was handed out is trained"


def test_a_batch_that_was_finished_and_not_consumed_at_the_crash_is_trained_once() -> None:
    run = started(staleness=1, batch=2, group=2)
    while len(admitted(run)) < run.window.capacity or any(w.attempts for w in run.workers):
        run.tick(frozen=1)  # the trainer takes nothing
    finished = admitted(run)
    generated = {
        record.trajectory_id
        for place, records in run.log.partitions.items()
        if place[0] == TRAJECTORIES
        for record in records
        if isinstance(record, Trajectory)
    }
    assert len(generated) == 2 * len(finished) == 8, "the window is full of finished groups"
    crash_everything(run)
    run.start_trainer()  # nobody could generate anything again
    go_on(run, 2)
    assert trained(run) == finished
    assert proved(run).duplicates_ignored == 0


def test_workers_are_not_stranded_by_a_trainer_that_ends_first() -> None:
    run = started("w0", "w1", staleness=2, batch=1, group=1, steps=3)
    go_on(run, 3)
    run.trainers.clear()
    for _ in range(TICKS):
        if not run.workers and not run.coordinators:
            break
        run.tick()
    assert not run.workers, "all were told that the run is complete"
    assert not run.coordinators, "and their coordinator ended after them"
    proved(run)


def test_a_worker_that_comes_back_when_the_run_is_complete_is_told_too() -> None:
    run = started("w0", "w1", staleness=1, batch=1, group=1, steps=2)
    go_on(run, 1)
    old, dead = run.workers
    run.start_worker("w0")
    go_on(run, 2, frozen=4)
    run.workers.remove(dead)  # it never confirms, so the coordinator waits for a while
    while run.coordinators[0].core.stopped_at is None:
        run.tick(frozen=4)
    run.tick(frozen=4)
    assert run.workers == [old]
    for _ in range(5):
        run.tick()
    assert not run.workers


def test_a_worker_that_silently_never_returns_holds_nobody_up() -> None:
    run = started("w0", "w1", staleness=1, batch=2, group=2)
    while not any(len(a.tokens) >= 2 for a in run.workers[0].attempts.values()):
        run.tick()
    stuck = dict(run.workers[0].attempts)
    go_on(run, 3, frozen=4)
    proved(run)
    assert run.now < 60 * HEARTBEAT_TIMEOUT
    for trajectory_id, attempt in stuck.items():
        others = starts(run, trajectory_id)[1:]
        assert others and all(other.worker == "w1" for other in others)
        assert len(others[0].prefix_token_ids) // 4 == attempt.emitted, "none starts over"
    run.tick()  # it comes back, long given up
    go_on(run, 5)
    proved(run)


def test_a_generation_error_in_one_request_costs_its_group_and_no_more() -> None:
    run = started("w0", staleness=1, batch=1, group=2)
    while not run.workers[0].generating:
        run.tick()
    bad = run.workers[0].generating[0]
    run.workers[0].extend(bad, 1, "error")
    go_on(run, 3)
    report = proved(run)
    assert report.groups_set_aside == 1
    assert len(run.workers) == 1 and run.workers[0].incarnation == run.latest["w0"]
    aside = [ref for e in run.log.ledger if isinstance(e, Step) for ref in e.set_aside]
    assert [(ref.group_id, ref.reason) for ref in aside] == [(bad.partition("/")[0], "it failed")]


def test_an_environment_in_which_all_fails_gives_no_empty_batch_and_no_jam() -> None:
    run = started(staleness=1, batch=2, group=2)
    for _ in range(TICKS // 2):
        run.tick(reward=lambda _: None)
    report = proved(run)
    assert report.steps == 0, "nothing is trained"
    assert report.groups_set_aside > 4 * run.window.capacity, "and the window never fills up"
    go_on(run, 2)
    assert all(len(e.trained) == 2 for e in run.log.ledger if getattr(e, "kind", "") == "step")
    proved(run)


def test_an_environment_without_signal_gives_no_empty_batch_and_no_jam() -> None:
    run = started(staleness=1, batch=2, group=2)
    for _ in range(TICKS // 2):
        run.tick(reward=lambda _: 1.0)
    assert proved(run).groups_set_aside > 4 * run.window.capacity
    reasons = {ref.reason for e in run.log.ledger if isinstance(e, Step) for ref in e.set_aside}
    assert reasons == {NO_SIGNAL}
    go_on(run, 2)
    proved(run)


def test_a_recovered_worker_takes_no_traffic_before_its_weights_are_right() -> None:
    run = started("w0", staleness=1, batch=1, group=1)
    go_on(run, 3)
    run.workers.clear()
    worker = run.start_worker("w0")
    while not worker.loading:
        run.tick()
        assert not worker.attempts
    for _ in range(3):
        run.tick(frozen=4)  # the weights take their time
    sent = [c for c in commands(run, worker) if c.kind == "start"]
    assert not sent, "it said that it loads"
    run.tick()
    assert worker.version >= 2
    go_on(run, 5)
    proved(run)


def commands(run: ModelRun, worker: ModelWorker) -> list[Command]:
    return [
        record
        for record in run.log.partitions[worker.place]
        if isinstance(record, Command) and record.incarnation == worker.incarnation
    ]


def test_a_version_whose_update_fails_costs_the_worker_and_not_the_run() -> None:
    """The version was announced; one worker cannot put it into its engine and says so."""
    run = started("w0", "w1", staleness=1, batch=1, group=1)
    go_on(run, 1)
    while not (failing := [w for w in run.workers if w.loading]):
        run.tick()
    worker = failing[0]
    status = next(
        s for s in reversed(run.log.partitions[STATUSES])
        if isinstance(s, Status) and s.incarnation == worker.incarnation
    )  # fmt: skip
    run.log.append(STATUSES, replace(status, state="failed", message="canary differs"))
    run.workers.remove(worker)
    before = len(commands(run, worker))
    go_on(run, 4)
    proved(run)
    assert len(commands(run, worker)) == before, "nothing is sent to it any more"


def test_staleness_is_counted_when_a_group_is_trained_and_not_when_it_is_generated() -> None:
    """All groups are generated while version 0 is the newest, that is with staleness 0; the last
    of them is trained K versions later, and not one of them a version after that."""
    run = started(staleness=2, batch=1, group=1)
    while len(admitted(run)) < run.window.capacity or any(w.attempts for w in run.workers):
        run.tick(frozen=1)
    crash_everything(run)
    run.start_trainer()
    go_on(run, 3)
    assert proved(run).max_staleness == 2
    steps = [entry for entry in run.log.ledger if isinstance(entry, Step)]
    assert [step.version_in - step.trained[0].version for step in steps] == [0, 1, 2]


def test_a_prompt_slower_than_the_bound_is_trained_and_never_discarded() -> None:
    """One trajectory takes as long as many steps; a rule that discards what is too old would throw
    it away each time it is tried."""
    run = started("w0", "w1", staleness=1, batch=2, group=1)
    while not run.slow:
        run.tick()
        run.slow.update(run.workers[0].generating[:1])
    (slow,) = run.slow
    usual = run.now
    go_on(run, 1)
    usual = run.now - usual
    go_on(run, 4)
    assert run.now > 5 * usual, "everything waited for the slow one in the end"
    report = proved(run)
    assert report.groups_set_aside == 0
    assert int(slow.partition("/")[0][1:]) in trained(run)
    assert report.max_staleness == 1


def test_an_evaluation_whose_version_has_left_the_window_holds_nobody_up() -> None:
    """No worker loads such a version any more, so none may be asked to."""
    core = Coordination(Rules(Window(0, 1), 1, 9, evaluation_every=1, evaluation_prompts=1), "me")
    core.handle(run_started(), 0, 0, now=0.0)
    decision = core.decide(0.0)
    (due,) = decision.evaluations
    records = [replace(admission(due.ordinal, due.version, purpose="eval"), group_id=due.group_id)]
    core.committed(decision, records, 0.0)
    assert list(core.pending) == ["e0-0/0"]
    group = admission(0, 0)
    core.handle(group, 0, 1, now=0.0, live=False)
    places = {f"g0/{sample}": (0, sample) for sample in range(group.group_size)}
    core.handle(step(0, 0, [group], places), 0, 1, now=0.0)
    assert core.state.newest == 1
    assert not core.pending and not core.scans
