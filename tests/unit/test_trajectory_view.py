"""One trajectory as people read it: texts of tokens, versions, scores, and what a terminal gets."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from dora.cli.inspect.render import coloured, show_view, style_of
from dora.consumers.inspect.rows import Fate
from dora.consumers.inspect.sources import Sources, advantages_of, token_texts, view_of
from dora.consumers.inspect.view import Scores, Token, TrajectoryView, text_of, with_scores
from dora.log.run_log import Placed
from dora.schemas.records import Chunk, Command, VersionRun
from tests.factories import admission, chunk_of, command, run_started, trajectory

GROUP = admission(4, 2)
RECORD = trajectory(GROUP)
"""Two prompt tokens, 7 and 8, and three generated ones, 1, 2 and 3."""
FATE = Fate("trained", 4, 1)


def spelled(token_ids: Sequence[int]) -> str:
    """Token ids are the bytes of a text."""
    return bytes(token_ids).decode("utf-8", "replace")


def view(record=RECORD, decode=spelled, **sources: object) -> TrajectoryView:  # type: ignore[no-untyped-def]
    given = {"record": Placed(0, 7, record), "chunks": [], "commands": []} | sources
    return view_of(
        "r",
        record.trajectory_id,
        Sources(GROUP, FATE, **given),  # type: ignore[arg-type]
        decode=decode,
    )


def printed(shown: TrajectoryView, *, logprobs: bool = False, **console: object) -> str:
    out = StringIO()
    show_view(shown, Console(file=out, width=120, highlight=False, **console), logprobs=logprobs)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_character_of_several_tokens_is_the_text_of_the_last_one() -> None:
    ids = list("aé€z".encode())
    texts = token_texts(ids, spelled)
    assert texts == ["a", "", "é", "", "", "€", "z"]
    assert token_texts(ids[:-2], spelled)[-1] == "\ufffd", "the end comes before the character's"
    assert token_texts([], spelled) == []


def test_prompt_and_response_are_told_apart_and_each_token_has_its_version() -> None:
    mixed = replace(RECORD, version_runs=(VersionRun(2, 1), VersionRun(3, 2)))
    shown = view(mixed)
    assert [token.id for token in shown.prompt] == [7, 8]
    assert [token.version for token in shown.tokens] == [None, None, 2, 3, 3]
    assert [token.logprob for token in shown.tokens] == [None, None, -1, -1, -1]
    assert shown.generated == 3 and shown.logprob == -1
    assert text_of(shown.response) == "\x01\x02\x03"
    assert text_of(view(decode=None).response) is None


def test_without_a_tokenizer_ids_and_the_recorded_text_are_shown() -> None:
    shown = printed(view(decode=None))
    assert "7 8" in shown and "1 2 3" in shown and "nus\n  sun" in shown


def test_scores_are_those_of_the_generated_tokens() -> None:
    scores = Scores(np.float32([-1, -1.5, -0.75]), np.float32([0.5, 1, 0]))
    shown = with_scores(view(), scores)
    assert [token.difference for token in shown.tokens] == [None, None, 0, -0.5, 0.25]
    assert shown.mismatch is not None
    assert shown.mismatch.mean == 0.25 and shown.mismatch.largest == 0.5 and shown.mismatch.at == 1
    assert shown.mismatch.entropy_mean == 0.5 and shown.mismatch.entropy_largest == 1
    told = printed(shown, logprobs=True)
    assert "at most 0.5 at token 1" in told and "-5.0e-01" in told
    assert shown.to_json()["tokens"][3]["difference"] == -0.5
    with pytest.raises(ValueError, match="1 scores for 3"):
        with_scores(view(), Scores(np.float32([0]), np.float32([0])))


def test_what_a_model_wrote_cannot_command_the_terminal() -> None:
    evil = replace(RECORD, text="\x1b]0;title\x07", error="[bold]\x1b[2J", worker="[w0]\n")
    told = printed(view(evil, decode=lambda ids: "\x1b[31m" * len(ids)))
    assert "\x1b" not in told and "\x07" not in told
    assert "\\x1b[31m" in told and "[bold]" in told, "no markup is obeyed either"
    assert told.count("[w0]\\n") == 2, "nor in names"


def test_improbable_tokens_stand_out_on_a_terminal_and_only_there() -> None:
    assert style_of(-0.01) == "" and len({style_of(x) for x in (-0.01, -0.5, -1.5, -4, -9)}) == 5
    tokens = [Token(1, "sure", True, -0.01), Token(2, "odd", True, -9.0)]
    assert [str(span.style) for span in coloured(tokens).spans] == [style_of(-9.0)]
    shown = view(decode=lambda ids: "x" * len(ids))
    on_terminal = printed(shown, force_terminal=True, color_system="truecolor")
    assert "\x1b[30;48;2;" in on_terminal and "probability of each token" in on_terminal
    without = printed(shown, force_terminal=True, no_color=True, color_system="truecolor")
    assert ";48;" not in without and "--logprobs" in without
    assert "\x1b" not in printed(shown) and "--logprobs" in printed(shown)


def test_attempts_say_how_they_ended_and_what_they_resumed() -> None:
    def order(kind: str, attempt: int, at: int, reason: str = "") -> Placed[Command]:
        fields = {"attempt": attempt, "policy_version": 2, "reason": reason}
        record = command(RECORD.trajectory_id, f"w{attempt}", kind=kind, at=at, **fields)
        return Placed(1, at, record)

    def chunk(attempt: int, at: int, ids: list[int], resumed: int = 0) -> Placed[Chunk]:
        fields = {"attempt": attempt, "created_ms": at, "resumed_tokens": resumed}
        return Placed(0, at, chunk_of(admission(4, 2), 0, 0, 0, ids, **fields))

    last = replace(
        RECORD, attempt=3, worker="w3", started_ms=1450, generated_ms=1500, resumed_tokens=2
    )
    chunks = [chunk(0, 1100, [1]), chunk(1, 1250, [1, 2], 1), chunk(3, 1490, [1, 2, 3], 2)]
    commands = [
        order("start", 0, 1000),
        order("yield", 0, 1150, "w0 leaves"),
        order("start", 1, 1200),
        order("move", 1, 1300, "w3 is idle"),
        order("start", 2, 1350),
        order("start", 3, 1400),
    ]
    shown = view(last, chunks=[*chunks, chunks[0]], commands=commands[::-1])
    assert [(a.worker, a.from_ms, a.until_ms, a.resumed_tokens, a.end) for a in shown.attempts] == [
        ("w0", 0, 150, 0, "yield: w0 leaves"),
        ("w1", 200, 300, 1, "move: w3 is idle"),
        ("w2", 350, 350, 0, "taken over by attempt 3"),
        ("w3", 400, 500, 2, "finished: stop"),
    ]
    assert [(c.attempt, c.at_ms, c.tokens) for c in shown.chunks] == [
        (0, 100, 1),
        (1, 250, 2),
        (3, 490, 3),
    ], "a chunk that was written twice is shown once"
    assert [a.counts for a in shown.attempts] == [False, False, False, True]
    unfinished = view_of(
        "r", "g4/0", Sources(GROUP, Fate("outstanding"), None, chunks[:2], commands[:3]),
        decode=spelled,
    )  # fmt: skip
    assert [token.id for token in unfinished.tokens] == [1, 2] and not unfinished.finished
    assert unfinished.attempts[-1].end == "no end in the log"


def test_advantages_are_the_trainers() -> None:
    started = replace(
        run_started(),
        identity=json.dumps({"trainer": {"loss": {"advantage_std": False}}}),
    )
    group = {
        sample: Placed(0, sample, trajectory(GROUP, sample, reward=float(sample)))
        for sample in (0, 1)
    }
    assert advantages_of(started, GROUP, group) == ({0: -0.5, 1: 0.5}, None)
    found, reason = advantages_of(started, GROUP, {0: group[0]})
    assert found == {} and reason == "1 of 2 trajectories of the group are not there"
    failed = group | {1: Placed(0, 1, trajectory(GROUP, 1, reward=None))}
    assert advantages_of(started, GROUP, failed)[1] == "a trajectory of the group has no reward"
    assert "did not record its loss" in str(advantages_of(run_started(), GROUP, group)[1])
