"""The schedules: when groups are admitted, when generation pauses, what starts first."""

from dataclasses import replace

import pytest

from dora.config import Config
from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.estimates import REMEMBERED, History
from dora.core.scheduling.scheduler import Decision, Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.window import Window
from dora.producers.tasks.prompts import prompt_identity
from dora.schemas.records import Command, Status
from tests.factories import admission, places_of, run_started, step, trajectory

WORKER = Status("r", "w0", "rollout", "one", "ready", 0, version=0, capacity=4)
TRAINER = Status("r", "trainer", "trainer", "t", "waiting", 0, version=0)


class Played:
    """A coordination of one schedule; what it decides is committed, and carried out by hand."""

    def __init__(self, window: Window, schedule: Schedule, **more: object) -> None:
        rules = Rules(window, 2, 50, heartbeat_timeout=100, schedule=schedule)
        self.core = Coordination(rules, "me", **more)  # type: ignore[arg-type]
        self.core.handle(run_started(), 0, 0, now=0.0)
        self.now = 0.0

    def hear(self, *statuses: Status) -> None:
        for status in statuses:
            self.core.handle(status, 0, 0, now=self.now)

    def tick(self) -> Decision:
        self.now += 1
        made = self.core.decide(self.now)
        records: list[object] = [admission(a.ordinal, a.version) for a in made.plan.admissions]

        def command(worker: Status, kind: str, **fields: object) -> Command:
            return Command("r", worker.process, worker.incarnation, kind, 0, **fields)  # type: ignore[arg-type]

        records += [command(worker, "pause") for worker in made.pauses]
        for switch in made.plan.switches:
            worker = made.addressees[switch.worker]
            records.append(command(worker, "switch", policy_version=switch.version))
        for start in made.plan.starts:
            work = start.work
            records.append(
                command(
                    made.addressees[start.worker], "start", group_id=work.group_id,
                    sample=work.sample, trajectory_id=f"{work.group_id}/{work.sample}",
                    policy_version=work.version, ordinal=work.ordinal,
                )
            )  # fmt: skip
        self.core.committed(made, records, self.now)  # type: ignore[arg-type]
        return made

    def finish(self, ordinal: int, version: int) -> None:
        for sample in range(2):
            record = trajectory(admission(ordinal, version), sample)
            self.core.handle(record, 0, 10 * ordinal + sample, now=self.now)

    def train(self, version: int, *groups: tuple[int, int]) -> None:
        journal = [admission(ordinal, of) for ordinal, of in groups]
        places = places_of([trajectory(group, sample) for group in journal for sample in (0, 1)])
        self.core.handle(step(version, version, journal, places), 0, 0, now=self.now)


def admitted(decision: Decision) -> list[tuple[int, int]]:
    return [(admit.ordinal, admit.version) for admit in decision.plan.admissions]


def test_one_step_off_admits_a_batch_at_once_and_the_next_when_all_of_it_is_finished() -> None:
    played = Played(Window(1, 3), Schedule(kind="one-step-off"))
    played.hear(WORKER)
    assert admitted(played.tick()) == [(0, 0), (1, 0), (2, 0)], "there is room for two only"
    assert len(played.core.pending) == 2
    played.finish(0, 0)
    assert not admitted(played.tick()), "a group is not finished"
    played.finish(1, 0)
    played.finish(2, 0)
    assert admitted(played.tick()) == [(3, 0), (4, 0), (5, 0)], "while the first is trained"
    for ordinal in (3, 4, 5):
        played.finish(ordinal, 0)
    assert not admitted(played.tick()), "two batches are outstanding"
    played.train(0, (0, 0), (1, 0), (2, 0))
    played.hear(replace(WORKER, version=1))
    assert admitted(played.tick()) == [(6, 1), (7, 1), (8, 1)]


def test_sync_generates_a_batch_and_waits_for_the_step() -> None:
    played = Played(Window(0, 2), Schedule(kind="sync"))
    played.hear(WORKER)
    assert admitted(played.tick()) == [(0, 0), (1, 0)]
    played.finish(0, 0)
    played.finish(1, 0)
    assert not played.tick()
    played.train(0, (0, 0), (1, 0))
    assert [s.version for s in played.tick().plan.switches] == [1]


def test_partial_loads_a_new_version_on_busy_workers_and_starts_old_groups_there() -> None:
    played = Played(Window(1, 2), Schedule(kind="partial"))
    played.hear(WORKER, replace(WORKER, process="w1", incarnation="two", capacity=2))
    played.tick()
    played.finish(0, 0)
    played.finish(1, 0)
    played.train(0, (0, 0), (1, 0))
    switches = played.tick().plan.switches
    assert {(s.worker, s.version) for s in switches} == {("w0", 1), ("w1", 1)}
    assert not played.tick().plan.switches, "they are told once"
    other = replace(WORKER, process="w1", incarnation="two", version=1, capacity=2)
    played.hear(replace(WORKER, state="failed"), other)
    played.tick()
    for identity, work in list(played.core.scans.items()):
        assert work.version == 0
        played.core.pending[identity] = played.core.scans.pop(identity)
    started = {start.work.version for start in played.tick().plan.starts}
    assert 0 in started, "under the newest version, which its worker hosts"


def test_colocated_partial_pauses_while_a_step_is_trained() -> None:
    played = Played(Window(1, 2), Schedule(kind="partial", colocated=True))
    played.hear(WORKER, TRAINER)
    first = played.tick()
    assert not first.pauses
    assert [s.version for s in first.plan.switches] == [0], "whether it pauses is not known"
    assert not played.tick().plan.switches
    played.hear(replace(TRAINER, state="training"))
    assert [worker.process for worker in played.tick().pauses] == ["w0"]
    assert not played.tick().pauses, "it is told once"
    played.hear(TRAINER)
    assert [s.version for s in played.tick().plan.switches] == [0], "training was given up"
    played.hear(replace(TRAINER, state="training"))
    assert played.tick().pauses
    played.finish(0, 0)
    played.finish(1, 0)
    played.train(0, (0, 0), (1, 0))
    after = played.tick()
    assert not after.pauses and [s.version for s in after.plan.switches] == [1]
    played.hear(replace(WORKER, version=1))
    again = played.tick()
    assert not again.pauses and not again.plan.switches, "the trainer's word was of the last step"
    played.hear(replace(TRAINER, state="training", version=1))
    assert played.tick().pauses


@pytest.mark.parametrize("kind", ["dora", "sync", "one-step-off"])
def test_other_schedules_never_pause(kind: str) -> None:
    staleness = {"dora": 2, "sync": 0, "one-step-off": 1}[kind]
    played = Played(Window(staleness, 2), Schedule(kind=kind))  # type: ignore[arg-type]
    played.hear(WORKER, replace(TRAINER, state="training"))
    decision = played.tick()
    assert not decision.pauses and not decision.plan.switches


def test_groups_with_long_responses_before_start_first() -> None:
    played = Played(
        Window(0, 4), Schedule(kind="sync", longest_first=True), prompt_of=lambda n: n % 4
    )
    played.hear(replace(WORKER, capacity=2))
    history = played.core._history
    assert history is not None
    for prompt, tokens in enumerate((5, 900, 30, 40)):
        history.finished(prompt, tokens)
    assert [ordinal for ordinal, _ in admitted(played.tick())] == [0, 1, 2, 3], "in order"
    order = []
    for _ in range(4):
        started = {start.work.ordinal for start in played.tick().plan.starts}
        assert len(started) == 1
        order += started
        played.finish(order[-1], 0)
    assert order == [1, 3, 2, 0]


def test_an_older_group_starts_only_where_filling_is_on() -> None:
    for fill in (False, True):
        played = Played(Window(3, 8), Schedule(fill_older=fill, migration=False))
        played.hear(replace(WORKER, capacity=8))
        assert len(admitted(played.tick())) == 4
        played.finish(0, 0)
        played.train(0, (0, 0))
        decision = played.tick()
        assert admitted(decision) == ([(4, 0)] if fill else [])


def test_lengths_are_remembered_by_prompt_and_the_longest_unseen_are_forgotten() -> None:
    history = History(lambda ordinal: ordinal % (2 * REMEMBERED))
    history.finished(0, 10)
    history.finished(2 * REMEMBERED, 20)
    assert history.expected(0) == 15
    assert history.expected(7) == 0
    for ordinal in range(1, REMEMBERED + 1):
        history.finished(ordinal, 1)
    assert history.expected(0) == 0
    assert history.expected(REMEMBERED) == 1


def test_ordinals_of_one_prompt_have_one_identity() -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic", "synthetic_prompts": 5},
            "rollout": {"engine": "emulated"},
            "trainer": {"engine": "emulated", "steps": 1},
        }
    )
    identity = prompt_identity(config)
    assert identity(2) == identity(7) != identity(3)
