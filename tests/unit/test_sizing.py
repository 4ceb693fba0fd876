"""What a run's topics take: the formulas against records as they are encoded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dora.bus.topic_plan import RunTopics
from dora.bus.writer import HeaderMaker
from dora.cli.main import cli
from dora.core import sizing
from dora.core.sizing import Load, flows, kept_seconds, lanes_needed
from dora.schemas.codec import encode
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    GroupRef,
    Policy,
    Record,
    SampleRef,
    Sampling,
    SlotOffset,
    Status,
    Step,
    Trajectory,
    WeightFile,
    pack_logprobs,
    pack_tokens,
)
from tests import factories

ROOT = Path(__file__).parents[2]
RUN, WORKER, AT = "spell-backward", "dora-rollout-6c9f7d5b4-x2x7k", 1_770_000_000_000
SAMPLING = Sampling(1.0, 1.0, 0, 1024, (151_645, 151_643), 12_345_678)
GROUP = factories.admission(12_345, 120, RUN)
FRAMING = 14
"""What Kafka's record format adds: length, attributes, differences of time and offset, and the
lengths of key, value and headers, at most about this."""
LOAD = Load(100_000.0, 600.0, 100.0, 32, 8, 64, processes=34)


def sent(record: Record, key: str) -> int:
    """Bytes of a record in a batch, headers included."""
    trace = None if isinstance(record, Status | Step | Policy) else "00-" + "a" * 32 + "-1-01"
    headers = HeaderMaker(WORKER).headers(record, trace and trace + "b" * 15)
    around = sum(len(name) + len(value or b"") + 2 for name, value in headers)
    return len(encode(record)) + around + len(key) + FRAMING


def chunk(tokens: int) -> Chunk:
    whole = trajectory(100, 96 + tokens)
    return factories.chunk(whole, 3, 96, 96 + tokens)


def trajectory(prompt: int, tokens: int) -> Trajectory:
    return factories.trajectory(
        GROUP, 7, prompt=range(prompt), tokens=range(prompt, prompt + tokens), logprob=-0.5, at=AT,
        chunks=32, reward_parts={"reward": 1.0}, text="x" * (sizing.TEXT * tokens), worker=WORKER,
        engine="vllm 0.32.0", sampling=SAMPLING,
    )  # fmt: skip


def groups(count: int, size: int) -> tuple[GroupRef, ...]:
    return tuple(
        GroupRef(f"g{n}", n, 119, tuple(SampleRef(s, 0, 5, 1_000_000 + n) for s in range(size)))
        for n in range(12_000, 12_000 + count)
    )


def step(count: int, size: int) -> Step:
    metrics = {f"a_metric_with_a_name_{n}": 0.5 for n in range(50)}
    return Step(
        RUN, "step", 119, 119, 120, groups(count, size), (), metrics, "c" * 64,
        "step-00000120-b9d1bd6ea0ddc023", "a" * 32, AT,
    )  # fmt: skip


POLICY = Policy(
    RUN, 120, "full", "file:///store/weights/spell-backward/v00000120-b9d1bd6ea0ddc023",
    tuple(WeightFile(f"model-{n:05}-of-00030.safetensors", 5 * 10**9, "d" * 64) for n in range(30)),
    "c" * 64, pack_tokens(range(64)), pack_logprobs([-0.5] * 63),
    tuple(SlotOffset(f"{RUN}.trajectories", n, 10**6) for n in range(50)), AT,
)  # fmt: skip
STATUS = Status(
    RUN, WORKER, "rollout", "a" * 32, "ready", AT, "hosts version 120", 120, (120,), 256,
    running=tuple(f"g{n}/1#0" for n in range(12_345, 12_365)),
    metrics={f"some_metric_{n}": 1.0 for n in range(12)}, host=WORKER, pid=1,
)  # fmt: skip
SENT = {
    "CHUNK": sent(chunk(32), "g12345/7") - 32 * sizing.CHUNK_TOKEN,
    "TRAJECTORY": sent(trajectory(100, 600), "g12345/7")
    - 700 * sizing.TRAJECTORY_TOKEN
    - 600 * sizing.TEXT,
    "COMMAND": sent(
        Command(RUN, WORKER, "a" * 32, "start", AT, "g12345/7", "g12345", 7, 0, 120, 12_345), WORKER
    ),
    "ADMISSION": sent(Admission(RUN, "g12345", 12_345, 120, 8, "train", AT), "g12345"),
    "STATUS": sent(STATUS, WORKER),
    "STEP": sent(step(0, 0), "120"),
    "GROUP": (len(encode(step(64, 0))) - len(encode(step(0, 0)))) // 64,
    "SAMPLE": (len(encode(step(64, 8))) - len(encode(step(64, 0)))) // (64 * 8),
    "POLICY": sent(POLICY, "120"),
}


@pytest.mark.parametrize("name", SENT)
def test_a_record_takes_at_most_what_is_reckoned_with_and_not_much_less(name: str) -> None:
    reckoned = getattr(sizing, name)
    assert 0.6 * reckoned <= SENT[name] <= reckoned


def test_flows_add_up_to_the_records_of_a_second() -> None:
    found = flows(LOAD)
    rate = LOAD.trajectories_per_second
    assert found["trajectories"].records == rate == pytest.approx(100_000 / 600)
    exact = rate * sent(trajectory(100, 600), "g12345/7")
    assert exact <= found["trajectories"].size <= 1.05 * exact
    full, rest = divmod(600, 32)
    exact = rate * (full * sent(chunk(32), "g12345/7") + sent(chunk(rest), "g12345/7"))
    assert exact <= found["chunks"].size <= 1.1 * exact
    assert found["steps"].records * 8 * 64 == pytest.approx(rate)
    # everything grows with the tokens but the heartbeats
    twice = flows(replace(LOAD, tokens_per_second=200_000.0))
    for name, flow in found.items():
        assert twice[name].size == pytest.approx(flow.size * (1 if name == "workers" else 2))


def test_what_is_forgotten_does_not_pile_up() -> None:
    assert kept_seconds("chunks", 1e6, None) == kept_seconds("steps", 1e6, 3600.0) == 1e6
    assert kept_seconds("chunks", 1e6, 3600.0) == kept_seconds("trajectories", 1e6, 3600.0) == 3600
    assert kept_seconds("workers", 1e6, None) == 7200.0


def test_lanes_share_the_load_of_one_slot() -> None:
    assert lanes_needed(LOAD, brokers=3) == 3
    assert lanes_needed(replace(LOAD, tokens_per_second=5_000.0), brokers=3) == 1
    heavy = replace(LOAD, tokens_per_second=2e6)
    lanes = lanes_needed(heavy, brokers=3)
    assert flows(heavy)["chunks"].size / lanes <= sizing.PARTITION_BYTES
    assert flows(heavy)["chunks"].size / (lanes - 1) > sizing.PARTITION_BYTES


ARGUMENTS = (
    "topics plan ops/kubernetes/base/run.toml --tokens-per-second 100000 --response-tokens 600 "
    "--prompt-tokens 100 --hours 168 --workers 32"
)


def test_the_runbook_shows_what_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = CliRunner().invoke(cli, ARGUMENTS.split())
    assert said.exit_code == 0, said.output
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"$ dora {ARGUMENTS}\n{said.output}" in page


def test_the_plan_for_programs_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = CliRunner().invoke(cli, [*ARGUMENTS.split(), "--json"])
    plan = json.loads(said.output)
    assert [topic["name"] for topic in plan["topics"]] == list(RunTopics("demo").all)
    assert plan["disk_bytes"] == sum(topic["disk_bytes"] for topic in plan["topics"])
    assert plan["lanes_needed"] == 3
    assert plan["topics"][2]["bytes_per_second"] == flows(LOAD)["trajectories"].size
