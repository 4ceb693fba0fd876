"""vLLM as an engine, against the same weights in torch."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from dora.errors import DoraError, WeightsError
from dora.producers.engines.base import Delta, Request
from dora.producers.engines.vllm import VllmEngine
from dora.schemas.records import Sampling
from tests import factories
from tests.engines import STOP, VOCABULARY, ModelMaker, drain

pytestmark = pytest.mark.vllm

PROMPT = [(7 * i) % 38 + 2 for i in range(12)]
TOLERANCE = 1e-4


@pytest.fixture
def engine(vllm_engine: VllmEngine, tiny_model_dir: Path) -> Iterator[VllmEngine]:
    yield vllm_engine
    if vllm_engine.running or vllm_engine.version != 0:
        vllm_engine.restart(tiny_model_dir, 0)


def reference(
    directory: Path,
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> torch.Tensor:
    """Log-probabilities of all tokens at every position, by torch: [length, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0] / temperature
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.log_softmax(-1)


def chosen(distribution: torch.Tensor, tokens: Sequence[int], start: int) -> list[float]:
    return [float(distribution[i - 1, tokens[i]]) for i in range(start, len(tokens))]


def run(engine: VllmEngine, requests: Sequence[Request]) -> dict[str, Delta]:
    """Runs the requests to their ends; the deltas of each joined into one."""
    for request in requests:
        engine.add(request)
    return drain(engine)


def sampling(**changes: object) -> Sampling:
    return factories.sampling(**{"max_new_tokens": 24, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5, "top_p": 0.8}],
    ids=["plain", "nucleus", "top-k"],
)
def test_log_probabilities_are_those_of_the_sampled_distribution(
    engine: VllmEngine,
    tiny_model_dir: Path,
    changes: dict[str, float],
) -> None:
    results = run(engine, [Request(f"r{i}", PROMPT, sampling(seed=i, **changes)) for i in range(6)])
    assert len({delta.token_ids for delta in results.values()}) > 1
    for delta in results.values():
        tokens = [*PROMPT, *delta.token_ids]
        expected = chosen(reference(tiny_model_dir, tokens, **changes), tokens, len(PROMPT))
        assert delta.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_are_drawn_with_the_reported_probabilities(
    engine: VllmEngine,
    tiny_model_dir: Path,
    seeded: bool,
) -> None:
    draws = 1500
    results = run(
        engine,
        [
            Request(
                f"r{i}",
                PROMPT,
                sampling(max_new_tokens=1, temperature=0.7, top_p=0.9, seed=i if seeded else None),
            )
            for i in range(draws)
        ],
    )
    counts = torch.zeros(VOCABULARY)
    for delta in results.values():
        counts[delta.token_ids[0]] += 1
    expected = reference(tiny_model_dir, PROMPT, temperature=0.7, top_p=0.9)[-1].exp()
    assert counts[expected == 0].sum() == 0
    deviation = (counts - draws * expected).abs()
    assert (deviation <= 5 * (draws * expected * (1 - expected)).sqrt() + 1e-3).all()


def test_a_seed_repeats_a_request_in_another_batch(engine: VllmEngine) -> None:
    alone = run(engine, [Request("x", PROMPT, sampling(seed=5))])["x"]
    others = [Request(f"o{i}", PROMPT[: 3 + i], sampling(seed=i)) for i in range(9)]
    crowded = run(engine, [*others, Request("x", PROMPT, sampling(seed=5))])["x"]
    assert crowded.token_ids == alone.token_ids


def test_requests_join_and_leave_between_steps(
    engine: VllmEngine,
    tiny_model_dir: Path,
) -> None:
    engine.add(Request("a", PROMPT, sampling()))
    engine.add(Request("b", PROMPT, sampling()))
    first = [delta for _ in range(3) for delta in engine.step()]
    assert {delta.request_id for delta in first} == {"a", "b"}
    engine.abort("b")
    engine.add(Request("c", PROMPT[:4], sampling(max_new_tokens=5)))
    assert engine.running == 2
    rest = drain(engine)
    assert set(rest) == {"a", "c"}
    tokens = [token for delta in first if delta.request_id == "a" for token in delta.token_ids]
    whole = [*PROMPT, *tokens, *rest["a"].token_ids]
    logprobs = [value for delta in first if delta.request_id == "a" for value in delta.logprobs]
    expected = chosen(reference(tiny_model_dir, whole), whole, len(PROMPT))
    assert [*logprobs, *rest["a"].logprobs] == pytest.approx(expected, abs=TOLERANCE)
    assert len(rest["c"].token_ids) == 5
    assert engine.step() == []


def test_an_aborted_request_goes_on_from_its_prefix(engine: VllmEngine) -> None:
    greedy = sampling(temperature=0.0)
    whole = run(engine, [Request("a", PROMPT, greedy)])["a"]
    engine.add(Request("a", PROMPT, greedy))
    begun = [token for _ in range(7) for delta in engine.step() for token in delta.token_ids]
    engine.abort("a")
    assert engine.running == 0
    rest = run(engine, [Request("a", PROMPT, greedy, prefix=tuple(begun))])["a"]
    assert (*begun, *rest.token_ids) == whole.token_ids
    assert rest.logprobs == pytest.approx(whole.logprobs[len(begun) :], abs=TOLERANCE)
    assert rest.finish_reason == whole.finish_reason == "length"


def test_the_stop_token_is_reported_with_its_log_probability(
    engine: VllmEngine,
    tiny_model_dir: Path,
) -> None:
    whole = run(engine, [Request("a", PROMPT, sampling(temperature=0.0))])["a"]
    stop = whole.token_ids[4]
    length = whole.token_ids.index(stop) + 1
    delta = run(engine, [Request("a", PROMPT, sampling(temperature=0.0, stop_token_ids=(stop,)))])[
        "a"
    ]
    assert delta.finish_reason == "stop"
    assert delta.token_ids == whole.token_ids[:length]
    tokens = [*PROMPT, *delta.token_ids]
    expected = chosen(reference(tiny_model_dir, tokens), tokens, len(PROMPT))
    assert delta.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_the_stop_token_of_the_model_configuration_does_not_count(engine: VllmEngine) -> None:
    results = run(engine, [Request(f"r{i}", PROMPT, sampling(seed=i)) for i in range(16)])
    assert any(STOP in delta.token_ids[:-1] for delta in results.values())
    assert {len(delta.token_ids) for delta in results.values()} == {24}


def test_a_prefix_that_ends_the_response_needs_no_more_tokens(engine: VllmEngine) -> None:
    stops = sampling(max_new_tokens=4, stop_token_ids=(STOP,))
    engine.add(Request("stop", PROMPT, stops, prefix=(5, STOP)))
    engine.add(Request("length", PROMPT, stops, prefix=(5, 6, 7, 8)))
    assert engine.running == 2
    assert engine.step() == [
        Delta("stop", finish_reason="stop"),
        Delta("length", finish_reason="length"),
    ]
    assert engine.running == 0


def test_a_bad_request_ends_with_its_error_and_the_others_go_on(engine: VllmEngine) -> None:
    results = run(
        engine,
        [
            Request("good", PROMPT, sampling()),
            Request("long", [2] * 128, sampling()),
            Request("foreign", [2, VOCABULARY], sampling()),
            Request("empty", [], sampling()),
            Request("hot", PROMPT, sampling(top_p=0.0)),
        ],
    )
    assert results["good"].finish_reason == "length"
    errors = {name: delta.error or "" for name, delta in results.items() if name != "good"}
    assert {results[name].finish_reason for name in errors} == {"error"}
    assert "128 tokens" in errors["long"]
    assert f"token {VOCABULARY}" in errors["foreign"]
    assert "empty" in errors["empty"]
    assert "top_p" in errors["hot"]


def test_the_context_cuts_a_response(engine: VllmEngine) -> None:
    delta = run(engine, [Request("a", [3] * 120, sampling())])["a"]
    assert delta.finish_reason == "length"
    assert len(delta.token_ids) == 8


def test_loaded_weights_are_exactly_the_new_model(
    engine: VllmEngine,
    tiny_model_dir: Path,
    make_model: ModelMaker,
) -> None:
    other = make_model(1)
    engine.add(Request("busy", PROMPT, sampling()))
    with pytest.raises(DoraError, match="while 1 requests run"):
        engine.load(other, 1)
    engine.abort("busy")
    start = time.perf_counter()
    engine.load(other, 1)
    assert time.perf_counter() - start < 2
    assert engine.version == 1
    expected = chosen(reference(other, PROMPT), PROMPT, 1)
    assert engine.score(PROMPT) == pytest.approx(expected, abs=TOLERANCE)
    delta = run(engine, [Request("a", PROMPT, sampling())])["a"]
    tokens = [*PROMPT, *delta.token_ids]
    expected = chosen(reference(other, tokens), tokens, len(PROMPT))
    assert delta.logprobs == pytest.approx(expected, abs=TOLERANCE)
    engine.load(tiny_model_dir, 0)
    expected = chosen(reference(tiny_model_dir, PROMPT), PROMPT, 1)
    assert engine.score(PROMPT) == pytest.approx(expected, abs=TOLERANCE)


def test_tied_embeddings_are_reloaded_exactly(
    engine: VllmEngine,
    make_model: ModelMaker,
) -> None:
    tied = [make_model(seed, tied=True) for seed in (2, 3)]
    engine.restart(tied[0], 2)
    for version in (3, 2, 3):
        engine.load(tied[version - 2], version)
        expected = chosen(reference(tied[version - 2], PROMPT), PROMPT, 1)
        assert engine.score(PROMPT) == pytest.approx(expected, abs=TOLERANCE)


def test_weights_with_nan_give_errors_and_good_weights_heal_them(
    engine: VllmEngine,
    tiny_model_dir: Path,
    make_model: ModelMaker,
) -> None:
    broken = make_model(4)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    engine.load(broken, 1)
    assert any(math.isnan(value) for value in engine.score(PROMPT))
    results = run(engine, [Request(f"r{i}", PROMPT, sampling()) for i in range(3)])
    assert {delta.finish_reason for delta in results.values()} == {"error"}
    assert all("not finite" in (delta.error or "") for delta in results.values())
    engine.load(tiny_model_dir, 0)
    assert run(engine, [Request("a", PROMPT, sampling())])["a"].finish_reason == "length"


def test_weights_that_do_not_fit_are_refused_until_a_restart(
    engine: VllmEngine,
    tiny_model_dir: Path,
    make_model: ModelMaker,
    tmp_path: Path,
) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        engine.load(tmp_path, 1)
    assert engine.version == 0
    with pytest.raises(WeightsError, match="could not apply"):
        engine.load(make_model(5, hidden=64), 1)
    assert engine.version is None
    with pytest.raises(DoraError, match="no valid weights"):
        engine.add(Request("a", PROMPT, sampling()))
    engine.restart(tiny_model_dir, 0)
    expected = chosen(reference(tiny_model_dir, PROMPT), PROMPT, 1)
    assert engine.score(PROMPT) == pytest.approx(expected, abs=TOLERANCE)


def test_a_failure_of_vllm_ends_what_runs_and_leaves_a_fresh_engine(
    engine: VllmEngine,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    engine.add(Request("a", PROMPT, sampling()))
    monkeypatch.setattr(engine._llm.model_executor, "execute_model", fail)
    [delta] = engine.step()
    assert delta.finish_reason == "error"
    assert "out of memory" in (delta.error or "")
    delta = run(engine, [Request("b", PROMPT, sampling())])["b"]
    tokens = [*PROMPT, *delta.token_ids]
    expected = chosen(reference(tiny_model_dir, tokens), tokens, len(PROMPT))
    assert delta.logprobs == pytest.approx(expected, abs=TOLERANCE)
