"""A tiny language model, and one vLLM engine for a whole session: importing vLLM is slow."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from dora.producers.engines.base import Delta, Engine

VOCABULARY = 40
STOP = 1

ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Writes a two-layer Qwen2 with random weights and returns its directory."""

    def make(seed: int = 0, *, tied: bool = False, hidden: int = 128) -> Path:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            hidden_size=hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=512,
            vocab_size=VOCABULARY,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            # Large enough for distributions far from uniform, so that errors show.
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=STOP,
            pad_token_id=0,
            dtype="float32",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(config).float()
        directory = tmp_path_factory.mktemp(f"model-{seed}")
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_model: ModelMaker) -> Path:
    """The model that `vllm_engine` starts with, as version 0."""
    return make_model(0)


@pytest.fixture(scope="session")
def vllm_engine(tiny_model_dir: Path) -> Iterator["object"]:
    """A vLLM engine of 16 sequences and a context of 128; leave it idle with version 0."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from dora.producers.engines.vllm import VllmEngine

    engine = VllmEngine(capacity=16, max_model_len=128, kv_cache_gib=0.25)
    engine.restart(tiny_model_dir, 0)
    yield engine
    engine.close()


def drain(engine: Engine, until: Callable[[], bool] = lambda: False) -> dict[str, Delta]:
    """Run to the end, or `until` something holds; the deltas of each request joined into one."""
    joined: dict[str, Delta] = {}
    deadline = time.monotonic() + 60
    while engine.running and not until():
        assert time.monotonic() < deadline, "the engine does not finish"
        collect(joined, engine.step())
    return joined


def collect(joined: dict[str, Delta], deltas: Iterable[Delta]) -> None:
    """Join the deltas to those before."""
    for delta in deltas:
        before = joined.get(delta.request_id, Delta(delta.request_id))
        assert before.finish_reason is None, "a delta after the last one"
        joined[delta.request_id] = Delta(
            delta.request_id,
            before.token_ids + delta.token_ids,
            before.logprobs + delta.logprobs,
            delta.finish_reason,
            delta.error,
        )
