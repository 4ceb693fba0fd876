"""Versions at work at the same time."""

from dora.core.step_metrics import VersionSpans


def spans(*times: tuple[int, int, int]) -> VersionSpans:
    made = VersionSpans()
    for version, started, finished in times:
        made.start(version, started)
        made.finish(version, finished)
    return made


def test_versions_one_after_the_other_are_never_live_together() -> None:
    assert spans((0, 0, 10), (1, 10, 20), (2, 25, 30)).most_at_once() == 1


def test_overlapping_versions_count_at_their_busiest_moment() -> None:
    assert spans((0, 0, 10), (1, 5, 30), (2, 8, 12), (3, 11, 20)).most_at_once() == 3


def test_a_span_reaches_from_the_first_start_to_the_last_finish() -> None:
    assert spans((0, 0, 3), (0, 5, 9), (1, 4, 6)).most_at_once() == 2


def test_a_version_without_a_finished_trajectory_does_not_count() -> None:
    made = spans((0, 0, 10))
    made.start(1, 5)
    assert made.most_at_once() == 1
    assert VersionSpans().most_at_once() == 0
