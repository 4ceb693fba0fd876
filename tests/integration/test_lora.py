"""Adapters of several versions in one real vLLM, against merged weights in torch."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dora.errors import CanaryError, DoraError, PolicyError, WeightsError
from dora.producers.engines.base import Delta, Request
from dora.producers.engines.vllm import VllmEngine
from dora.producers.engines.vllm_lora import VllmAdapterEngine
from dora.producers.worker.hosting import Installer
from dora.schemas.records import Policy, pack_logprobs, pack_tokens
from dora.weights.adapters import write_adapter
from dora.weights.canary import canary_tokens
from dora.weights.store import WeightStore
from tests.adapters import RANK, make_adapter, merged_logprobs
from tests.engines import VOCABULARY, collect, drain
from tests.factories import sampling

pytestmark = pytest.mark.vllm

PROMPT = [(7 * i) % 38 + 2 for i in range(12)]
CANARY = canary_tokens(0, VOCABULARY, 64)
TOLERANCE = 1e-4
VERSIONS = 5


@pytest.fixture(scope="module")
def adapters(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [make_adapter(parent / f"v{v}", tiny_model_dir, seed=v) for v in range(VERSIONS)]


@pytest.fixture(scope="module")
def lora_engine(vllm_engine: VllmEngine, tiny_model_dir: Path) -> Iterator[VllmAdapterEngine]:
    """An engine for three adapters; vLLM's process-wide state is for one engine at a time."""
    vllm_engine.close()
    engine = VllmAdapterEngine(
        tiny_model_dir, rank=RANK, adapters=3, capacity=16, max_model_len=128, kv_cache_gib=0.25
    )
    yield engine
    engine.close()
    vllm_engine.restart(tiny_model_dir, 0)


@pytest.fixture
def engine(lora_engine: VllmAdapterEngine, adapters: list[Path]) -> VllmAdapterEngine:
    """The engine, idle, with versions 0 and 1."""
    drain(lora_engine)
    for version in lora_engine.versions - {0, 1}:
        lora_engine.unload(version)
    for version in {0, 1} - lora_engine.versions:
        lora_engine.load(adapters[version], version)
    return lora_engine


def request(name: str, version: int | None, seed: int = 0, length: int = 24) -> Request:
    return Request(name, PROMPT, sampling(max_new_tokens=length, seed=seed), version=version)


@pytest.fixture
def exact(tiny_model_dir: Path, adapters: list[Path]) -> Callable[[Delta, int], None]:
    """Whether a response's log-probabilities are those of a version's merged weights."""

    def check(delta: Delta, version: int) -> None:
        assert delta.finish_reason == "length", delta
        tokens = [*PROMPT, *delta.token_ids]
        expected = merged_logprobs(tiny_model_dir, adapters[version], tokens, len(PROMPT))
        assert delta.logprobs == pytest.approx(expected, abs=TOLERANCE)

    return check


def test_one_batch_mixes_versions_and_each_request_has_its_own_weights(
    engine: VllmAdapterEngine,
    adapters: list[Path],
    tiny_model_dir: Path,
    exact: Callable[[Delta, int], None],
) -> None:
    engine.load(adapters[2], 2)
    assert (engine.versions, engine.version) == ({0, 1, 2}, 2)
    for i in range(9):
        engine.add(request(f"r{i}", i % 3, seed=i // 3))
    engine.add(request("newest", None, seed=0))
    results: dict[str, Delta] = {}
    collect(results, engine.step())
    assert 0 < engine.memory_used < 1
    while engine.running:
        collect(results, engine.step())
    for i in range(9):
        exact(results[f"r{i}"], i % 3)
    assert results["newest"].token_ids == results["r2"].token_ids
    assert len({results[f"r{i}"].token_ids for i in range(3)}) == 3, "one seed, three policies"
    for version in range(3):
        expected = merged_logprobs(tiny_model_dir, adapters[version], PROMPT)
        assert engine.score(PROMPT, version) == pytest.approx(expected, abs=TOLERANCE)
    assert engine.memory_used == 0


def test_a_version_is_loaded_and_scored_while_others_run_and_nothing_of_them_is_lost(
    engine: VllmAdapterEngine,
    adapters: list[Path],
    tiny_model_dir: Path,
    exact: Callable[[Delta, int], None],
) -> None:
    for i in range(engine.capacity):  # no seat is free: scoring must not wait for one
        engine.add(request(f"r{i}", i % 2, seed=i))
    joined: dict[str, Delta] = {}
    for _ in range(5):
        collect(joined, engine.step())
    engine.load(adapters[2], 2)
    expected = merged_logprobs(tiny_model_dir, adapters[2], PROMPT)
    for _ in range(12):  # until responses end within the scoring itself
        assert engine.score(PROMPT, 2) == pytest.approx(expected, abs=TOLERANCE)
    assert engine.running == engine.capacity
    with pytest.raises(DoraError, match="requests of version 1 run"):
        engine.score(PROMPT, 1)
    with pytest.raises(DoraError, match="version 1 cannot be replaced while 8"):
        engine.load(adapters[1], 1)
    while engine.running:
        collect(joined, engine.step())
    assert len(joined) == engine.capacity
    for i in (0, 1, 6, 7):
        exact(joined[f"r{i}"], i % 2)


def test_a_version_is_unloaded_only_when_no_request_names_it(engine: VllmAdapterEngine) -> None:
    engine.add(request("a", 0))
    engine.step()
    with pytest.raises(DoraError, match="version 0 cannot be unloaded while 1 requests"):
        engine.unload(0)
    engine.abort("a")
    engine.unload(0)
    engine.unload(0)
    engine.unload(77)
    assert (engine.versions, engine.version) == ({1}, 1)
    engine.add(request("b", 0))
    [delta] = engine.step()
    assert "version 0 is not hosted (hosted: 1)" in (delta.error or "")
    with pytest.raises(DoraError, match="version 0: it is not hosted"):
        engine.score(PROMPT, 0)


def test_the_oldest_idle_version_makes_room_and_a_busy_one_never_does(
    engine: VllmAdapterEngine, adapters: list[Path]
) -> None:
    engine.load(adapters[2], 2)
    engine.add(request("a", 0))
    engine.load(adapters[3], 3)
    assert engine.versions == {0, 2, 3}
    assert engine.metrics == {"adapters": 3.0}
    engine.add(request("b", 2))
    engine.add(request("c", 3))
    with pytest.raises(DoraError, match="no place for the adapter of version 4"):
        engine.load(adapters[4], 4)
    assert {d.finish_reason for d in drain(engine).values()} == {"length"}


def damage(directory: Path, kind: str) -> None:
    file = directory / "adapter_model.safetensors"
    state = load_file(file)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    match kind:
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "no-configuration":
            (directory / "adapter_config.json").unlink()
        case "rank":
            config = json.loads((directory / "adapter_config.json").read_text())
            (directory / "adapter_config.json").write_text(json.dumps(config | {"r": 2 * RANK}))
        case "shape":
            write_adapter(directory, state | {name: state[name][:, :100]})
        case "half":
            del state[name]
            write_adapter(directory, state)
        case "layer":
            odd = {n.replace("down_proj", "side_proj"): t for n, t in state.items()}
            write_adapter(directory, odd)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cut", "cannot be read"),
        ("no-configuration", "adapter_config.json cannot be read"),
        ("rank", f"has rank {2 * RANK}, the run trains rank {RANK}"),
        ("shape", rf"down_proj.lora_A.weight has shape \[{RANK}, 100\].*need \[{RANK}, 512\]"),
        ("half", "is no half of a pair"),
        ("layer", "side_proj"),
    ],
)
def test_a_damaged_adapter_is_refused_with_the_reason_and_the_others_go_on(
    engine: VllmAdapterEngine,
    tiny_model_dir: Path,
    tmp_path: Path,
    exact: Callable[[Delta, int], None],
    kind: str,
    reason: str,
) -> None:
    bad = make_adapter(tmp_path / "bad", tiny_model_dir, seed=9)
    damage(bad, kind)
    engine.add(request("a", 1))
    joined: dict[str, Delta] = {}
    collect(joined, engine.step())
    with pytest.raises(WeightsError, match=f"adapter of version 2.*{reason}"):
        engine.load(bad, 2)
    assert (engine.versions, engine.version) == ({0, 1}, 1)
    while engine.running:
        collect(joined, engine.step())
    exact(joined["a"], 1)


def published(store: WeightStore, version: int, adapter: Path, canary: list[float]) -> Policy:
    state = load_file(adapter / "adapter_model.safetensors")
    config = (adapter / "adapter_config.json").read_bytes()
    made = store.publish(
        version,
        state,
        lambda target: (target / "adapter_config.json").write_bytes(config) and None,
        write=write_adapter,
    )
    return Policy(
        "r", version, "lora", made.uri, made.files, made.checksum, pack_tokens(CANARY),
        pack_logprobs(canary), (), 0,
    )  # fmt: skip


def test_each_adapter_passes_its_canary_and_a_wrong_one_is_not_hosted(
    engine: VllmAdapterEngine,
    adapters: list[Path],
    tiny_model_dir: Path,
    tmp_path: Path,
    exact: Callable[[Delta, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    installer = Installer(engine, store, tmp_path, tolerance=0.02, clock=time.monotonic)
    right = merged_logprobs(tiny_model_dir, adapters[2], CANARY)
    engine.add(request("a", 0))
    engine.step()
    policy = published(store, 2, adapters[2], right)
    installed = installer.install(policy)
    assert installed.canary.max_difference < TOLERANCE and not installed.fresh_engine
    engine.add(request("b", 2))
    assert installer.install(policy) is installed, "it runs: ordered twice, it is left alone"
    engine.abort("b")
    engine.unload(2)
    update = engine._add
    attempts = iter([adapters[4]])
    # what is simulated: vLLM reports success and holds another adapter
    monkeypatch.setattr(engine, "_add", lambda d, v: update(next(attempts, d), v))
    healed = installer.install(policy)
    assert healed.canary.max_difference < TOLERANCE and healed.fresh_engine
    engine.unload(2)
    with pytest.raises(CanaryError, match="with a fresh adapter too"):
        installer.install(published(store, 3, adapters[3], right))
    assert engine.versions == {0, 1}
    assert drain(engine)["a"].finish_reason == "length"


def test_a_rank_that_vllm_does_not_serve_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(PolicyError, match=r"policy\.lora\.rank = 513 is more than vLLM serves"):
        VllmAdapterEngine(tiny_model_dir, rank=513, adapters=3, capacity=16, max_model_len=128)


def test_a_failure_of_vllm_ends_what_runs_and_all_versions_are_hosted_again(
    engine: VllmAdapterEngine,
    exact: Callable[[Delta, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    engine.add(request("a", 0))
    engine.add(request("b", 1))
    monkeypatch.setattr(engine._llm.model_executor, "execute_model", fail)
    errors = {d.request_id: d.error or "" for d in engine.step() if d.finish_reason == "error"}
    assert set(errors) == {"a", "b"} and "out of memory" in errors["a"]
    assert engine.versions == {0, 1}
    for version in (0, 1):
        engine.add(request(f"r{version}", version))
    results = drain(engine)
    for version in (0, 1):
        exact(results[f"r{version}"], version)
