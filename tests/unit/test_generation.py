"""An attempt's chunks and its record hold the same tokens, whatever interrupts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.scheduling.prefixes import PrefixCollector
from dora.producers.engines.base import Delta
from dora.producers.tasks.base import Prompt
from dora.producers.worker.attempt import Attempt
from dora.schemas.records import (
    Chunk,
    Command,
    Sampling,
    VersionRun,
    pack_logprobs,
    pack_tokens,
    prompt_hash,
)

SAMPLING = Sampling(1.0, 1.0, 0, 64, (39,), None)


def attempt(number: int = 0, prefix: int = 0, runs: tuple[VersionRun, ...] = (), version: int = 3):
    command = Command(
        "r", "w0", "i", "start", 0, trajectory_id="g0/0", group_id="g0", policy_version=3,
        attempt=number, ordinal=0, prefix_token_ids=pack_tokens(range(prefix)),
        prefix_logprobs=pack_logprobs([-1.0] * prefix), prefix_runs=runs,
    )  # fmt: skip
    return Attempt(command, Prompt(0, "", (1, 2), {}), SAMPLING, "w0", 0, version=version)


def delta(tokens: int, *, done: bool = False) -> Delta:
    return Delta("g0/0", (7,) * tokens, (-0.5,) * tokens, "stop" if done else None)


def record(one: Attempt):
    return one.trajectory(engine="e", reward=1.0, parts={}, error=None, text=None, now_ms=0)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), min_size=1))
def test_chunks_hold_what_the_record_holds_and_each_is_of_one_version(
    story: list[tuple[int, bool, bool]],
) -> None:
    one, chunks = attempt(), []
    for tokens, cut, switch in story:
        one.extend(delta(tokens), 0)
        if cut or switch:
            chunks.append(one.chunk(0))
        if switch:
            one.version += 1
    one.extend(delta(1, done=True), 0)
    chunks.append(one.chunk(0))
    made = record(one)
    assert b"".join(c.token_ids for c in chunks) == made.token_ids[8:]
    assert [c.sequence for c in chunks] == list(range(made.chunks))
    tokens_of: dict[int, int] = {}
    for chunk in chunks:
        tokens_of[chunk.policy_version] = (
            tokens_of.get(chunk.policy_version, 0) + len(chunk.token_ids) // 4
        )
    runs = {run.version: run.tokens for run in made.version_runs}
    assert runs == {version: n for version, n in tokens_of.items() if n}
    assert list(runs) == sorted(runs)


def test_a_prefix_of_one_version_is_part_of_the_first_chunk() -> None:
    one = attempt(1, prefix=6)
    one.extend(delta(2, done=True), 0)
    assert one.prefix_chunks(0) == []
    chunk = one.chunk(0)
    assert (chunk.position, chunk.resumed_tokens, len(chunk.token_ids) // 4) == (0, 6, 8)
    assert record(one).version_runs == (VersionRun(3, 8),)


def test_a_prefix_of_several_versions_is_repeated_one_chunk_for_each() -> None:
    one = attempt(1, prefix=6, runs=(VersionRun(3, 4), VersionRun(4, 2)), version=5)
    one.extend(delta(2, done=True), 0)
    chunks = [*one.prefix_chunks(0), one.chunk(0)]
    assert [(c.policy_version, c.position, c.resumed_tokens) for c in chunks] == [
        (3, 0, 4), (4, 4, 2), (5, 6, 0)
    ]  # fmt: skip
    made = record(one)
    assert made.version_runs == (VersionRun(3, 4), VersionRun(4, 2), VersionRun(5, 2))
    assert made.resumed_tokens == 6


def test_the_handover_of_an_attempt_holds_all_of_it_and_takes_nothing_from_its_chunks() -> None:
    one = attempt(1, prefix=2)
    one.extend(delta(3), 0)
    first = one.chunk(0)
    one.extend(delta(1), 0)
    whole, last = one.handover(0), one.chunk(0, last=True)
    assert whole.token_ids == first.token_ids + last.token_ids
    assert (whole.position, last.position, last.last) == (0, 5, True)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_prefix_of_several_versions_is_found_only_where_they_may_mix(mixed: bool) -> None:
    one, chunks = attempt(), list[Chunk]()
    one.extend(delta(4), 0)
    chunks.append(one.chunk(0))
    one.version = 4
    one.extend(delta(2), 0)
    chunks.append(one.chunk(0))
    collector = PrefixCollector({"g0/0": 3}, mixed=mixed)
    for chunk in chunks:
        collector.add_chunk(chunk)
    best = collector.best("g0/0")
    assert best.tokens == (6 if mixed else 4)
    assert best.runs == ((VersionRun(3, 4), VersionRun(4, 2)) if mixed else ())


def test_the_first_chunk_of_an_attempt_and_its_record_name_the_same_prompt() -> None:
    one = attempt()
    one.extend(delta(3), 0)
    first = one.chunk(0)
    one.extend(delta(2, done=True), 0)
    made = record(one)
    assert first.prompt_hash == made.prompt_hash == prompt_hash(pack_tokens([1, 2]))
    assert one.chunk(0).prompt_hash == "" and one.handover(0).prompt_hash == made.prompt_hash
