"""What a rollout engine is: weights of one version, and sequences that grow one step at a time.

Every engine keeps these rules:

- All tokens of a request come from one version: the one it names or, where the engine hosts a
  single one, the one that was loaded when it was added. Weights of a version change only while
  nothing of it runs (C1).
- Every added request ends with exactly one `Delta` that has a finish reason, unless it is aborted;
  then nothing more is reported. An error of one request stands in its own delta
  (`finish_reason="error"`) and never stops the others.
- Tokens are reported once, in order, each with the log-probability of the distribution that it was
  drawn from, temperature and truncation included. The stop token counts as a generated token.

Engines are driven by one thread and never start one of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dora.schemas.records import FinishReason, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to generate.

    `prefix` holds tokens that an earlier attempt generated after the prompt: they are read, not
    generated again, and not reported. `sampling.max_new_tokens` bounds the response with its
    prefix. Temperature 0 is greedy: the most likely token is taken, and its log-probability at
    temperature 1 is reported. `top_p` 1 and `top_k` 0 are off. A seed makes a request repeatable;
    without it the engine's own random state is used. `version` is the hosted version to generate
    with; None where the engine hosts a single one.
    """

    request_id: str
    prompt: tuple[int, ...] | list[int]
    sampling: Sampling
    prefix: tuple[int, ...] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request.

    `token_ids` and `logprobs` (natural logarithm) have equal lengths; both may be empty in the last
    delta. `finish_reason` is None while the request goes on, `stop` after a stop token (which is
    the last of `token_ids`), `length` at `max_new_tokens` or at the end of the context, and `error`
    with the reason in `error`.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


class Engine(ABC):
    """Generates with one set of weights; see the module for what all engines guarantee."""

    name: str
    """Kind of the engine, for records and messages."""
    capacity: int
    """Sequences decoded at once; requests beyond it wait inside the engine."""
    version: int | None
    """Policy version of the weights, the newest of several; None before the first and after an
    update that failed: then `restart` is needed."""
    hosts_many: bool = False
    """Whether several versions are hosted at once: then `load` adds one, while requests of others
    run, and `unload` removes one."""
    vocabulary: int
    """Token ids are in [0, vocabulary); 0 before the first weights."""
    max_model_len: int
    """Longest sequence in tokens, prompt and response together."""

    @property
    def versions(self) -> frozenset[int]:
        """Versions that requests can be added for."""
        return frozenset() if self.version is None else frozenset({self.version})

    def due(self) -> float:
        """Seconds until `step` has something to report; 0 where only `step` knows."""
        return 0.0

    def unreported(self, request_id: str) -> Delta | None:
        """What was generated for a request since its last delta, and counts as reported now; None
        if that is nothing. For engines that do not report every token at once: who aborts a
        request asks before."""
        return None

    @property
    def metrics(self) -> dict[str, float]:
        """Further figures for the worker's status, by their names there."""
        return {}

    @property
    def memory_used(self) -> float:
        """Share of the key-value cache in use, 0 to 1; 0 where it is not known."""
        return 0.0

    def unload(self, version: int) -> None:  # noqa: B027 - most engines need none
        """Forget a version, where several are hosted; unknown ones are ignored.

        Raises `DoraError` while requests of it run.
        """

    def pause(self) -> None:  # noqa: B027 - most engines need none
        """Nothing is generated, and no time passes for what runs, until `resume`; the caller does
        not `step` meanwhile."""

    def resume(self) -> None:  # noqa: B027 - most engines need none
        """End a pause."""

    @abstractmethod
    def load(self, directory: Path, version: int) -> None:
        """Apply the weights of a model directory (config.json and *.safetensors) in place.

        Caches that depend on the weights are emptied. Raises `DoraError` while requests run, and
        `WeightsError` where the directory is incomplete or does not fit the model. An update that
        fails half-way leaves `version` None, and the engine refuses requests until `restart`.
        """

    @abstractmethod
    def restart(self, directory: Path, version: int) -> None:
        """Replace the engine by a fresh one with the weights of `directory`; for failed canaries.

        Raises as `load` does.
        """

    @abstractmethod
    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, each given all tokens before it, under `version`
        (None: the newest).

        Temperature 1 and no truncation, whatever requests ask for; `len(token_ids) - 1` values. NaN
        where the model yields NaN. Raises `DoraError` while requests run (of that version, where
        several are hosted) or where the tokens do not fit the model.
        """

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take a request; it joins the batch at the next step.

        The next `step` reports what is wrong with it. Raises `DoraError` only if a request
        of that id runs already or the engine has no valid weights.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request, with nothing more reported; unknown or finished ids are ignored."""

    @abstractmethod
    def step(self) -> list[Delta]:
        """Run one iteration and return what it added; [] at once when nothing runs.

        Raises `DoraError` when the engine fails again and again; a single failure ends
        the requests that it hit.
        """

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests taken and not yet finished or aborted, waiting ones included."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and stop; may be called more than once."""


def refusal(request: Request, vocabulary: int, max_model_len: int) -> str | None:
    """Why an engine of this vocabulary and context cannot run the request; None if it can."""
    sampling = request.sampling
    length = len(request.prompt) + len(request.prefix)
    if not request.prompt:
        return "the prompt is empty"
    if length >= max_model_len:
        return (
            f"prompt and prefix have {length} tokens; the engine's context of {max_model_len} "
            "leaves no room for a response"
        )
    for name, tokens in (("prompt", request.prompt), ("prefix", request.prefix)):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            return f"the {name} holds token {wrong}, outside the vocabulary of {vocabulary}"
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocabulary:
            return f"stop token {token} is outside the vocabulary of {vocabulary}"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1"
    if not sampling.temperature >= 0:
        return f"temperature is {sampling.temperature}; it must not be negative"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must not be negative"
    return None


def complete(request: Request) -> FinishReason | None:
    """How the prefix already ends the response, if it does.

    A worker may die between its last chunk and the trajectory's record: the next attempt then
    finds a response that needs no more tokens.
    """
    if request.prefix and request.prefix[-1] in request.sampling.stop_token_ids:
        return "stop"
    if len(request.prefix) >= request.sampling.max_new_tokens:
        return "length"
    return None


def resumed_seed(seed: int, position: int) -> int:
    """Seed of a request whose first `position` response tokens are already there.

    The noise drawn for the first tokens must not be drawn again for later ones, so the seed is
    mixed with the position (SplitMix64, Steele et al. 2014); position 0 leaves it as it is.
    """
    if position == 0:
        return seed
    mixed = (seed + position * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF


def check_directory(directory: Path) -> str | None:
    """What a model directory lacks; None if configuration and weights are there."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if not (directory / "config.json").is_file():
        return f"{directory} has no config.json"
    if next(directory.glob("*.safetensors"), None) is None:
        return f"{directory} has no *.safetensors"
    return None
