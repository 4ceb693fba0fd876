"""The records of a run's topics, as typed values.

A record that exists is well formed. Arrays of token ids and log-probabilities are kept
as the bytes that go over the wire (`pack_tokens`, `pack_logprobs` and back); their lengths are
checked against one another when a record is made, whether by this program or from the log. Field
meanings stand in the `.avsc` files, which have the same names in the same order.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "error"]


class InvalidRecord(ValueError):
    """A record contradicts itself; the message names the field."""


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> npt.NDArray[np.int32]:
    """Token ids of shape [n] from little-endian int32; InvalidRecord if the length does not fit."""
    if len(data) % 4:
        raise InvalidRecord(f"token ids take {len(data)} bytes, which is not a multiple of 4")
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | npt.NDArray[np.float32]) -> bytes:
    """Log-probabilities (nats) as little-endian float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> npt.NDArray[np.float32]:
    """Log-probabilities of shape [n]; InvalidRecord if one is no number or the length is odd."""
    if len(data) % 4:
        raise InvalidRecord(f"log-probabilities take {len(data)} bytes, not a multiple of 4")
    values = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidRecord(f"log-probability {bad} is {values[bad]}")
    return values


def prompt_hash(token_ids: bytes) -> str:
    """Name of a prompt by its packed tokens: 16 hexadecimal digits."""
    return hashlib.blake2b(token_ids, digest_size=8).hexdigest()


def _same_length(token_ids: bytes, logprobs: bytes) -> None:
    tokens, values = unpack_tokens(token_ids), unpack_logprobs(logprobs)
    if len(tokens) != len(values):
        raise InvalidRecord(f"{len(values)} log-probabilities for {len(tokens)} tokens")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are sampled from."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one attempt."""

    run: str
    trajectory_id: str
    group_id: str
    sample: int
    attempt: int
    sequence: int
    policy_version: int
    ordinal: int
    purpose: Purpose
    position: int
    token_ids: bytes
    logprobs: bytes
    last: bool
    worker: str
    sampling: Sampling
    created_ms: int
    resumed_tokens: int = 0
    prompt_hash: str = ""

    def __post_init__(self) -> None:
        _same_length(self.token_ids, self.logprobs)
        if not 0 <= self.resumed_tokens <= len(self.token_ids) // 4:
            raise InvalidRecord(f"{self.resumed_tokens} of {len(self.token_ids) // 4} resumed")


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Consecutive generated tokens of one version."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished trajectory with its reward (None: see `error`)."""

    run: str
    trajectory_id: str
    group_id: str
    sample: int
    attempt: int
    chunks: int
    policy_version: int
    ordinal: int
    purpose: Purpose
    token_ids: bytes
    mask: bytes
    logprobs: bytes
    version_runs: tuple[VersionRun, ...]
    finish_reason: FinishReason
    reward: float | None
    reward_parts: dict[str, float]
    error: str | None
    text: str | None
    worker: str
    engine: str
    sampling: Sampling
    started_ms: int
    generated_ms: int
    created_ms: int
    resumed_tokens: int = 0

    def __post_init__(self) -> None:
        _same_length(self.token_ids, self.logprobs)
        if len(self.mask) * 4 != len(self.token_ids):
            raise InvalidRecord(f"mask of {len(self.mask)} for {len(self.token_ids) // 4} tokens")
        generated = self.mask.count(1)
        if generated + self.mask.count(0) != len(self.mask):
            raise InvalidRecord("mask holds something else than 0 and 1")
        if sum(run.tokens for run in self.version_runs) != generated:
            raise InvalidRecord("version_runs do not add up to the generated tokens")
        if not 0 <= self.resumed_tokens <= generated:
            raise InvalidRecord(f"{self.resumed_tokens} of {generated} generated tokens resumed")
        if self.reward is not None and not np.isfinite(self.reward):
            raise InvalidRecord(f"reward is {self.reward}")
        if self.reward is None and self.error is None:
            raise InvalidRecord("neither reward nor error")

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy generated."""
        return self.mask.count(1)

    @property
    def prompt_token_ids(self) -> bytes:
        """The prompt, packed: the tokens before the first that the policy generated."""
        first = self.mask.find(1)
        return self.token_ids if first < 0 else self.token_ids[: 4 * first]

    @property
    def prompt_hash(self) -> str:
        """Hash of the prompt, the same for all samples of a group."""
        return prompt_hash(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a version's manifest."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SlotOffset:
    """Where a version starts in a partition."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy version."""

    run: str
    version: int
    kind: Literal["full", "lora"]
    weights_uri: str
    files: tuple[WeightFile, ...]
    weights_checksum: str
    canary_token_ids: bytes
    canary_logprobs: bytes
    slots: tuple[SlotOffset, ...]
    created_ms: int
    inputs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, values = unpack_tokens(self.canary_token_ids), unpack_logprobs(self.canary_logprobs)
        if len(values) != max(len(tokens) - 1, 0):
            raise InvalidRecord(f"{len(values)} canary log-probabilities for {len(tokens)} tokens")


@dataclass(frozen=True, slots=True)
class RunStarted:
    """First record of the ledger."""

    run: str
    run_id: str
    dora_version: str
    identity: str
    max_staleness: int
    groups_per_step: int
    group_size: int
    ring: int
    lanes: int
    cluster_id: str
    topic_ids: dict[str, str]
    created_ms: int
    config: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A trajectory record in the log."""

    sample: int
    attempt: int
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group and where its counted trajectories lie."""

    group_id: str
    ordinal: int
    version: int
    samples: tuple[SampleRef, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the ledger."""

    run: str
    kind: Literal["step", "set_aside"]
    sequence: int
    version_in: int
    version_out: int
    trained: tuple[GroupRef, ...]
    set_aside: tuple[GroupRef, ...]
    metrics: dict[str, float]
    weights_checksum: str
    checkpoint: str | None
    trainer: str
    created_ms: int
    inputs: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admission:
    """An entry of the admission journal: a group starts."""

    run: str
    group_id: str
    ordinal: int
    policy_version: int
    group_size: int
    purpose: Purpose
    created_ms: int


CommandKind = Literal["start", "yield", "move", "switch", "pause", "stop"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command to one incarnation of a worker."""

    run: str
    worker: str
    incarnation: str
    kind: CommandKind
    created_ms: int
    trajectory_id: str = ""
    group_id: str = ""
    sample: int = 0
    attempt: int = 0
    policy_version: int = -1
    ordinal: int = -1
    purpose: Purpose = "train"
    prefix_token_ids: bytes = b""
    prefix_logprobs: bytes = b""
    prefix_runs: tuple[VersionRun, ...] = ()
    reason: str = ""
    prompt_hash: str = ""

    def __post_init__(self) -> None:
        _same_length(self.prefix_token_ids, self.prefix_logprobs)
        tokens = len(self.prefix_token_ids) // 4
        if self.prefix_runs and sum(run.tokens for run in self.prefix_runs) != tokens:
            raise InvalidRecord(f"prefix_runs do not add up to the prefix of {tokens} tokens")


ProcessState = Literal["starting", "loading", "ready", "training", "waiting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Status:
    """What a process reports about itself."""

    run: str
    process: str
    role: Literal["rollout", "coordinator", "trainer"]
    incarnation: str
    state: ProcessState
    created_ms: int
    message: str = ""
    version: int = -1
    versions: tuple[int, ...] = ()
    capacity: int = 0
    loading: int = -1
    running: tuple[str, ...] = ()
    command_offset: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What could not be read or scored."""

    run: str
    code: str
    reason: str
    process: str
    created_ms: int
    topic: str = ""
    partition: int = -1
    offset: int = -1
    trajectory_id: str = ""
    payload: bytes = b""


Record = Chunk | Trajectory | Policy | RunStarted | Step | Admission | Command | Status | DeadLetter
