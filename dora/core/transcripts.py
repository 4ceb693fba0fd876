"""The text of trajectories as it is generated, from chunks in any order of their trajectories.

No token is reported twice. An attempt that goes on from an earlier one's tokens repeats them in its
first chunks: only what differs from the reported tokens, or goes beyond them, is new; where it
differs, the piece says from which token on the text changed. A trajectory ends once, with the text
of the attempt that counts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dora.schemas.records import Chunk, Trajectory, unpack_tokens

REPLACEMENT = "\ufffd"
"""What tokenizers put where bytes are no character, or not yet."""
CONTEXT_TOKENS = 8
"""Tokens that are decoded again with new ones, at least, as far as there are any."""
_LONGEST_TAIL = 32

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one token sequence; `decode` gives the text of token ids.

    What was returned is final, and all of it together is the text of all tokens. A character whose
    bytes are spread over several tokens is returned once its last token, or the end, is there.
    Tokens are decoded with some of those before them, because their text may depend on these
    (leading spaces, for instance).

    `tokenizers.decoders.DecodeStream` does not do: it cannot be flushed, so a response that ends
    inside a character (or with U+FFFD) loses its end; it holds stray bytes back without limit; and
    it needs a fast tokenizer of that library.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # Stretches of tokens after each of which no character was open.
        self._stretches: list[list[int]] = []
        self._open: list[int] = []
        self._returned = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make sure."""
        self._open.extend(token_ids)
        return self._take(final=False)

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._open:
            return ""
        text = self._decode([*(t for stretch in self._stretches for t in stretch), *self._open])
        sure = text if final else text.rstrip(REPLACEMENT)
        if len(text) - len(sure) > _LONGEST_TAIL:
            sure = text  # no character is that long: these bytes never become one
        new = sure[self._returned :]
        self._returned = max(self._returned, len(sure))
        if len(sure) == len(text):
            self._close()
        return new

    def _close(self) -> None:
        self._stretches.append(self._open)
        self._open = []
        kept = sum(map(len, self._stretches))
        while kept - len(self._stretches[0]) >= CONTEXT_TOKENS:
            kept -= len(self._stretches.pop(0))
        self._returned = len(self._decode([t for stretch in self._stretches for t in stretch]))


FINISHED_KEPT = 10_000
"""Finished trajectories that are remembered, to ignore their late chunks."""
_RATE_POINTS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a trajectory: `tokens` tokens from `position` on, which counts generated tokens.

    `rewound`: text from there on was reported before and is replaced. `last` marks the end
    of the trajectory, with `finish_reason` and, unless its scoring failed, `reward`; `text` may be
    empty then.
    """

    trajectory: str
    attempt: int
    version: int
    position: int
    tokens: int
    text: str
    worker: str
    created_ms: int
    rewound: bool = False
    last: bool = False
    finish_reason: str | None = None
    reward: float | None = None
    error: str | None = None


@dataclass(slots=True)
class Transcript:
    """A trajectory as far as it was reported. Its first `begin` tokens were not read."""

    trajectory: str
    version: int
    begin: int
    detokenizer: Detokenizer
    attempt: int = 0
    worker: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    read: int = 0
    ended: bool = False
    points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_RATE_POINTS))

    @property
    def length(self) -> int:
        """Generated tokens so far."""
        return self.begin + len(self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Over the last chunks, by their own times; 0 before the second."""
        if len(self.points) < 2 or self.points[-1][0] <= self.points[0][0]:
            return 0.0
        (first, before), (last, after) = self.points[0], self.points[-1]
        return max(0.0, 1000 * (after - before) / (last - first))


class Transcripts:
    """Takes chunks and finished trajectories; `decode` gives the text of token ids.

    A trajectory is reported from the first chunk on that was read of it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._open: dict[str, Transcript] = {}
        self._waiting: dict[str, Trajectory] = {}
        self._overdue: set[str] = set()
        self._finished: dict[str, None] = {}

    def find(self, trajectory: str) -> Transcript | None:
        """The transcript of a trajectory that is not finished."""
        return self._open.get(trajectory)

    def on_record(self, record: Chunk | Trajectory) -> list[Piece]:
        """New text of this record. The end of a trajectory is reported with its last chunk or
        with the next `settle`."""
        if record.trajectory_id in self._finished:
            return []
        if isinstance(record, Trajectory):
            self._waiting.setdefault(record.trajectory_id, record)
            return self._ends(record.trajectory_id)
        pieces = [self._continue(record), *self._ends(record.trajectory_id)]
        return [piece for piece in pieces if piece is not None]

    def settle(self, *, everything: bool = False) -> list[Piece]:
        """The ends of trajectories whose chunks do not seem to come any more: `everything` that
        waits for them, or what has waited since the last call."""
        due = [i for i in self._waiting if everything or i in self._overdue]
        pieces = [self._finish(self._waiting[identity]) for identity in due]
        self._overdue = set(self._waiting)
        return pieces

    def _continue(self, chunk: Chunk) -> Piece | None:
        script = self._open.get(chunk.trajectory_id)
        if script is None:
            script = Transcript(
                chunk.trajectory_id, chunk.policy_version, chunk.position, Detokenizer(self._decode)
            )
            script.attempt, script.read = chunk.attempt, chunk.position
            self._open[chunk.trajectory_id] = script
        if chunk.attempt < script.attempt:
            return None  # a worker that was given up, and still writes
        if chunk.attempt > script.attempt:
            script.attempt, script.read, script.ended = chunk.attempt, 0, False
            script.points.clear()
        tokens = unpack_tokens(chunk.token_ids).tolist()
        if chunk.position != script.read:
            return None  # what lies between was not read: it comes with the finished trajectory
        script.read += len(tokens)
        script.worker, script.ended = chunk.worker, chunk.last
        script.points.append((chunk.created_ms, script.read))
        return self._extend(script, chunk.position, tokens, chunk.created_ms)

    def _extend(
        self, script: Transcript, position: int, tokens: list[int], created_ms: int
    ) -> Piece | None:
        """Add tokens at a position that is not beyond those reported."""
        before = script.begin - position
        if before > 0:
            position, tokens = script.begin, tokens[before:]
        reported = script.tokens[position - script.begin :]
        same = 0
        while same < min(len(reported), len(tokens)) and reported[same] == tokens[same]:
            same += 1
        new, position = tokens[same:], position + same
        if not new:
            return None
        rewound = same < len(reported)
        if rewound:
            self._rewind(script, position)
        text = script.detokenizer.add(new)
        script.tokens.extend(new)
        script.text += text
        return Piece(
            script.trajectory, script.attempt, script.version, position, len(new), text,
            script.worker, created_ms, rewound,
        )  # fmt: skip

    def _rewind(self, script: Transcript, position: int) -> None:
        """Forget what was reported from `position` on."""
        del script.tokens[position - script.begin :]
        script.detokenizer = Detokenizer(self._decode)
        script.text = script.detokenizer.add(script.tokens)

    def _ends(self, identity: str) -> list[Piece]:
        record, script = self._waiting.get(identity), self._open.get(identity)
        if record is None:
            return []
        # An attempt that ended without a chunk has nothing to wait for.
        whole = script is not None and script.ended and script.attempt == record.attempt
        return [self._finish(record)] if whole or not record.chunks else []

    def _finish(self, record: Trajectory) -> Piece:
        identity = record.trajectory_id
        del self._waiting[identity]
        generated = unpack_tokens(record.token_ids)[[bool(m) for m in record.mask]].tolist()
        script = self._open.pop(identity, None)
        if script is None:
            script = Transcript(identity, record.policy_version, 0, Detokenizer(self._decode))
        script.attempt, script.worker = record.attempt, record.worker
        piece = self._extend(script, 0, generated, record.created_ms)
        rewound = piece is not None and piece.rewound
        position = len(generated) if piece is None else piece.position
        text = "" if piece is None else piece.text
        if script.begin + len(script.tokens) > len(generated):
            self._rewind(script, max(len(generated), script.begin))
            rewound = True
        rest = script.detokenizer.finish()
        script.text += rest  # a terminal shows it for a while
        self._finished[identity] = None
        if len(self._finished) > FINISHED_KEPT:
            del self._finished[next(iter(self._finished))]
        return Piece(
            identity, record.attempt, record.policy_version, position, len(generated) - position,
            text + rest, record.worker, record.created_ms, rewound, True, record.finish_reason,
            record.reward, record.error,
        )  # fmt: skip
