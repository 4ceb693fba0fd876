"""Installing versions into a real vLLM: checksums, the canary, and what happens when it fails."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.errors import CanaryError, WeightsError
from dora.producers.engines.vllm import VllmEngine
from dora.producers.worker.hosting import Installer
from dora.schemas.records import Policy, pack_logprobs, pack_tokens
from dora.weights.canary import canary_tokens
from dora.weights.models import copy_companions
from dora.weights.store import WeightStore
from tests.engines import VOCABULARY, ModelMaker

pytestmark = pytest.mark.vllm

CANARY = canary_tokens(0, VOCABULARY, 64)


def canary_of(directory: Path) -> list[float]:
    """The canary's log-probabilities by torch, as the trainer computes them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = model(torch.tensor([CANARY])).logits[0].log_softmax(-1)
    return [float(scores[i, token]) for i, token in enumerate(CANARY[1:])]


class Publisher:
    """Publishes model directories as versions, as the trainer does."""

    def __init__(self, directory: Path) -> None:
        self.store = WeightStore(str(directory))

    def publish(self, version: int, model: Path, *, canary_from: Path | None = None) -> Policy:
        state = load_file(model / "model.safetensors")
        made = self.store.publish(version, state, lambda target: copy_companions(model, target))
        return Policy(
            "r", version, "full", made.uri, made.files, made.checksum, pack_tokens(CANARY),
            pack_logprobs(canary_of(canary_from or model)), (), 0,
        )  # fmt: skip


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "weights")


@pytest.fixture
def installer(
    vllm_engine: VllmEngine, tiny_model_dir: Path, publisher: Publisher, tmp_path: Path
) -> Iterator[Installer]:
    yield Installer(
        vllm_engine, publisher.store, tmp_path / "cache", tolerance=0.02, clock=time.monotonic
    )
    vllm_engine.load(tiny_model_dir, 0)


def test_versions_one_after_the_other_pass_the_canary_without_a_new_engine(
    installer: Installer, publisher: Publisher, make_model: ModelMaker, vllm_engine: VllmEngine
) -> None:
    for version in (1, 2):
        installed = installer.install(publisher.publish(version, make_model(version)))
        assert installed.version == vllm_engine.version == version
        assert installed.canary.max_difference < 1e-4
        assert not installed.fresh_engine


def test_an_engine_that_cannot_reproduce_the_canary_fails_with_the_numbers(
    installer: Installer,
    publisher: Publisher,
    make_model: ModelMaker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = publisher.publish(3, make_model(3), canary_from=make_model(4))
    with pytest.raises(CanaryError) as caught:
        installer.install(policy)
    expected = [abs(a - b) for a, b in zip(
        canary_of(make_model(3)), canary_of(make_model(4)), strict=True
    )]  # fmt: skip
    assert f"by {max(expected):.4f} nats at most" in caught.value.message
    assert "with a fresh engine too" in caught.value.message
    assert caught.value.hint and "rollout.canary_tolerance" in caught.value.hint
    assert "starting a fresh engine" in caplog.text


def test_an_update_that_loads_wrong_weights_is_healed_by_a_fresh_engine(
    installer: Installer,
    publisher: Publisher,
    make_model: ModelMaker,
    vllm_engine: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, right = make_model(5), make_model(6)
    update = vllm_engine.load
    # what is simulated: an update in place that reports success and leaves other weights behind
    monkeypatch.setattr(vllm_engine, "load", lambda _, version: update(wrong, version))
    installed = installer.install(publisher.publish(6, right))
    assert installed.fresh_engine
    assert installed.canary.max_difference < 1e-4
    assert vllm_engine.score(CANARY) == pytest.approx(canary_of(right), abs=1e-4)


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_damaged_weights_never_reach_the_engine(
    installer: Installer,
    publisher: Publisher,
    make_model: ModelMaker,
    vllm_engine: VllmEngine,
    damage: str,
) -> None:
    policy = publisher.publish(7, make_model(7))
    file = next(Path(policy.weights_uri.removeprefix("file://")).glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-8] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    before = vllm_engine.version
    with pytest.raises(WeightsError, match=file.name):
        installer.install(policy)
    assert vllm_engine.version == before
