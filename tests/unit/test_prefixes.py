"""What a takeover finds in the chunk log."""

from dataclasses import replace

from dora.core.scheduling.prefixes import PrefixCollector
from dora.schemas.records import Chunk, pack_logprobs, pack_tokens
from tests.factories import admission, chunk_of


def chunk(
    attempt: int,
    sequence: int,
    position: int,
    tokens: list[int],
    *,
    version: int = 3,
    resumed: int = 0,
) -> Chunk:
    return chunk_of(
        admission(1, version), 0, sequence, position, tokens,
        attempt=attempt, logprobs=pack_logprobs([-0.5 * t for t in tokens]), resumed_tokens=resumed,
    )  # fmt: skip


def collect(*chunks: Chunk) -> PrefixCollector:
    collector = PrefixCollector({"g1/0": 3})
    for each in chunks:
        collector.add_chunk(each)
    return collector


def test_the_chunks_of_an_attempt_are_joined_with_their_logprobs() -> None:
    prefix = collect(chunk(0, 0, 0, [1, 2]), chunk(0, 1, 2, [3])).best("g1/0")
    assert prefix.token_ids == pack_tokens([1, 2, 3])
    assert prefix.logprobs == pack_logprobs([-0.5, -1.0, -1.5])
    assert prefix.tokens == 3
    assert prefix.barren_since == 1


def test_what_follows_a_missing_chunk_is_left_aside() -> None:
    prefix = collect(chunk(0, 0, 0, [1, 2]), chunk(0, 2, 4, [5, 6])).best("g1/0")
    assert prefix.token_ids == pack_tokens([1, 2])


def test_a_chunk_that_does_not_continue_the_tokens_before_is_left_aside() -> None:
    prefix = collect(chunk(0, 0, 0, [1, 2]), chunk(0, 1, 3, [5, 6])).best("g1/0")
    assert prefix.token_ids == pack_tokens([1, 2])


def test_tokens_of_another_version_are_never_taken() -> None:
    assert collect(chunk(0, 0, 0, [1, 2], version=2)).best("g1/0").tokens == 0


def test_other_trajectories_are_not_looked_at() -> None:
    collector = PrefixCollector({"g2/0": 3})
    collector.add_chunk(chunk(0, 0, 0, [1]))
    assert collector.best("g2/0").tokens == 0
    assert collector.best("g1/0").tokens == 0


def test_the_longest_attempt_is_taken_and_never_two_mixed() -> None:
    prefix = collect(
        chunk(0, 0, 0, [1, 2, 3, 4, 5]), chunk(1, 0, 0, [1, 2, 9], resumed=2)
    ).best("g1/0")  # fmt: skip
    assert prefix.token_ids == pack_tokens([1, 2, 3, 4, 5])


def test_of_attempts_of_equal_length_the_newest_is_taken() -> None:
    prefix = collect(chunk(0, 0, 0, [1, 2, 3]), chunk(1, 0, 0, [1, 2, 9], resumed=2)).best("g1/0")
    assert prefix.token_ids == pack_tokens([1, 2, 9])


def test_an_attempt_that_only_repeated_its_prefix_counts_as_barren() -> None:
    collector = collect(
        chunk(0, 0, 0, [1, 2]),
        chunk(1, 0, 0, [1, 2, 3], resumed=2),
        chunk(2, 0, 0, [1, 2, 3], resumed=3),
    )
    assert collector.best("g1/0").barren_since == 2


def test_without_chunks_every_attempt_was_barren() -> None:
    assert collect().best("g1/0").barren_since == 0


def test_a_prefix_names_the_prompt_that_it_was_sampled_for() -> None:
    first = replace(chunk(0, 0, 0, [1, 2]), prompt_hash="aa")
    other = replace(chunk(1, 0, 0, [1, 2, 3], resumed=2), prompt_hash="bb")
    assert collect(first, chunk(0, 1, 2, [3, 4])).best("g1/0").prompt_hash == "aa"
    assert collect(first, other).best("g1/0").prompt_hash == "bb"
    assert collect().best("g1/0").prompt_hash == ""
