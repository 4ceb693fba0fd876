"""The demo's task and policy: hand cases, and a short warm start that can be loaded everywhere."""

import json
import random
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from dora.config import Config
from dora.errors import PolicyError
from dora.producers.tasks.hooks import load_hook
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import load_tokenizer, stop_token_ids

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    hook = load_hook("spell_backward:prepare", EXAMPLES, "policy.prepare")
    return sys.modules[hook.__module__]


def configure(model: Path, name: str = "spell_backward.toml", **policy: str) -> Config:
    data = tomllib.loads((EXAMPLES / name).read_text())
    data["policy"] |= {"model": str(model), **policy}
    return Config.model_validate(data | {"home": EXAMPLES})


@pytest.fixture(scope="module")
def prepared(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "policy"
    recipe = demo.WarmStart(steps=20, batch=8)
    demo.prepare_policy(directory, configure(directory), recipe)
    return directory


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("2t1a0c", "tac"),
        ("2t2t2t1a0c0c", "tac"),
        ("3k2o1o0b", "koob"),
        ("2t1a2t", "tat"),
        ("2t1", None),
        ("2t1a0c=", None),
        ("t2a1c0", None),
        ("", ""),
    ],
)
def test_an_answer_is_read_by_collapsing_repeated_pairs(
    demo: ModuleType, response: str, answer: str | None
) -> None:
    assert demo.read_answer(response) == answer


def test_a_prompt_numbers_the_letters_in_lower_case(demo: ModuleType) -> None:
    assert demo.render({"metadata": {"word": "Cat"}}) == "0c1a2t="


@pytest.mark.parametrize(
    ("response", "reward"),
    [("2t1a0c", 1.0), ("2t2t1a0c", 1.0), ("2t1a", 0.0), ("2t1a0c0x", 0.0), ("??", 0.0), ("", 0.0)],
)
def test_only_full_marks_count(demo: ModuleType, response: str, reward: float) -> None:
    assert demo.verify(response, {"answer": "taC"}) == reward


@pytest.mark.parametrize("word", ["cat", "book", "abcdefghij"])
def test_right_demonstrations_are_right(demo: ModuleType, word: str) -> None:
    recipe = demo.WarmStart(early=0.0, dither=0.5)
    texts = {demo.demonstrate(word, recipe, random.Random(n)) for n in range(50)}
    assert demo.count_down(word) in texts
    assert len(texts) > 20
    assert {demo.verify(text, {"answer": word[::-1]}) for text in texts} == {1.0}


def test_early_demonstrations_are_wrong(demo: ModuleType) -> None:
    recipe = demo.WarmStart(early=1.0)
    texts = {demo.demonstrate("orange", recipe, random.Random(n)) for n in range(50)}
    assert {demo.verify(text, {"answer": "egnaro"}) for text in texts} == {0.0}


def test_the_warm_start_sees_no_held_out_word(demo: ModuleType, prepared: Path) -> None:
    config = configure(prepared)
    words = {demo.number_letters(word) for word in demo.training_words(config)}
    task = create_task(config, load_tokenizer(config.policy))
    assert not words & {task.prompt(n, "eval").text for n in range(512)}
    assert {task.prompt(n, "train").text for n in range(64)} <= words


def test_the_prepared_policy_has_the_stated_shape(prepared: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepared)
    assert sum(weight.numel() for weight in model.parameters()) == 535_936
    assert not model.config.tie_word_embeddings
    assert [file.name for file in prepared.parent.iterdir()] == ["policy"]
    assert (prepared / "model.safetensors").is_file()


def test_the_tokenizer_has_one_token_per_character(demo: ModuleType, prepared: Path) -> None:
    config = configure(prepared)
    tokenizer = load_tokenizer(config.policy)
    tokens = tokenizer.encode("0c1a2t=")
    assert tokens == tuple(demo.encode("0c1a2t="))
    (end,) = stop_token_ids(config, tokenizer)
    assert tokenizer.decode([*tokens, end]) == "0c1a2t="
    assert demo.decode([*tokens, end]) == "0c1a2t="


def test_sampled_log_probabilities_are_those_of_a_full_pass(
    demo: ModuleType, prepared: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepared).eval()
    prompts = ["0c1a2t=", "0b1a2n3a4n5a6s="]
    samples = list(demo.sample(model, prompts, 12, torch.Generator().manual_seed(0)))
    for prompt, (tokens, logprobs) in zip(prompts, samples, strict=True):
        start = demo.encode(prompt)
        with torch.inference_mode():
            logits = model(torch.tensor([[*start, *tokens]])).logits[0].log_softmax(-1)
        full = [logits[len(start) + n - 1, token].item() for n, token in enumerate(tokens)]
        assert logprobs == pytest.approx(full, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["spell_backward.toml", "spell_backward_lora.toml", "long_tail.toml"]
)
def test_the_examples_name_hooks_that_exist(name: str, prepared: Path) -> None:
    config = configure(prepared, name)
    assert config.policy.prepare is not None
    assert config.task.verifier is not None
    load_hook(config.policy.prepare, EXAMPLES, "policy.prepare")
    load_hook(config.task.verifier, EXAMPLES, "task.verifier")
    task = create_task(config, load_tokenizer(config.policy))
    assert task.prompt(0, "train").text.endswith("=")


def test_the_gpu_example_reads_its_data_set(prepared: Path) -> None:
    config = configure(prepared, "gpu_math.toml")
    plain = config.model_copy(
        update={"task": config.task.model_copy(update={"chat_template": False})}
    )
    task = create_task(plain, load_tokenizer(config.policy))
    assert task.prompt(0, "eval").item["answer"]
    with pytest.raises(PolicyError, match="has no chat template"):
        create_task(config, load_tokenizer(config.policy))


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(prepared: Path) -> None:
    small = prepared.parent.parent / "small"
    small.mkdir(exist_ok=True)
    settings = json.loads((prepared / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(settings | {"vocab_size": 30}))
    config = configure(small, tokenizer=str(prepared))
    with pytest.raises(PolicyError, match=r"up to 39, but the model .* vocabulary of 30"):
        load_tokenizer(config.policy)


def test_a_model_directory_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PolicyError, match="no such directory"):
        load_tokenizer(configure(Path("/no/such/model")).policy)


def test_a_stop_token_outside_the_vocabulary_is_refused(prepared: Path) -> None:
    config = configure(prepared)
    rollout = config.rollout.model_copy(update={"stop_token_ids": (40,)})
    with pytest.raises(PolicyError, match="40 is not a token"):
        stop_token_ids(
            config.model_copy(update={"rollout": rollout}), load_tokenizer(config.policy)
        )
