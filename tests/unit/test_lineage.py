"""OpenLineage events of committed steps, and receivers that misbehave."""

import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.config import Config
from dora.config.loading import load_config
from dora.errors import ConfigError
from dora.schemas.records import Step
from dora.telemetry import lineage as lineages
from dora.telemetry import meter as metering
from dora.telemetry.lineage import Lineage, SentLineage, lineage_of
from dora.telemetry.lineage_events import run_uuid
from tests import factories
from tests.configurations import emulated
from tests.factories import admission, run_started
from tests.lineage_receiver import Receiver, receiver

STARTED = run_started()
SENT = "dora_trainer_lineage_events_total"
DROPPED = "dora_trainer_lineage_events_dropped_total"


def config(tmp: Path, **lineage: Any) -> Config:
    kafka = {"bootstrap_servers": "SASL_SSL://kafka-1:9092,kafka-2:9092"}
    return emulated(tmp, kafka=kafka, lineage=lineage)


def step(number: int) -> Step:
    groups = [admission(g, number - 1) for g in (3, 1, 2)]
    places = {f"g{g}/{s}": (s, 100 * number + g) for g in (3, 1, 2) for s in (0, 1)}
    metrics = {"loss": 0.25, "reference_kl": float("nan")}
    return factories.step(40, number - 1, groups, places, at=1_500, **metrics)


class Counting(metering.Meter):
    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def count(self, name: str, by: float = 1.0, value: str = "") -> None:
        self.counts[name] = self.counts.get(name, 0.0) + by


@pytest.fixture
def counts() -> Iterator[dict[str, float]]:
    former, counting = metering.meter(), Counting()
    metering.set_meter(counting)
    yield counting.counts
    metering.set_meter(former)


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with receiver() as one:
        yield one


def session(config: Config, newest: int, recent: list[Step], new: list[Step]) -> None:
    """A trainer's life: it goes on after `newest` and commits `new`."""
    telling = lineage_of(config)
    telling.begin(STARTED, recent, newest)
    for each in new:
        telling.step(each)
    telling.close()


def test_without_an_address_nothing_is_sent_or_imported(tmp_path: Path) -> None:
    assert type(lineage_of(config(tmp_path))) is Lineage


def test_each_step_is_a_valid_event_with_its_topics(
    tmp_path: Path, taking: Receiver, counts: dict[str, float]
) -> None:
    session(config(tmp_path, url=taking.url), 0, [], [step(1), step(2)])
    assert not taking.refused
    first, second = taking.events
    assert counts == {SENT: 2.0} and taking.keys == [None, None]
    assert first["eventType"] == "COMPLETE" and first["eventTime"].startswith("1970-01-01T00:00:01")
    assert (first["job"]["namespace"], first["job"]["name"]) == ("dora", "r.train")
    ids = [event["run"]["runId"] for event in (first, second)]
    assert ids == [run_uuid("id", 1), run_uuid("id", 2)] and uuid.UUID(ids[0]) != uuid.UUID(ids[1])
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in (first, second)}
    assert parents == {run_uuid("id")}
    (read,) = first["inputs"]
    assert (read["namespace"], read["name"]) == ("kafka://kafka-1:9092", "r.trajectories")
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 6
    offsets = read["inputFacets"]["dora_offsets"]["partitions"]
    assert offsets == {"0": [101, 103], "1": [101, 103]}
    written = {each["name"]: each["facets"]["version"] for each in first["outputs"]}
    assert written["r.policies"]["datasetVersion"] == "1"
    assert written["r.steps"]["datasetVersion"] == "40"
    told = first["run"]["facets"]["dora_step"]
    assert told["metrics"] == {"loss": 0.25}, "no number has no place in JSON"
    assert (told["version_in"], told["version_out"], told["groups_trained"]) == (0, 1, 3)


def test_a_key_is_taken_from_the_environment(
    tmp_path: Path, taking: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret")
    session(config(tmp_path, url=taking.url), 0, [], [step(1)])
    assert taking.keys == ["Bearer secret"]


def test_a_step_that_a_crash_left_out_is_sent_by_the_next_trainer(
    tmp_path: Path, taking: Receiver
) -> None:
    given = config(tmp_path, url=taking.url)
    session(given, 0, [], [step(1)])
    session(given, 3, [step(1), step(2), step(3)], [step(4)])
    versions = [e["run"]["facets"]["dora_step"]["version_out"] for e in taking.events]
    assert versions == [1, 2, 3, 4]


def test_what_a_receiver_refuses_is_dropped_and_counted_with_one_word(
    tmp_path: Path, counts: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    telling = SentLineage(config(tmp_path), refuse)
    telling.begin(STARTED, [], 0)
    for number in (1, 2, 3):
        telling.step(step(number))
    telling.close()
    assert counts == {DROPPED: 3.0}
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1 and "step 1 was dropped, training goes on" in said[0]
    assert "https://host/api" in said[0] and "secret" not in said[0]


def refuse(step: Step, run_id: str) -> None:
    raise OSError("https://me:secret@host/api says 503")


def test_a_receiver_that_comes_back_gets_what_comes_then(
    tmp_path: Path, taking: Receiver, counts: dict[str, float]
) -> None:
    taking.refusing = True
    telling = lineage_of(config(tmp_path, url=taking.url))
    telling.begin(STARTED, [], 0)
    telling.step(step(1))
    until = time.monotonic() + 60.0
    while not counts.get(DROPPED):
        assert time.monotonic() < until
        time.sleep(0.01)
    taking.refusing = False
    telling.step(step(2))
    telling.close()
    assert [e["run"]["runId"] for e in taking.events] == [run_uuid("id", 2)]
    assert counts == {DROPPED: 1.0, SENT: 1.0}


def test_a_receiver_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: dict[str, float]
) -> None:
    monkeypatch.setattr(lineages, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(lineages, "QUEUE", 5)
    free, entered = threading.Event(), threading.Event()

    def hang(step: Step, run_id: str) -> None:
        entered.set()
        free.wait(60.0)

    telling = SentLineage(config(tmp_path), hang)
    telling.begin(STARTED, [], 0)
    telling.step(step(1))
    assert entered.wait(60.0)
    for number in range(2, 102):  # returns at once, each time
        telling.step(step(number))
    assert counts[DROPPED] == 95.0, "one is being sent, five wait"
    telling.close()
    free.set()
    assert counts[DROPPED] == 100.0, "so are those that waited"


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dora.telemetry.lineage_events", raising=False)
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with pytest.raises(ConfigError, match="openlineage-python is not installed") as caught:
        lineage_of(config(tmp_path, url="http://localhost:1"))
    assert caught.value.hint == "pip install 'dora-rl[lineage]'"


def test_the_environment_can_name_another_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events.json"
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(events))
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    session(config(tmp_path, from_environment=True), 0, [], [step(1)])
    assert run_uuid("id", 1) in events.read_text()
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "no_such_transport")
    with pytest.raises(ConfigError, match="OpenLineage's configuration cannot be used"):
        lineage_of(config(tmp_path, from_environment=True))


def test_an_address_with_a_password_is_refused_without_being_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'run.name = "r"\npolicy.model = "emulated"\ntask.kind = "synthetic"\ntrainer.steps = 1\n'
        'rollout.engine = "emulated"\nlineage.url = "https://me:secret@host"\n'
    )
    with pytest.raises(ConfigError, match=r"lineage\.url must hold no login") as caught:
        load_config(path)
    assert "secret" not in str(caught.value)
