"""What earlier attempts at a trajectory left in the chunk log, for the next one to go on from.

A prefix is what one attempt wrote, from its first token on without a gap, all of one
policy version (unless the schedule is `partial`), with the log-probabilities under which it was
sampled. An attempt that resumed another repeats the prefix in its first chunk (one for each
version), so no attempt's chunks need those of another.
"""

from dataclasses import dataclass, field

from dora.schemas.records import Chunk, VersionRun


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens (little-endian int32) and log-probabilities (float32) to go on from.

    `runs` are its versions where it may have several. `barren_since` is the number of the first
    attempt after the last one that generated a token of its own; 0 if none has. `prompt_hash` names
    the prompt that the tokens were sampled for.
    """

    token_ids: bytes = b""
    logprobs: bytes = b""
    barren_since: int = 0
    runs: tuple[VersionRun, ...] = ()
    prompt_hash: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // 4


@dataclass(slots=True)
class _Attempt:
    sequence: int = 0
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    tokens: int = 0
    resumed: int = 0
    prompt_hash: str = ""


class PrefixCollector:
    """Takes the chunks of some trajectories, in the order of their partition.

    `wanted` maps trajectory ids to the version that their prefix must be of or, with `mixed`, must
    begin with at the earliest.
    """

    def __init__(self, wanted: dict[str, int], *, mixed: bool = False) -> None:
        self._wanted = wanted
        self._mixed = mixed
        self._attempts: dict[str, dict[int, _Attempt]] = {}

    def add_chunk(self, chunk: Chunk) -> None:
        """Adds a chunk if it continues its attempt; others are left aside."""
        version = self._wanted.get(chunk.trajectory_id)
        if version is None or version > chunk.policy_version:
            return
        if version != chunk.policy_version and not self._mixed:
            return
        attempts = self._attempts.setdefault(chunk.trajectory_id, {})
        attempt = attempts.setdefault(chunk.attempt, _Attempt())
        if (chunk.sequence, chunk.position) != (attempt.sequence, attempt.tokens):
            return
        attempt.sequence += 1
        attempt.prompt_hash = attempt.prompt_hash or chunk.prompt_hash
        attempt.token_ids.append(chunk.token_ids)
        attempt.logprobs.append(chunk.logprobs)
        tokens = len(chunk.token_ids) // 4
        attempt.tokens += tokens
        if tokens and self._mixed:
            if attempt.runs and attempt.runs[-1].version == chunk.policy_version:
                tokens += attempt.runs.pop().tokens
            attempt.runs.append(VersionRun(chunk.policy_version, tokens))
        attempt.resumed += chunk.resumed_tokens

    def best(self, trajectory_id: str) -> Prefix:
        """The longest prefix, of equal ones the newest attempt's; empty if there is none."""
        attempts = self._attempts.get(trajectory_id, {})
        fruitful = [n for n, attempt in attempts.items() if attempt.tokens > attempt.resumed]
        barren_since = max(fruitful, default=-1) + 1
        if not attempts:
            return Prefix()
        _, _, longest = max((a.tokens, n, a) for n, a in attempts.items())
        tokens, logprobs = b"".join(longest.token_ids), b"".join(longest.logprobs)
        runs = tuple(longest.runs)
        return Prefix(tokens, logprobs, barren_since, runs, longest.prompt_hash if tokens else "")
