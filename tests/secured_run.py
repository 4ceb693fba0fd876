"""A whole run on a secured cluster, in which each part and each onlooker is a user of its own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from confluent_kafka import Producer

from dora.broker.process import free_port
from dora.bus import ClusterSettings, LogReader, RunTopics, TransactionalWriter, cluster_settings
from dora.bus.access import ROLES, Grant, Right, default_principal
from dora.bus.acls import AclAdmin
from dora.config import KafkaSection
from dora.core.ring import worker_partition
from dora.errors import AccessError
from dora.schemas.records import Command, DeadLetter, Status, Trajectory
from tests.processes import Process
from tests.secured_broker import DEADLINE, Decision, SecuredBroker, settings_of
from tests.small_run import dora
from tests.span_receiver import Receiver, span_receiver
from tests.waiting import until

RUN = "secured"
CANARY = "canary-31415926"
"""In every secret; and nowhere else, or the secret was told."""
TOPICS = RunTopics(RUN)
PROCESSES = ("coordinator", "rollout", "trainer")
PARTITIONS = 3
RUN_SECONDS = 120.0
CONFIG = """\
[run]
name = "secured"
directory = "{directory}/runs"

[policy]
model = "emulated"

[task]
kind = "synthetic"
synthetic_prompt_tokens = 8
max_prompt_tokens = 8

[window]
max_staleness = 1
groups_per_step = 2
group_size = 2

[rollout]
engine = "emulated"
capacity = 8
max_new_tokens = 64
chunk_tokens = 64
max_attempts = 1
heartbeat_seconds = 0.2
heartbeat_timeout_seconds = 2

[rollout.emulated]
load_seconds = 0.0
length = "fixed"
length_mean = 60

[trainer]
steps = 2
engine = "emulated"
batch_timeout_seconds = 120

[trainer.emulated]
step_seconds = 0.1

[metrics]
port = {port}

[traces]
endpoint = "{traces}"

[kafka]
dispatch_partitions = 3
"""


@dataclass(frozen=True, slots=True)
class Secured:
    """The run that was made, who made it, and what the broker decided meanwhile."""

    broker: SecuredBroker
    directory: Path
    passwords: dict[str, str]
    decisions: list[Decision]
    scraped: dict[str, str]
    """What the processes' metrics endpoints said, by port."""
    traced: list[bytes]
    """What was sent to the receiver of traces."""

    def properties(self, role: str) -> Path:
        """The file that the role was given."""
        return self.directory / f"{role}.properties"

    def settings(self, role: str) -> ClusterSettings:
        """How the role meets the cluster."""
        user, password = f"dora-{role}", self.passwords[role]
        return settings_of(self.broker, user, password, request_timeout_seconds=30)

    def dora(self, role: str, *arguments: str):  # type: ignore[no-untyped-def]
        """A command as the user of a role."""
        files = ("--kafka-config", str(self.properties(role)))
        return dora(*arguments, "-b", self.broker.address(), *files)

    def part(self, role: str, name: str, *options: str) -> Process:
        """A part of the run as a process of its own, as the user of its role."""
        command = {"trainer": "train"}.get(role, role)
        secret, properties = self.passwords[role], self.properties("nobody")
        env: dict[str, str] = {}
        options += ("-X", f"sasl.username=dora-{role}")
        match name:  # each is told its password in another way
            case "w1":
                properties = self.properties(role)
            case "w2":
                env["DORA_KAFKA__PROPERTIES__SASL_PASSWORD"] = secret
            case "coordinator":
                options += ("-X", f"sasl.password={secret}")
            case "trainer":
                options += ("--set", f"kafka.properties.sasl.password={secret}")
        return Process(
            self.directory / f"{name}.log",
            command,
            str(self.directory / "run.toml"),
            "-b",
            self.broker.address(),
            "--kafka-config",
            str(properties),
            *options,
            env=env,
        )


@pytest.fixture(scope="module")
def secured_run(
    secured: SecuredBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """Everything that a run does, incidents included: a worker dies with work that nobody can go on
    with, and there are records that nobody can read."""
    directory = tmp_path_factory.mktemp("secured-run")
    with span_receiver() as receiver:
        yield from _made(secured, directory, receiver)


def _made(secured: SecuredBroker, directory: Path, receiver: Receiver) -> Iterator[Secured]:
    traced: list[bytes] = []
    receiver.take = traced.append  # type: ignore[method-assign]
    endpoint = receiver.endpoint.replace("://", f"://user:{CANARY}-traces@")
    port = free_port(set())
    text = CONFIG.format(directory=directory, port=port, traces=endpoint)
    (directory / "run.toml").write_text(text)
    passwords = {role: f"{CANARY}-{role}" for role in ROLES}
    secured.add_users({f"dora-{role}": word for role, word in passwords.items()})
    made = Secured(secured, directory, passwords, [], {}, traced)
    for role, password in passwords.items():
        lines = secured.properties(f"dora-{role}", password).items()
        made.properties(role).write_text("".join(f"{key}={value}\n" for key, value in lines))
    common = secured.properties("nobody", "").items()
    made.properties("nobody").write_text(
        "".join(f"{k}={v}\n" for k, v in common if not k.startswith(("sasl.user", "sasl.pass")))
    )
    roles = [option for role in ROLES for option in ("--role", role)]
    granted = dora("topics", "acls", RUN, *roles, "--apply", "-b", secured.open)
    assert granted.exit_code == 0, granted.output
    with AclAdmin(made.settings("creator")) as admin:
        until(lambda: not admin.lacking(ROLES["creator"].rights(RUN)), "rights to arrive", DEADLINE)
    secured.decisions()  # the waiting is not the run's

    config = str(directory / "run.toml")
    created = made.dora("creator", "topics", "create", config)
    assert created.exit_code == 0, created.output
    root = cluster_settings(KafkaSection(bootstrap_servers=secured.open))
    with LogReader(root, client_id="test") as reader:
        watched = Watched(reader)
        trainer = made.part("trainer", "trainer")
        coordinator = made.part("coordinator", "coordinator")
        workers = [made.part("rollout", "w1", "--worker-id", "w1")]
        try:
            watched.until(lambda: "w1" in watched.busy, "w1 to get work", *workers, coordinator)
            workers[0].process.send_signal(signal.SIGKILL)
            workers[0].process.wait()
            damage(secured, TOPICS.trajectories, range(PARTITIONS))
            watched.until(lambda: watched.given_up, "lost work to be given up", coordinator)
            trainer.freeze()
            workers.append(made.part("rollout", "w2", "--worker-id", "w2"))
            watched.until(lambda: "w2" in watched.heard, "w2", workers[1])
            damage(secured, TOPICS.dispatch, [worker_partition("w2", 3)])
            watched.until(lambda: "w2" in watched.letters, "w2's dead letter", workers[1])
            made.scraped.update(_scraped(port))
            trainer.thaw()
            parts = (trainer, workers[1])
            watched.until(lambda: all(part.code is not None for part in parts), "the end", *parts)
            coordinator.end()  # it would wait for the goodbye of the worker that died
            for part in (*parts, coordinator):
                assert part.code == 0, part.said
            assert "trainer" in watched.letters
        finally:
            for part in (trainer, coordinator, *workers):
                part.end()
    reading = (
        ("audit", RUN, "--json"),
        ("report", RUN, "-o", str(directory / "report.html")),
        ("status", RUN),
        ("tail", RUN, "-o", "beginning", "--exit"),
        ("inspect", RUN),
    )
    for command in reading:
        looked = made.dora("reader", *command)
        assert looked.exit_code == 0, looked.output
        (directory / f"{command[0]}.out").write_text(looked.output)
    damage(secured, TOPICS.trajectories, range(PARTITIONS))
    exported = made.dora("exporter", *export_command(directory / "rows"))
    assert exported.exit_code == 0, exported.output
    made.decisions.extend(secured.decisions())
    yield made


def _scraped(first: int) -> dict[str, str]:
    found = {}
    for port in range(first, first + 4):
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            found[str(port)] = answer.read().decode()
    return found


class Watched:
    """What the test sees of the run."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        places = [(TOPICS.workers, 0), (TOPICS.dead_letters, 0)]
        places += [(topic, n) for topic in (TOPICS.dispatch, TOPICS.trajectories) for n in range(3)]
        reader.assign(dict.fromkeys(places, -2))
        self.busy: set[str] = set()
        self.heard: set[str] = set()
        self.letters: set[str] = set()
        self.given_up = False

    def until(self, condition, what: str, *parts: Process) -> None:  # type: ignore[no-untyped-def]
        def met() -> bool:
            for message in self._reader.poll(timeout=0.05):
                match message.value:
                    case Command(kind="start") as command:
                        self.busy.add(command.worker)
                    case Status() as status:
                        self.heard.add(status.process)
                    case DeadLetter() as letter:
                        self.letters.add(letter.process)
                    case Trajectory() as trajectory if not trajectory.token_ids:
                        self.given_up = True
            return bool(condition())

        def story() -> str:
            return "\n".join([what, *(f"== {part.log.name}\n{part.said}" for part in parts)])

        until(met, story, RUN_SECONDS)


def export_command(directory: Path) -> tuple[str, ...]:
    return ("export", RUN, str(directory), "--to", "jsonl", "--ended")


def damage(broker: SecuredBroker, topic: str, partitions) -> None:  # type: ignore[no-untyped-def]
    """Put something that is no record into partitions."""
    producer = Producer({"bootstrap.servers": broker.open})
    for number in partitions:
        producer.produce(topic, b"no record", partition=number)
    assert producer.flush(30) == 0


@contextmanager
def without(run: Secured, role: str, right: Right) -> Iterator[None]:
    """Inside, a role lacks a right."""
    grant = Grant(role, default_principal(role), right)
    settings = run.settings(role)
    asking = AclAdmin(settings)

    def allowed() -> bool:
        if right.resource != "TransactionalId":
            return not asking.lacking([right])
        try:
            TransactionalWriter(
                settings, right.name, client_id="test", transaction_timeout=10
            ).close()
        except AccessError:
            return False
        return True

    run.broker.revoke(grant)
    try:
        until(lambda: not allowed(), f"{right} to be gone", DEADLINE)
        yield
    finally:
        with run.broker.admin() as admin:
            admin.grant([grant])
        until(allowed, f"{right} to be back", DEADLINE)
