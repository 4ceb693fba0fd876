"""How the view of a trajectory is made of what the log has of it.

The counted record tells tokens and reward; chunks and commands tell when and where.
While there is no record, the tokens are those of the newest attempt's chunks so far.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice

import numpy as np

from dora.config.trainer import LossSection
from dora.consumers.inspect.rows import Fate
from dora.consumers.inspect.view import AttemptView, ChunkView, CommandView, Token, TrajectoryView
from dora.consumers.learner.batches import group_advantages
from dora.core.ring import parse_trajectory_id
from dora.core.transcripts import Decode, Detokenizer
from dora.log.run_log import Placed
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    RunStarted,
    Trajectory,
    unpack_logprobs,
    unpack_tokens,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """What the log has of one trajectory: its counted record, if there is one, the chunks of all
    attempts, and the commands about it."""

    admission: Admission
    fate: Fate
    record: Placed[Trajectory] | None
    chunks: Sequence[Placed[Chunk]]
    commands: Sequence[Placed[Command]]


def view_of(
    run: str,
    identity: str,
    sources: Sources,
    *,
    decode: Decode | None,
    advantage: float | None = None,
    notes: Sequence[str] = (),
) -> TrajectoryView:
    """The view of the trajectory `identity`; `decode` gives the text of token ids, special ones
    included."""
    placed, admission = sources.record, sources.admission
    record = None if placed is None else placed.record
    chunks = sorted(_distinct(sources.chunks), key=lambda c: (c.record.attempt, c.record.sequence))
    commands = sorted(sources.commands, key=lambda c: (c.record.created_ms, c.record.attempt))
    began = min(
        [chunk.record.created_ms for chunk in chunks]
        + [command.record.created_ms for command in commands]
        + ([] if record is None else [record.started_ms]),
        default=0,
    )
    attempts = _attempts(record, [c.record for c in chunks], [c.record for c in commands], began)
    held = _held(record, [c.record for c in chunks])
    tokens = _tokens(held, decode)
    known = [token.logprob for token in tokens if token.logprob is not None]
    first = record or (chunks[0].record if chunks else None)
    return TrajectoryView(
        run=run,
        id=identity,
        group=admission.group_id,
        sample=parse_trajectory_id(identity)[1],
        purpose=admission.purpose,
        version=admission.policy_version,
        ordinal=admission.ordinal,
        fate=sources.fate,
        finished=record is not None,
        reward=None if record is None else record.reward,
        reward_parts={} if record is None else dict(record.reward_parts),
        advantage=advantage,
        error=None if record is None else record.error,
        finish=None if record is None else record.finish_reason,
        worker=None if record is None else record.worker,
        engine=None if record is None else record.engine,
        sampling={} if first is None else asdict(first.sampling),
        began_ms=began,
        generated_ms=None if record is None else record.generated_ms - began,
        finished_ms=None if record is None else record.created_ms - began,
        tokens=tokens,
        recorded_text=None if record is None else record.text,
        logprob=float(np.mean(known)) if known else None,
        mismatch=None,
        attempts=attempts,
        chunks=tuple(_chunk_views(chunks, decode, began)),
        commands=tuple(
            CommandView(
                each.record.kind,
                each.record.attempt,
                each.record.worker,
                each.record.created_ms - began,
                len(each.record.prefix_token_ids) // 4,
                each.record.reason,
            )
            for each in commands
        ),
        partition=None if placed is None else placed.partition,
        offset=None if placed is None else placed.offset,
        notes=tuple(notes),
    )


def advantages_of(
    started: RunStarted, admission: Admission, group: Mapping[int, Placed[Trajectory]]
) -> tuple[dict[int, float], str | None]:
    """The advantage of each sample of a complete group, as the trainer computes it, or none and the
    reason."""
    if admission.purpose == "eval":
        return {}, "an evaluation has no advantages"
    missing = admission.group_size - len(group)
    if missing:
        return {}, f"{missing} of {admission.group_size} trajectories of the group are not there"
    rewards = [placed.record.reward for _, placed in sorted(group.items())]
    known = [reward for reward in rewards if reward is not None]
    if len(known) != len(rewards):
        return {}, "a trajectory of the group has no reward"
    try:
        recorded = json.loads(started.identity)["trainer"]["loss"]
        settings = LossSection.model_validate(recorded)
    except (ValueError, KeyError, TypeError):
        return {}, "the run did not record its loss as this version of dora knows it"
    values = group_advantages(known, divide_by_std=settings.advantage_std)
    return {sample: float(a) for sample, a in zip(sorted(group), values, strict=True)}, None


@dataclass(frozen=True, slots=True)
class _Held:
    """Token ids, which of them are generated, and their log-probabilities and versions."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]


def _held(record: Trajectory | None, chunks: Sequence[Chunk]) -> _Held:
    """The tokens of the record, or what the newest attempt has so far."""
    if record is not None:
        versions = [run.version for run in record.version_runs for _ in range(run.tokens)]
        return _Held(
            unpack_tokens(record.token_ids).tolist(),
            [bool(flag) for flag in record.mask],
            unpack_logprobs(record.logprobs).tolist(),
            versions,
        )
    newest = max((chunk.attempt for chunk in chunks), default=0)
    own = [chunk for chunk in chunks if chunk.attempt == newest]
    ids = [int(token) for chunk in own for token in unpack_tokens(chunk.token_ids)]
    values = [float(value) for chunk in own for value in unpack_logprobs(chunk.logprobs)]
    versions = [chunk.policy_version for chunk in own for _ in unpack_tokens(chunk.token_ids)]
    return _Held(ids, [True] * len(ids), values, versions)


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token: a character that several tokens make up is that of the last one, and
    all together are the text of all tokens."""
    detokenizer = Detokenizer(decode)
    texts = [detokenizer.add([token]) for token in ids]
    rest = detokenizer.finish()
    if rest:
        texts[-1] += rest
    return texts


def _tokens(held: _Held, decode: Decode | None) -> tuple[Token, ...]:
    """Prompt and response are decoded apart, as they were made apart."""
    begin = held.mask.index(True) if True in held.mask else len(held.ids)
    texts: Sequence[str | None] = [None] * len(held.ids)
    if decode is not None:
        texts = token_texts(held.ids[:begin], decode) + token_texts(held.ids[begin:], decode)
    versions = iter(held.versions)
    return tuple(
        Token(token, text, True, logprob, next(versions)) if made else Token(token, text, False)
        for token, text, made, logprob in zip(
            held.ids, texts, held.mask, held.logprobs, strict=True
        )
    )


def _distinct(chunks: Sequence[Placed[Chunk]]) -> list[Placed[Chunk]]:
    """Without those written a second time."""
    seen: dict[tuple[int, int], Placed[Chunk]] = {}
    for each in chunks:
        seen.setdefault((each.record.attempt, each.record.sequence), each)
    return list(seen.values())


def _chunk_views(
    chunks: Sequence[Placed[Chunk]], decode: Decode | None, began: int
) -> Iterator[ChunkView]:
    for _, own in groupby(chunks, key=lambda placed: placed.record.attempt):
        attempt = list(own)
        ids = unpack_tokens(b"".join(each.record.token_ids for each in attempt)).tolist()
        texts = None if decode is None else iter(token_texts(ids, decode))
        for placed in attempt:
            chunk = placed.record
            tokens = len(chunk.token_ids) // 4
            yield ChunkView(
                chunk.attempt,
                chunk.sequence,
                chunk.worker,
                chunk.policy_version,
                chunk.created_ms - began,
                chunk.position,
                tokens,
                chunk.resumed_tokens,
                chunk.last,
                None if texts is None else "".join(islice(texts, tokens)),
                placed.partition,
                placed.offset,
            )


def _attempts(
    record: Trajectory | None, chunks: Sequence[Chunk], commands: Sequence[Command], began: int
) -> tuple[AttemptView, ...]:
    numbers = {chunk.attempt for chunk in chunks} | {command.attempt for command in commands}
    if record is not None:
        numbers.add(record.attempt)
    views = []
    for number in sorted(numbers):
        own = [chunk for chunk in chunks if chunk.attempt == number]
        orders = [command for command in commands if command.attempt == number]
        start = next((command for command in orders if command.kind == "start"), None)
        counted = record if record is not None and record.attempt == number else None
        times = [chunk.created_ms for chunk in own] + [order.created_ms for order in orders]
        if counted is not None:
            times += [counted.started_ms, counted.generated_ms]
        made = sum(len(chunk.token_ids) // 4 for chunk in own)
        worker = counted.worker if counted else (own or orders)[0].worker
        views.append(
            AttemptView(
                attempt=number,
                worker=worker,
                from_ms=(start.created_ms if start else min(times)) - began,
                until_ms=max(times) - began,
                tokens=counted.generated_tokens if counted else made,
                resumed_tokens=counted.resumed_tokens
                if counted
                else sum(chunk.resumed_tokens for chunk in own),
                counts=counted is not None,
                end=_end(number, counted, orders, own, later=number < max(numbers)),
            )
        )
    return tuple(views)


def _end(
    number: int,
    counted: Trajectory | None,
    orders: Sequence[Command],
    chunks: Sequence[Chunk],
    *,
    later: bool,
) -> str:
    """How an attempt ended."""
    if counted is not None:
        return f"finished: {counted.finish_reason}"
    for order in orders:
        if order.kind in ("yield", "move"):
            return f"{order.kind}: {order.reason}" if order.reason else order.kind
    if later:
        return f"taken over by attempt {number + 1}"
    return "ended without counting" if chunks and chunks[-1].last else "no end in the log"
