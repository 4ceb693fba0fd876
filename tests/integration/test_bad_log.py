"""Bad records in a run's log, and clocks that run backwards."""

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dora.bus import ClusterSettings, LogWriter, TopicAdmin, topic_plan
from dora.producers.coordinator.coordinator import Coordinator
from dora.schemas.codec import MAGIC, encode
from dora.schemas.records import Admission, DeadLetter, Step, Trajectory, pack_logprobs, pack_tokens
from tests import played_trainer as rollout
from tests.factories import B, G, admission, policy, run_started, status
from tests.factories import trajectory as finished
from tests.integration import test_cli as status_log
from tests.integration.test_bad_input import started
from tests.played_trainer import Cluster
from tests.small_run import SmallRun, refused
from tests.training_world import Feeder, World, trajectory

DEADLINE = 30.0


def write(settings: ClusterSettings, topic: str, values: list[bytes | None]) -> None:
    """Bytes into partition 0 of a topic, whatever they are."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": settings.bootstrap_servers, "message.max.bytes": 2**23}
    )
    for value in values:
        producer.produce(topic, value, key=b"g0/0", partition=0)
    assert producer.flush(DEADLINE) == 0


def broken(**fields: Any) -> bytes:
    """A trajectory that no dora would write: fields are changed after they were checked."""
    record = trajectory("r", 0, 0, 0, 1.0)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return encode(record)


LARGEST = 2**23 - 1000
"""As many bytes as a record has room for."""
GOOD = trajectory("r", 0, 0, 0, 1.0)
TOKENS = len(GOOD.token_ids) // 4

BAD: list[tuple[bytes | None, str, str]] = [
    (b"\x01\x01" + encode(GOOD)[2:], "bad_magic", "starts with 0101, not with c301"),
    (b'{"reward": 1}', "bad_magic", "starts with 7b22, not with c301"),
    (b"\0\0\0\0\7\x08", "no_registry", "written with id 7 of a schema registry"),
    (None, "bad_magic", "starts with nothing"),
    (encode(GOOD)[:-20], "truncated", "the bytes end within a trajectory"),
    (encode(GOOD)[:7], "truncated", "7 bytes are too few for the schema's name"),
    (encode(GOOD) + b"tail", "truncated", "4 bytes are left over after a trajectory"),
    (MAGIC + b"newer!!!" + encode(GOOD)[10:], "unknown_schema", "unknown to this version of dora"),
    (
        broken(token_ids=GOOD.token_ids[:-1]),
        "invalid",
        f"token ids take {4 * TOKENS - 1} bytes, which is not a multiple of 4",
    ),
    (
        broken(logprobs=pack_logprobs([0.0, float("nan"), *[-1.0] * (TOKENS - 2)])),
        "invalid",
        "log-probability 1 is nan",
    ),
    (
        broken(logprobs=pack_logprobs([-1.0] * (TOKENS + 2))),
        "invalid",
        f"{TOKENS + 2} log-probabilities for {TOKENS} tokens",
    ),
    (broken(mask=GOOD.mask[:-1] + b"\x07"), "invalid", "mask holds something else than 0 and 1"),
    (broken(reward=float("inf")), "invalid", "reward is inf"),
    (b"\xff" * LARGEST, "bad_magic", "starts with ffff, not with c301"),
]


class Spoiler(Feeder):
    """Writes bad records before the first good one of the version that trains first."""

    def __init__(self, world: World) -> None:
        super().__init__(world, lambda ordinal, sample: float(sample))
        self._spoiled = False

    def _admit(self) -> None:
        if not self._spoiled:
            self._spoiled = True
            world = self._world
            write(world.settings, world.topics.trajectories, [value for value, *_ in BAD])
            # Readable, and yet not to be trained: a token that the model does not have, a version
            # that does not exist, a group that nobody admitted.
            odd = trajectory(world.name, 0, 0, 0, 1.0)
            object.__setattr__(odd, "token_ids", pack_tokens([40] * TOKENS))
            early = trajectory(world.name, 7, 1, 0, 1.0)
            stray = trajectory(world.name, 0, 999, 0, 1.0)
            for record in (odd, early, stray):
                self._writer.send(world.topics.trajectories, record, partition=0)
            self._writer.flush(DEADLINE)
        super()._admit()


@pytest.fixture
def world(small: SmallRun, settings: ClusterSettings) -> World:
    small.make_topics(settings)
    return World(settings, small.name, small.model, small.directory / "runs")


def feed(feeder: Feeder, command: Callable[[], Any]) -> Any:
    feeder.start()
    try:
        return command()
    finally:
        feeder.end()
        assert feeder.failure is None


def test_unreadable_trajectories_become_dead_letters_and_the_run_goes_on(
    small: SmallRun, world: World
) -> None:
    result = feed(Spoiler(world), lambda: small.dora("train"))
    assert result.exit_code == 0, result.output
    topic = small.topics.trajectories
    letters = [r for r in world.read(small.topics.dead_letters) if isinstance(r, DeadLetter)]
    assert [letter.offset for letter in letters] == list(range(len(BAD)))
    for letter, (value, code, reason) in zip(letters, BAD, strict=True):
        assert (letter.code, letter.topic, letter.partition) == (code, topic, 0)
        assert reason in letter.reason
        assert (value or b"").startswith(letter.payload)
        assert len(letter.payload) >= min(len(value or b""), LARGEST // 2)
    steps = world.steps()
    assert [s.version_out for s in steps if s.kind == "step"] == [1, 2]
    aside = [ref for s in steps for ref in s.set_aside]
    assert [ref.group_id for ref in aside] == ["g0"]
    assert "g0/0 holds tokens outside the vocabulary of 40" in (aside[0].reason or "")

    shown = small.look("tail", "-t", "trajectories", "-o", "beginning", "--exit")
    assert shown.exit_code == 0, shown.output
    for offset, (_, code, reason) in enumerate(BAD):
        (line,) = (line for line in shown.stdout.splitlines() if f"  0@{offset}  " in line)
        assert f"unreadable ({code}): " in line and reason[:30] in line
    dead = small.look("tail", "-t", "dead-letters", "-o", "beginning", "--exit").stdout
    assert f"{topic}[0]@3" in dead and "from trainer" in dead
    seen = json.loads(small.look("status", "--json").stdout)
    assert (seen["unreadable"], seen["dead_letters"]) == (len(BAD), len(BAD))
    assert seen["problems"][0].startswith(f"{topic}[0]@0: starts with 0101")
    audit = small.look("audit", "--no-chunks")
    assert audit.exit_code == 0, audit.output
    said = " ".join(audit.stdout.split())
    assert "no violation" in said and "cannot be read: bad_magic: starts with 0101" in said


def test_a_journal_that_cannot_be_read_stops_whoever_needs_it(
    small: SmallRun, world: World, settings: ClusterSettings
) -> None:
    feeder = Feeder(world, lambda ordinal, sample: float(sample))
    trained = feed(feeder, lambda: small.dora("train"))
    assert trained.exit_code == 0, trained.output
    journal = small.topics.dispatch
    offset = len(world.read(journal))
    write(settings, journal, [MAGIC + b"newer!!!"])
    parts = [f"{journal} partition 0 offset {offset} cannot be read (unknown_schema)", "newer dora"]
    for command in ("train", "coordinator"):
        refused(small.dora(command, "--set", "trainer.steps=4"), 1, *parts)
    audit = small.look("audit", "--no-chunks")
    assert audit.exit_code == 0, "what was trained is all there"
    assert "cannot be read: unknown_schema" in " ".join(audit.stdout.split())


def test_a_ledger_that_contradicts_itself_or_cannot_be_read_stops_whoever_needs_it(
    small: SmallRun, world: World, settings: ClusterSettings
) -> None:
    ledger = small.topics.steps
    torn = Step(small.name, "step", 9, 2, 3, (), (), {}, "c", None, "t", 0)
    with LogWriter(settings, client_id="test") as writer:
        writer.send(ledger, started(small, settings), key=small.name, partition=0)
        writer.send(small.topics.policies, policy(0, small.name), key="0", partition=0)
        writer.send(ledger, torn, key=small.name, partition=0)
    parts = [f"{ledger} partition 0 offset 1 contradicts the", "entry 9 comes where 0 is due"]
    for command in ("train", "coordinator"):
        refused(small.dora(command), 1, *parts)
    audit = small.look("audit")
    assert audit.exit_code == 1 and "violations: the log breaks the rules" in audit.stdout
    state = small.look("status")
    assert state.exit_code == 0 and (
        "entry 9 comes where 0 is due" in " ".join(state.stdout.split())
    )


def test_a_ledger_of_rubbish_stops_whoever_needs_it(
    small: SmallRun, world: World, settings: ClusterSettings
) -> None:
    ledger = small.topics.steps
    write(settings, ledger, [b"rubbish"])
    parts = [f"{ledger} partition 0 offset 0 cannot be read (bad_magic): starts with 7275"]
    for command in ("train", "coordinator"):
        refused(small.dora(command), 1, *parts)
    lines = small.look("tail", "-t", "steps", "-o", "-1", "--exit")
    assert lines.exit_code == 0 and "unreadable (bad_magic): starts with 7275" in lines.stdout


def test_an_admission_under_a_version_that_does_not_exist_stops_the_trainer(
    small: SmallRun, world: World, settings: ClusterSettings
) -> None:
    with LogWriter(settings, client_id="test") as writer:
        record = Admission(small.name, "g0", 0, 5, G, "train", 0)
        writer.send(small.topics.dispatch, record, partition=0)
    refused(
        small.dora("train"),
        1,
        f"{small.topics.dispatch} offset 0 admits group g0 under version 5, but the newest is 0",
    )


def test_a_record_larger_than_the_topic_takes_is_named_with_both_sizes(
    small: SmallRun, settings: ClusterSettings
) -> None:
    limit = ("--set", "kafka.max_message_bytes=1024")
    small.make_topics(settings, "kafka.max_message_bytes=1024")
    refused(
        small.dora("train", *limit),
        1,
        f"a record of {small.topics.steps} with key {small.name} takes ",
        "records of at most 1000",
        "raise kafka.max_message_bytes",
    )


def test_duplicates_read_before_their_admission_are_forgotten(
    settings: ClusterSettings, small: SmallRun, world: World
) -> None:
    from dora.consumers.trainer.batch_builder import BatchBuilder
    from dora.core.state import RunState
    from dora.core.window import Window

    state = RunState(Window(1, B), G)
    state.start()
    builder = BatchBuilder(state, small.config().trainer.loss, 40)
    for offset, (version, sample) in enumerate([(0, 0), (0, 0), (3, 0), (0, 1), (0, 1)]):
        builder.add_trajectory(trajectory("r", version, 0, sample, float(sample)), 0, offset)
    assert builder.kept_trajectories == 4, "a version that does not exist is not kept"
    state.admit(Admission("r", "g0", 0, 0, G, "train", 0))
    builder.next_batch()
    assert builder.kept_trajectories == 0, "the group is ready, its duplicates are gone"
    assert state.counters.duplicates == 2 and state.counters.foreign == 1


def test_records_with_times_that_run_backwards_give_no_negative_figures(
    settings: ClusterSettings, run_name: str
) -> None:
    config = status_log.config_of(run_name)
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    log = status_log.Log(settings, run_name)
    now = status_log.NOW
    groups = [admission(number, number // 2, run_name) for number in range(4)]
    hour = 3_600_000
    log.send(run_started(run_name, at=now), policy(0, run_name))
    for number in range(2):
        mine = groups[2 * number : 2 * number + 2]
        at = now - number * hour
        log.send(*mine, *(finished(g, s, at=at - s * 1000) for g in mine for s in range(G)))
        step = log.step(number, mine)
        object.__setattr__(step, "created_ms", at)
        log.send(step, policy(number + 1, run_name))
    future = 4_000_000_000_000
    log.send(*(status(p, run=run_name, at=future) for p in ("trainer", "coordinator", "w0")))
    log.send(finished(groups[3], 1, at=future))
    log.close()
    result = status_log.invoke(settings, "status", run_name, "--json")
    assert result.exit_code == 0, result.output
    seen = json.loads(result.stdout)
    assert seen["step"] == 2 and not seen["problems"]
    assert seen["tokens_generated_per_second"] >= 0 and seen["tokens_trained_per_second"] >= 0
    assert all(process["age_seconds"] >= 0 for process in seen["processes"])
    shown = status_log.invoke(settings, "status", run_name)
    assert shown.exit_code == 0 and not re.search(r"-\d", shown.stdout.replace(run_name, ""))
    tail = status_log.invoke(settings, "tail", run_name, "-o", "-2", "--exit")
    assert tail.exit_code == 0 and len(tail.stdout.splitlines()) == 2


def test_clocks_that_jump_back_hold_nobody_up(cluster: Cluster) -> None:
    class Jumping:
        """Each look at this clock is a minute before the last."""

        def __init__(self) -> None:
            self.now = 2_000_000_000_000

        def __call__(self) -> int:
            self.now -= 60_000
            return self.now

    run = cluster.config

    def coordinate(stop: threading.Event) -> None:
        Coordinator(run, cluster.settings, now_ms=Jumping()).run(stop)

    with (
        rollout.running(coordinate),
        rollout.running(rollout.work(cluster, "w0", now_ms=Jumping())),
    ):
        cluster.begin()
        for version in range(2):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 4, "a batch")
            cluster.train_step()
            cluster.until(lambda v=version: cluster.state.newest == v + 1, "the step")
    rollout.check_log(cluster)
    times = [r.created_ms for r in cluster.all(Trajectory) if isinstance(r, Trajectory)]
    assert times and max(times) < 2_000_000_000_000
    seen = json.loads(status_log.invoke(cluster.settings, "status", run.run.name, "--json").stdout)
    assert seen["tokens_generated_per_second"] >= 0
