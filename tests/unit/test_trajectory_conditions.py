"""Conditions on trajectories: what they select, and what is refused."""

from dataclasses import replace

import pytest

from dora.consumers.inspect.conditions import all_hold, parse_condition
from dora.consumers.inspect.rows import Fate, Row, row_of, sort_rows
from dora.errors import UsageError
from dora.log.run_log import Placed
from tests.factories import admission, trajectory

ROW = row_of(Placed(0, 7, trajectory(admission(4, 2))), Fate("trained", 4, 1))


def holds(text: str, row: Row = ROW) -> bool:
    return parse_condition(text).holds(row)


@pytest.mark.parametrize(
    "text",
    [
        "reward=1",
        "reward == 1.0",
        "reward>=1",
        "reward<=1",
        "reward > 0.5",
        "length=3",
        "length!=4",
        "logprob=-1",
        "step=4",
        "staleness<2",
        "attempts=1",
        "finish=stop",
        "finish!=length",
        "worker=w0",
        "purpose=train",
        "state=trained",
        "text~^nus\nsun$",
        "text~s.n",
        "text!~moon",
        "id~^g4/",
        "error=none",
        "error!=timeout",
        "error!~timeout",
        "reason=none",
        "mismatch=none",
    ],
)
def test_what_is_true_of_a_trajectory_holds_and_its_contrary_does_not(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "reward<1",
        "reward>1",
        "reward=none",
        "finish=length",
        "text~moon",
        "text!~sun",
        "worker!=w0",
        "mismatch<1",
        "mismatch>1",
        "error~.",
        "error=x",
    ],
)
def test_what_is_not_true_does_not_hold(text: str) -> None:
    assert not holds(text)


def test_conditions_must_all_hold() -> None:
    both = [parse_condition("reward>0"), parse_condition("length<3")]
    assert all_hold(both[:1], ROW) and not all_hold(both, ROW) and all_hold([], ROW)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward", "not of the form FIELD SIGN VALUE"),
        ("", "not of the form"),
        ("rewrad<1", "there is no field rewrad"),
        ("reward<half", "'half' is no number"),
        ("reward<0.5, length>3", "is no number"),
        ("reward!=nan", "nan is no number"),
        ("reward~1", "reward is a number"),
        ("finish<stop", "finish is a text"),
        ("text~(", "no regular expression"),
        ("reward<none", "with = and != alone"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_fields_that_there_are(
    text: str, says: str
) -> None:
    with pytest.raises(UsageError) as told:
        parse_condition(text)
    assert says in told.value.message
    assert "reward, length" in (told.value.hint or "") and "finish" in (told.value.hint or "")


def test_rows_are_sorted_with_those_without_a_value_last() -> None:
    rows = [replace(ROW, id=f"g{n}/0", ordinal=n, reward=r) for n, r in enumerate((1, None, 3, 2))]
    assert [row.id for row in sort_rows(rows, "reward")] == ["g0/0", "g3/0", "g2/0", "g1/0"]
    falling = sort_rows(rows, "reward", reverse=True)
    assert [row.id for row in falling] == ["g2/0", "g3/0", "g0/0", "g1/0"]
    assert [row.ordinal for row in sort_rows(rows, None, reverse=True)] == [3, 2, 1, 0]
