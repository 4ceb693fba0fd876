"""The demo: a small language model learns to spell words backward, from nothing, on two CPU cores.

The task is `spell_backward` of reasoning-gym with words of 3 to 10 letters. A prompt numbers the
letters of the word (`cat` is `0c1a2t=`), and the response counts down (`2t1a0c`). The answer is
read from a response by collapsing directly repeated pairs and dropping the digits; it counts when
reasoning-gym's own scorer gives it exactly 1.

The policy is a Qwen2 model of 0.54 million parameters. Its warm start imitates careless writers:
most stop too early, and some dither, repeating a pair again and again. So it starts at about 20 %
right and its responses have a long tail, for which asynchronous rollout is made.

`spell_backward.toml` names the functions `render`, `verify` and `prepare`. The module itself
imports nothing heavy, because the verifier processes import it too.
"""

import functools
import math
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.producers.tasks.gym_library import load_dataset

if TYPE_CHECKING:
    import torch

    from dora.config import Config

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "=0123456789abcdefghijklmnopqrstuvwxyz"
IGNORED = -100
VOCABULARY = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET])}

_PAIRS = re.compile(r"(?:[0-9][a-z])*")


def number_letters(word: str) -> str:
    """The prompt of a word: `cat` becomes `0c1a2t=`."""
    return "".join(f"{place}{letter}" for place, letter in enumerate(word)) + "="


def count_down(word: str) -> str:
    """The shortest right response: `cat` becomes `2t1a0c`."""
    return "".join(f"{place}{letter}" for place, letter in reversed(list(enumerate(word))))


def read_answer(response: str) -> str | None:
    """The word that a response spells: directly repeated pairs collapsed, digits dropped.

    None when the response is anything else than pairs of a digit and a letter.
    """
    if not _PAIRS.fullmatch(response):
        return None
    pairs = [response[start : start + 2] for start in range(0, len(response), 2)]
    kept = [pair for place, pair in enumerate(pairs) if place == 0 or pair != pairs[place - 1]]
    return "".join(pair[1] for pair in kept)


def render(item: dict[str, Any]) -> str:
    """The prompt of a reasoning-gym entry."""
    return number_letters(item["metadata"]["word"].lower())


def verify(response: str, item: dict[str, Any]) -> float:
    """1 when reasoning-gym gives the answer full marks, else 0."""
    return float(_scorer().score_answer(read_answer(response), item) == 1)


@functools.cache
def _scorer() -> Any:
    return load_dataset("spell_backward", {"seed": 0})


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the policy is taught before the run: the demonstrations and the optimisation."""

    early: float = 0.75
    """Share of demonstrations that stop before the word is complete."""
    dither: float = 0.15
    """Share of demonstrations that are right but repeat pairs."""
    repeats: float = 1.0
    """Mean number of repetitions of a pair in a dithering demonstration."""
    moody: bool = False
    """Draw that mean anew for each demonstration, from an exponential distribution: some dither
    several times as much as others."""
    steps: int = 300
    batch: int = 48
    learning_rate: float = 3e-3
    longest: int = 96
    """Tokens at which a demonstration is cut, its end token included."""


LONG_TAIL = WarmStart(early=0.65, dither=0.25, repeats=2.5, moody=True, longest=192)


def demonstrate(word: str, recipe: WarmStart, rng: random.Random) -> str:
    """What a careless writer answers to a word."""
    pairs = [f"{place}{letter}" for place, letter in reversed(list(enumerate(word)))]
    kind = rng.random()
    if kind < recipe.early:
        return "".join(pairs[: rng.randrange(1, len(pairs))])
    if kind >= recipe.early + recipe.dither:
        return "".join(pairs)
    repeats = recipe.repeats * (rng.expovariate(1.0) if recipe.moody else 1.0)
    more = repeats / (1 + repeats)
    written = []
    for pair in pairs:
        written.append(pair)
        while rng.random() < more:
            written.append(pair)
    return "".join(written)


def training_words(config: "Config") -> list[str]:
    """The task's words in lower case, without those that the run keeps for evaluation."""
    from dora.producers.tasks.base import is_held_out

    dataset = load_dataset("spell_backward", {**config.task.parameters, "seed": 0})
    words = sorted({word.lower() for word in dataset.words})
    fraction = config.task.held_out_fraction
    return [word for word in words if not is_held_out(number_letters(word), fraction)]


def prepare(directory: Path, config: "Config") -> None:
    """Make the model directory: tokenizer, and a policy that is right about one time in five."""
    prepare_policy(directory, config, WarmStart())


def prepare_long_tail(directory: Path, config: "Config") -> None:
    """The same with more and longer dithering: a heavier tail of long responses."""
    prepare_policy(directory, config, LONG_TAIL)


def prepare_policy(directory: Path, config: "Config", recipe: WarmStart) -> None:
    """Train the warm start and put the finished directory in place in one move.

    Deterministic for a seed (`run.seed`).
    """
    import torch

    threads = torch.get_num_threads()
    # At this size a second thread gains little, and costs much where the cores are busy.
    torch.set_num_threads(1)
    try:
        model = new_model(config.run.seed)
        warm_up(model, training_words(config), recipe, config.run.seed)
    finally:
        torch.set_num_threads(threads)
    draft = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    draft.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(draft)
        new_tokenizer().save_pretrained(draft)
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def new_tokenizer() -> Any:
    """A Hugging Face tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def new_model(seed: int) -> Any:
    """An untrained Qwen2 model of 0.54 million parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        eos_token_id=VOCABULARY[EOS],
        bos_token_id=None,
        use_cache=True,
        # The usual 0.02 suits wide models. At this width, and with small embeddings, copying is
        # learnt hundreds of steps later, and when depends on the seed.
        initializer_range=0.08,
    )
    model = Qwen2ForCausalLM(shape).float()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    return model


def encode(text: str) -> list[int]:
    """Token ids of a text of this task."""
    return [VOCABULARY[character] for character in text]


def decode(token_ids: list[int]) -> str:
    """Text of token ids up to the first end token."""
    tokens = [PAD, EOS, UNKNOWN, *ALPHABET]
    end = token_ids.index(VOCABULARY[EOS]) if VOCABULARY[EOS] in token_ids else len(token_ids)
    return "".join(tokens[token] for token in token_ids[:end])


def warm_up(model: Any, words: list[str], recipe: WarmStart, seed: int) -> None:
    """Imitate careless writers: cross-entropy on their responses, AdamW, cosine schedule."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: (
            min(1.0, (done + 1) / 20) * 0.5 * (1 + math.cos(math.pi * done / recipe.steps))
        ),
    )
    rng = random.Random(seed)
    started = time.monotonic()
    model.train()
    for step in range(1, recipe.steps + 1):
        optimizer.zero_grad()
        loss = 0.0
        for tokens, labels, share in _batch(words, recipe, rng):
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
            part = share * torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED
            )
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == recipe.steps:
            elapsed = time.monotonic() - started
            print(
                f"warm start: step {step}/{recipe.steps} loss {loss:.3f} ({elapsed:.0f} s)",
                flush=True,
            )
    model.eval()


def _batch(
    words: list[str], recipe: WarmStart, rng: random.Random
) -> "Iterator[tuple[torch.Tensor, torch.Tensor, float]]":
    """A batch in parts of similar length, so that little is padding: tokens [rows, width], labels
    [rows, width], and the part's share of the batch's labels.

    Padding is on the right, behind everything that causal attention can see.
    """
    import torch

    rows = []
    for word in rng.choices(words, k=recipe.batch):
        prompt = encode(number_letters(word))
        response = [*encode(demonstrate(word, recipe, rng)), VOCABULARY[EOS]]
        rows.append((prompt, response[: recipe.longest]))
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    total = sum(len(response) for _, response in rows)
    size = -(-len(rows) // 3)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = len(part[-1][0]) + len(part[-1][1])
        tokens = torch.full((len(part), width), VOCABULARY[PAD])
        labels = torch.full((len(part), width), IGNORED)
        for row, (prompt, response) in enumerate(part):
            length = len(prompt) + len(response)
            tokens[row, :length] = torch.tensor(prompt + response)
            labels[row, len(prompt) : length] = torch.tensor(response)
        yield tokens, labels, sum(len(response) for _, response in part) / total


def sample(
    model: Any, prompts: list[str], limit: int, generator: "torch.Generator"
) -> "Iterator[tuple[list[int], list[float]]]":
    """Sample a response to every prompt at temperature 1, with plain torch and no engine.

    Yields, in order, token ids (the end token included) and their log-probabilities.
    """
    import torch

    rows = [encode(prompt) for prompt in prompts]
    width = max(map(len, rows))
    pad, eos = VOCABULARY[PAD], VOCABULARY[EOS]
    tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    # Log-probabilities are exact only if places count from each prompt's own start.
    places = (mask.cumsum(1) - 1).clamp(min=0)
    written: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    ended = torch.zeros(len(rows), dtype=torch.bool)
    cache = None
    with torch.inference_mode():
        for _ in range(limit):
            output = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            logprobs = output.logits[:, -1].float().log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
            scores.append(logprobs.gather(1, tokens))
            written.append(tokens)
            ended |= tokens[:, 0] == eos
            if ended.all():
                break
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            places = places[:, -1:] + 1
    all_tokens, all_scores = torch.cat(written, 1).tolist(), torch.cat(scores, 1).tolist()
    for row_tokens, row_scores in zip(all_tokens, all_scores, strict=True):
        length = row_tokens.index(eos) + 1 if eos in row_tokens else len(row_tokens)
        yield row_tokens[:length], row_scores[:length]
