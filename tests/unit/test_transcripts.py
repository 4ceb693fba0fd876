"""Text as it is generated: characters stay whole, and nothing is told twice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora.core.transcripts import Decode, Detokenizer, Piece, Transcripts
from dora.schemas.records import Chunk, Trajectory
from tests.factories import admission, chunk_of, trajectory

unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def of_bytes(token_ids: Sequence[int]) -> str:
    """Every byte is a token."""
    return bytes(token_ids).decode("utf-8", "replace")


def of_letters(token_ids: Sequence[int]) -> str:
    """Every token is a character."""
    return "".join(chr(0x61 + token) for token in token_ids)


@pytest.fixture(scope="module")
def byte_level() -> Decode:
    """A byte-level BPE, as GPT-2 and Qwen have it, with a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["Grüße 你好 🚀 naïve"] * 3, trainer)
    byte_level_decode = tokenizer.decode

    def decode(token_ids: Sequence[int]) -> str:
        return str(byte_level_decode(list(token_ids)))

    decode.encode = lambda text: tokenizer.encode(text).ids  # type: ignore[attr-defined]
    return decode


def pieces_of(decode: Decode, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    begin, texts = 0, []
    for end in ends:
        texts.append(detokenizer.add(tokens[begin:end]))
        begin = end
    return [*texts, detokenizer.finish()]


@given(TEXTS, st.lists(st.integers(0, 160), max_size=20))
@unhurried
def test_pieces_add_up_to_the_text_and_hold_whole_characters(text: str, cuts: list[int]) -> None:
    pieces = pieces_of(of_bytes, list(text.encode()), cuts)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("aü你🚀 \n", max_size=30), st.lists(st.integers(0, 90), max_size=20))
@unhurried
def test_a_byte_level_tokenizer_splits_characters_and_the_pieces_do_not(
    byte_level: Decode, text: str, cuts: list[int]
) -> None:
    tokens = byte_level.encode(text)  # type: ignore[attr-defined]
    pieces = pieces_of(byte_level, tokens, cuts)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=10))
@unhurried
def test_bytes_that_are_no_text_come_out_as_they_would_at_once(
    data: bytes, cuts: list[int]
) -> None:
    assert "".join(pieces_of(of_bytes, list(data), cuts)) == of_bytes(list(data))


def test_a_decoder_that_strips_leading_spaces_keeps_those_between_pieces() -> None:
    words = ["▁the", "▁cat", "▁sat", "s", "▁down"]

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[t] for t in token_ids).replace("▁", " ").removeprefix(" ")

    assert "".join(pieces_of(decode, [0, 1, 2, 3, 4] * 4, range(20))).startswith(
        "the cat sats down"
    )
    assert pieces_of(decode, [0, 1, 2], [1, 2]) == ["the", " cat", " sat", ""]


def test_endless_bytes_that_are_no_text_are_told_before_the_end() -> None:
    detokenizer = Detokenizer(of_bytes)
    told = sum(len(detokenizer.add([0xFF])) for _ in range(1000))
    assert told > 900


def chunk(
    attempt: int, sequence: int, position: int, tokens: Sequence[int], **more: object
) -> Chunk:
    more = {"created_ms": 1000 * sequence, **more}
    return chunk_of(admission(0, 3), 0, sequence, position, tokens, attempt=attempt, **more)


def finished(attempt: int, tokens: Sequence[int], *, reward: float | None = 1.0) -> Trajectory:
    return trajectory(admission(0, 3), tokens=tokens, reward=reward, attempt=attempt)


@dataclass
class Listener:
    """Puts the text together from the pieces, as somebody does who reads them."""

    text: str = ""
    ends: list[Piece] = field(default_factory=list)

    def hear(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            assert not self.ends, "nothing comes after the end"
            if not piece.rewound:
                assert piece.position == len(self.text), "nothing is told twice or left out"
            self.text = self.text[: piece.position] + piece.text
            if piece.last:
                self.ends.append(piece)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Chunk], Trajectory]:
    """Attempts of which each goes on from some of what an earlier one had; workers that were given
    up go on for a while."""
    attempts: list[list[int]] = []
    streams: list[list[Chunk]] = []
    for number in range(draw(st.integers(1, 3))):
        source = draw(st.sampled_from(attempts)) if attempts else []
        resumed = draw(st.integers(0, len(source)))
        own = draw(st.lists(st.integers(0, 2), min_size=number == 0, max_size=8))
        tokens = source[:resumed] + own
        cuts = draw(st.lists(st.integers(resumed, len(tokens)), max_size=3))
        ends = sorted({*cuts, len(tokens)})
        chunks, begin = [], 0
        for sequence, end in enumerate(ends):
            last = end == len(tokens)
            chunks.append(chunk(number, sequence, begin, tokens[begin:end], last=last))
            begin = end
        attempts.append(tokens)
        streams.append(chunks)
    mixed: list[Chunk] = []
    while any(streams):
        mixed.append(draw(st.sampled_from([stream for stream in streams if stream])).pop(0))
    # one that was given up may finish first: then it counts
    winner = draw(st.integers(0, len(attempts) - 1))
    return mixed, finished(winner, attempts[winner])


@given(histories(), st.data())
@unhurried
def test_whatever_was_taken_over_the_text_is_that_of_the_finished_attempt(
    history: tuple[list[Chunk], Trajectory], data: st.DataObject
) -> None:
    chunks, record = history
    # the finished record and late chunks may come in between, in any place
    place = data.draw(st.integers(0, len(chunks)))
    scripts, listener = Transcripts(of_letters), Listener()
    for index, each in enumerate(chunks):
        if index == place:
            listener.hear(scripts.on_record(record))
        listener.hear(scripts.on_record(each))
    if place == len(chunks):
        listener.hear(scripts.on_record(record))
    listener.hear(scripts.settle(everything=True))
    (end,) = listener.ends
    generated = [t for t, m in zip(_tokens(record), record.mask, strict=True) if m]
    assert listener.text == of_letters(generated)
    assert (end.finish_reason, end.reward, end.attempt) == ("stop", 1.0, record.attempt)
    assert scripts.find("g0/0") is None
    assert scripts.on_record(record) == [] and scripts.on_record(chunks[0]) == []


def _tokens(record: Trajectory) -> list[int]:
    from dora.schemas.records import unpack_tokens

    return [int(token) for token in unpack_tokens(record.token_ids)]


def test_a_repeated_prefix_is_not_told_again() -> None:
    scripts = Transcripts(of_letters)
    assert [p.text for p in scripts.on_record(chunk(0, 0, 0, [0, 1, 2]))] == ["abc"]
    assert scripts.on_record(chunk(1, 0, 0, [0, 1, 2], resumed_tokens=3)) == []
    (piece,) = scripts.on_record(chunk(1, 1, 3, [3]))
    assert (piece.text, piece.position, piece.attempt, piece.rewound) == ("d", 3, 1, False)
    assert scripts.on_record(chunk(0, 1, 3, [4])) == []


def test_a_text_that_went_on_elsewhere_is_told_from_where_it_differs() -> None:
    scripts = Transcripts(of_letters)
    scripts.on_record(chunk(0, 0, 0, [0, 1, 2, 3]))
    (piece,) = scripts.on_record(chunk(1, 0, 0, [0, 1, 5, 6], resumed_tokens=2))
    assert (piece.text, piece.position, piece.rewound) == ("fg", 2, True)
    script = scripts.find("g0/0")
    assert script is not None and script.text == "abfg" and script.length == 4


def test_who_comes_late_hears_the_rest_and_how_fast_it_goes() -> None:
    scripts = Transcripts(of_letters)
    (piece,) = scripts.on_record(chunk(0, 4, 20, [0, 1]))
    assert (piece.position, piece.text) == (20, "ab")
    scripts.on_record(chunk(0, 5, 22, [2] * 10))
    script = scripts.find("g0/0")
    assert script is not None
    assert (script.length, script.tokens_per_second) == (32, pytest.approx(10.0))
    (piece,) = scripts.on_record(chunk(0, 6, 32, [3], last=True))
    (end,) = scripts.on_record(finished(0, [9] * 20 + [0, 1] + [2] * 10 + [3]))
    assert (piece.text, end.text, end.position, end.rewound) == ("d", "", 33, False)


def test_an_end_waits_for_its_last_chunk_but_not_for_ever() -> None:
    scripts = Transcripts(of_letters)
    scripts.on_record(chunk(0, 0, 0, [0]))
    assert scripts.on_record(finished(0, [0, 1], reward=None)) == []
    assert scripts.settle() == []
    (end,) = scripts.settle()
    assert (end.text, end.position, end.last, end.reward) == ("b", 1, True, None)
    assert end.error == "verifier timed out"
