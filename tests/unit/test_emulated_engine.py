"""The emulated engine in virtual time."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dora.config import Config
from dora.config.emulation import EmulatedSection
from dora.errors import DoraError, PolicyError, WeightsError
from dora.producers.engines import create_engine
from dora.producers.engines.base import Delta, Request, complete, refusal, resumed_seed
from dora.producers.engines.emulated import EmulatedEngine, EmulatedSpec, emulated_spec
from tests.factories import sampling

STOP = 1
VOCABULARY = 100


class VirtualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


OPTIONS = ("report_every", "waits", "hosts_many")


def make(time: VirtualTime, *, capacity: int = 256, **changes: object) -> EmulatedEngine:
    options = {name: changes.pop(name) for name in OPTIONS if name in changes}
    spec = EmulatedSpec(EmulatedSection(**{"load_seconds": 0.0, **changes}))  # type: ignore[arg-type]
    engine = EmulatedEngine(
        spec,
        vocabulary=VOCABULARY,
        capacity=capacity,
        max_model_len=2000,
        clock=time.clock,
        sleep=time.sleep,
        **options,  # type: ignore[arg-type]
    )
    engine.load(Path("anywhere"), 0)
    return engine


def request(name: str, *, prefix: tuple[int, ...] = (), **changes: object) -> Request:
    settings = {"max_new_tokens": 1000, "stop_token_ids": (STOP,), **changes}
    return Request(name, (5, 6, 7), sampling(**settings), prefix)


def drain(engine: EmulatedEngine) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    for _ in range(5000):
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        if not engine.running:
            return deltas
    raise AssertionError("the engine does not finish")


def tokens(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_an_iteration_takes_the_base_and_a_share_per_sequence(time: VirtualTime) -> None:
    engine = make(
        time, length="fixed", length_mean=3, prefill_seconds_per_token=0.001, time_scale=2.0
    )
    for i in range(10):
        engine.add(request(f"r{i}"))
    start = time.now
    engine.step()
    assert time.now - start == pytest.approx(2 * (0.024 + 10 * 0.0001 + 10 * 3 * 0.001))
    start = time.now
    engine.step()
    assert time.now - start == pytest.approx(2 * (0.024 + 10 * 0.0001))


def test_the_device_goes_on_beside_its_driver(time: VirtualTime) -> None:
    engine = make(time, length="fixed", length_mean=300, iteration_seconds_per_sequence=0)
    engine.add(request("a"))
    engine.step()
    start = time.now
    time.now += 0.01
    engine.step()
    assert time.now - start == pytest.approx(0.024)
    time.now += 5.0
    assert engine.due() == 0.0
    (delta,) = engine.step()
    assert len(delta.token_ids) == 208  # 5 seconds of iterations


def test_nothing_waits_when_nothing_runs(time: VirtualTime) -> None:
    engine = make(time)
    assert engine.step() == []
    assert time.now == 100.0


def test_a_scale_of_zero_never_sleeps(time: VirtualTime) -> None:
    engine = make(time, time_scale=0.0)
    engine.add(request("a"))
    drain(engine)
    engine.load(Path("anywhere"), 3)
    assert time.now == 100.0
    assert engine.version == 3


def test_requests_beyond_the_capacity_wait_their_turn(time: VirtualTime) -> None:
    engine = make(time, capacity=2, length="fixed", length_mean=2)
    for name in ("a", "b", "c"):
        engine.add(request(name))
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}
    assert engine.running == 1
    assert {delta.request_id for delta in engine.step()} == {"c"}


def test_a_response_ends_with_its_stop_token_and_uniform_log_probabilities(
    time: VirtualTime,
) -> None:
    engine = make(time, length="fixed", length_mean=20)
    engine.add(request("a"))
    deltas = drain(engine)["a"]
    response = tokens(deltas)
    assert len(response) == 20
    assert response[-1] == STOP
    assert STOP not in response[:-1]
    assert all(0 <= token < VOCABULARY for token in response)
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["stop"]
    values = [value for delta in deltas for value in delta.logprobs]
    assert values == pytest.approx([-math.log(VOCABULARY)] * 20)
    assert engine.score(response) == [-math.log(VOCABULARY)] * 19
    assert engine.score([4]) == engine.score([]) == []


def test_a_response_is_cut_at_its_limit_without_stop_token(time: VirtualTime) -> None:
    engine = make(time, length="fixed", length_mean=20)
    engine.add(request("a", max_new_tokens=7))
    engine.add(Request("context", [3] * 1990, sampling(max_new_tokens=1000)))
    deltas = drain(engine)
    assert len(tokens(deltas["a"])) == 7
    assert STOP not in tokens(deltas["a"])
    assert deltas["a"][-1].finish_reason == "length"
    assert len(tokens(deltas["context"])) == 10


def test_the_limit_at_the_drawn_length_still_stops(time: VirtualTime) -> None:
    engine = make(time, length="fixed", length_mean=7)
    engine.add(request("a", max_new_tokens=7))
    deltas = drain(engine)["a"]
    assert tokens(deltas)[-1] == STOP
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_resumed_request_goes_on_as_it_would_have(time: VirtualTime, name: str) -> None:
    engine = make(time)
    engine.add(request(name, seed=1))
    whole = tokens(drain(engine)[name])
    other = make(time, capacity=4)
    cut = len(whole) // 3 + 1
    other.add(request(name, seed=2, prefix=whole[:cut]))
    assert whole[:cut] + tokens(drain(other)[name]) == whole


def test_a_complete_prefix_ends_at_once(time: VirtualTime) -> None:
    engine = make(time)
    engine.add(request("stopped", prefix=(9, STOP)))
    engine.add(request("full", prefix=(9, 8), max_new_tokens=2))
    assert engine.running == 2
    assert engine.step() == [
        Delta("stopped", finish_reason="stop"),
        Delta("full", finish_reason="length"),
    ]
    assert engine.running == 0


def test_an_aborted_request_is_never_heard_of_again(time: VirtualTime) -> None:
    engine = make(time, length="fixed", length_mean=5)
    engine.add(request("a"))
    engine.add(request("bad", top_p=0.0))
    engine.step()
    engine.abort("a")
    engine.abort("unknown")
    assert engine.running == 0
    engine.add(request("bad", top_p=0.0))
    engine.abort("bad")
    assert engine.step() == []


def test_a_bad_request_ends_with_its_error(time: VirtualTime) -> None:
    engine = make(time, length="fixed", length_mean=2)
    engine.add(request("good"))
    engine.add(Request("long", [3] * 2000, sampling(max_new_tokens=5)))
    deltas = drain(engine)
    assert deltas["good"][-1].finish_reason == "stop"
    assert deltas["long"][0].finish_reason == "error"
    assert "2000 tokens" in (deltas["long"][0].error or "")


def test_weights_change_only_while_nothing_runs(time: VirtualTime) -> None:
    engine = make(time, load_seconds=0.5)
    engine.add(request("a"))
    with pytest.raises(DoraError, match="while 1 requests run"):
        engine.load(Path("anywhere"), 1)
    with pytest.raises(DoraError, match="runs already"):
        engine.add(request("a"))
    start = time.now
    engine.restart(Path("anywhere"), 1)
    assert engine.version == 1
    assert engine.running == 0
    assert time.now - start == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Request("r", [], sampling(max_new_tokens=1)), "prompt is empty"),
        (Request("r", [3, -1], sampling(max_new_tokens=1)), "prompt holds token -1"),
        (Request("r", [3], sampling(max_new_tokens=1), (100,)), "prefix holds token 100"),
        (Request("r", [3] * 6, sampling(max_new_tokens=9), (1,) * 4), "have 10 tokens"),
        (Request("r", [3], sampling(max_new_tokens=0)), "max_new_tokens is 0"),
        (Request("r", [3], sampling(max_new_tokens=1, stop_token_ids=(100,))), "stop token 100"),
        (Request("r", [3], sampling(max_new_tokens=1, temperature=math.nan)), "temperature"),
        (Request("r", [3], sampling(max_new_tokens=1, top_p=1.5)), "top_p is 1.5"),
        (Request("r", [3], sampling(max_new_tokens=1, top_k=-1)), "top_k is -1"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(changed: Request, message: str) -> None:
    assert message in (refusal(changed, VOCABULARY, 10) or "")


def test_a_sound_request_is_not_refused() -> None:
    assert refusal(request("a"), VOCABULARY, 10) is None
    assert complete(request("a", prefix=(4,))) is None


def test_a_resumed_seed_differs_at_every_position_and_fits_in_63_bits() -> None:
    assert resumed_seed(7, 0) == 7
    seeds = {resumed_seed(seed, position) for seed in range(50) for position in range(1, 50)}
    assert len(seeds) == 50 * 49
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_configuration_makes_an_emulated_engine(tmp_path: Path, time: VirtualTime) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "m"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward", "max_prompt_tokens": 10},
            "trainer": {"steps": 1},
            "rollout": {
                "engine": "emulated",
                "capacity": 8,
                "max_new_tokens": 40,
                "emulated": {"length": "fixed", "length_mean": 4, "load_seconds": 2.0},
            },
        }
    )
    engine = create_engine(config, "w0", clock=time.clock, sleep=time.sleep)
    assert (engine.name, engine.capacity, engine.max_model_len) == ("emulated", 8, 50)
    with pytest.raises(DoraError, match="never started"):
        engine.add(request("a"))
    with pytest.raises(WeightsError, match=r"config\.json"):
        engine.restart(tmp_path, 4)
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    engine.restart(tmp_path, 4)
    assert (engine.version, engine.vocabulary) == (4, 32)
    assert time.now == 100.0
    engine.add(request("a"))
    assert engine.step() == []
    # What is added while weights are loaded starts afterwards.
    time.now += 2.0 + 4 * (0.024 + 0.0001) - 0.001
    assert engine.step() == []
    assert engine.due() == pytest.approx(0.001, rel=0.1)
    time.now += 0.0011
    (delta,) = engine.step()
    assert delta.finish_reason == "stop"
    assert len(delta.token_ids) == 4
    assert engine.score([3, 4]) == [-math.log(32)]


def test_tokens_are_reported_in_chunks_and_at_the_end(time: VirtualTime) -> None:
    engine = make(time, report_every=8, length="fixed", length_mean=20)
    engine.add(request("a", prefix=(9, 9, 9)))
    deltas = drain(engine)["a"]
    assert [len(delta.token_ids) for delta in deltas] == [5, 8, 4]
    assert [len(delta.logprobs) for delta in deltas] == [5, 8, 4]
    assert tokens(deltas)[-1] == STOP


def test_chunks_hold_the_tokens_that_single_reports_would(time: VirtualTime) -> None:
    one, many = make(time, length_mean=300), make(time, length_mean=300, report_every=64)
    one.add(request("a"))
    many.add(request("a"))
    assert tokens(drain(one)["a"]) == tokens(drain(many)["a"])


def test_what_was_generated_since_the_last_report_can_be_had(time: VirtualTime) -> None:
    engine = make(
        time, report_every=100, length="fixed", length_mean=300, iteration_seconds_per_sequence=0
    )
    whole = make(time, length="fixed", length_mean=300)
    whole.add(request("a"))
    assert engine.unreported("a") is None
    engine.add(request("a"))
    assert engine.unreported("a") is None
    time.now += 0.024 * 130.5
    (delta,) = engine.step()
    assert len(delta.token_ids) == 100
    rest = engine.unreported("a")
    assert rest is not None
    assert (len(rest.token_ids), rest.finish_reason) == (30, None)
    assert engine.unreported("a") is None
    response = tokens(drain(whole)["a"])
    assert response[:130] == (*delta.token_ids, *rest.token_ids)
    # One that has ended keeps its last token for whoever goes on with it.
    time.now += 60.0
    rest = engine.unreported("a")
    assert rest is not None
    assert len(rest.token_ids) == 169
    engine.abort("a")
    engine.add(request("a", prefix=response[:299]))
    assert tokens(drain(engine)["a"]) == (STOP,)


def test_an_engine_that_does_not_wait_says_when_to_come_again(time: VirtualTime) -> None:
    engine = make(time, waits=False, report_every=10, length="fixed", length_mean=15)
    assert engine.step() == []
    engine.add(request("a"))
    assert engine.step() == []
    assert engine.due() == pytest.approx(10 * 0.0241, rel=1e-3)
    time.now += engine.due() + 1e-6
    assert [len(delta.token_ids) for delta in engine.step()] == [10]
    time.now += 0.5
    assert engine.due() == 0.0
    (delta,) = engine.step()
    assert (len(delta.token_ids), delta.finish_reason) == (5, "stop")
    # It ended 0.38 s before it was asked for, after about the same time.
    assert engine.metrics["emulation_late_share"] == pytest.approx(0.38 / 0.36, rel=0.02)
    assert engine.due() == 1.0


def test_a_pause_stops_the_device(time: VirtualTime) -> None:
    engine = make(time, waits=False, length="fixed", length_mean=5)
    engine.add(request("a"))
    engine.pause()
    time.now += 10.0
    assert engine.step() == []
    engine.resume()
    assert engine.due() == pytest.approx(0.0241, rel=1e-2)


def test_a_full_cache_preempts_and_all_ends_well(time: VirtualTime) -> None:
    engine = make(time, kv_cache_tokens=40, length="fixed", length_mean=25, report_every=4)
    alone = make(time, length="fixed", length_mean=25)
    names = ("a", "b", "c")
    for name in names:
        engine.add(request(name))
        alone.add(request(name))
    early = [delta for delta in engine.step() if delta.request_id == "c"]
    assert 0 < engine.memory_used <= 1
    deltas, expected = drain(engine), drain(alone)
    assert engine.metrics["preemptions_total"] > 0
    assert engine.memory_used == 0.0
    assert tokens([*early, *deltas["c"]]) == tokens(expected["c"])


def test_a_request_larger_than_the_memory_ends_with_its_error(time: VirtualTime) -> None:
    engine = make(time, kv_cache_tokens=20, length="fixed", length_mean=25)
    engine.add(request("a"))
    (delta,) = engine.step()
    assert delta.finish_reason == "error"
    assert "grows to 28 tokens, but the key-value cache holds 20" in (delta.error or "")


def test_versions_are_loaded_beside_what_runs(time: VirtualTime) -> None:
    engine = make(
        time, hosts_many=True, waits=False, load_seconds=2.0, length="fixed", length_mean=100,
        report_every=50,
    )  # fmt: skip
    time.now += 2.0
    engine.add(replace(request("old"), version=0))
    engine.load(Path("anywhere"), 1)
    assert engine.versions == {0, 1}
    assert engine.version == 1
    engine.add(replace(request("new"), version=1))
    with pytest.raises(DoraError, match="version 2 is not hosted; hosted are 0, 1"):
        engine.add(replace(request("none"), version=2))
    with pytest.raises(DoraError, match="version 0 cannot be unloaded: 1 requests"):
        engine.unload(0)
    ends: dict[str, float] = {}
    start = time.now
    while engine.running:
        time.now += max(engine.due(), 1e-6)
        ends |= {d.request_id: time.now - start for d in engine.step() if d.finish_reason}
    assert ends["old"] == pytest.approx(100 * 0.0241, rel=0.01)
    assert ends["new"] == pytest.approx(2.0 + 100 * 0.0241, rel=0.01)
    engine.unload(0)
    assert engine.versions == {1}


def test_the_number_of_a_worker_chooses_its_speed() -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic"},
            "trainer": {"steps": 1, "engine": "emulated"},
            "rollout": {"engine": "emulated", "emulated": {"speeds": [1.0, 0.5, 0.25]}},
        }
    )
    speeds = [emulated_spec(config, name).speed for name in ("w0", "w1", "rollout-5", "other")]
    assert speeds == [1.0, 0.5, 0.25, 1.0]


def test_lengths_from_a_file_are_checked_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\nx\n")
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic"},
            "trainer": {"steps": 1, "engine": "emulated"},
            "rollout": {
                "engine": "emulated",
                "emulated": {"length": "empirical", "length_file": "lengths.txt"},
            },
            "home": str(tmp_path),
        }
    )
    with pytest.raises(PolicyError, match="line 2 is 'x'"):
        create_engine(config, "w0")
    (tmp_path / "lengths.txt").write_text("5\n600\n")
    assert emulated_spec(config, "w0").length_values == (5, 600)
