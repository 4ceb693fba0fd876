"""Lengths of emulated responses."""

import math
import statistics
from pathlib import Path

import pytest

from dora.errors import PolicyError
from dora.producers.engines.emulated import read_lengths
from dora.simulation.lengths import Lengths

COUNT = 20_000


@pytest.mark.parametrize(
    ("lengths", "deviation"),
    [(Lengths("uniform", 64), 36.7), (Lengths("lognormal", 64, 1.0), 83.9)],
)
def test_lengths_follow_the_distribution(lengths: Lengths, deviation: float) -> None:
    drawn = [lengths.draw(7, f"t{number}") for number in range(COUNT)]
    assert statistics.fmean(drawn) == pytest.approx(64, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.12)
    assert min(drawn) >= 1


def test_a_length_depends_on_seed_and_trajectory_alone() -> None:
    lengths = Lengths("lognormal", 1000, 1.0)
    assert lengths.draw(1, "a") == lengths.draw(1, "a", prompt=9)
    assert lengths.draw(1, "a") != lengths.draw(2, "a")
    assert lengths.draw(1, "a") != lengths.draw(1, "b")
    assert Lengths("fixed", 12.4).draw(1, "a") == Lengths("lognormal", 12, 0.0).draw(1, "b") == 12


def test_a_prompt_has_its_share_of_the_variance() -> None:
    lengths = Lengths("lognormal", 1000, 1.0, prompt_share=0.6)
    left, right = (
        [math.log(lengths.draw(3, f"{prompt}/{sample}", prompt)) for prompt in range(4000)]
        for sample in (0, 1)
    )
    assert statistics.correlation(left, right) == pytest.approx(0.6, abs=0.04)
    assert statistics.pstdev(left) == pytest.approx(1.0, rel=0.05)


def test_measured_lengths_are_drawn_with_replacement() -> None:
    lengths = Lengths("empirical", values=(3, 5, 900))
    drawn = [lengths.draw(7, f"t{number}") for number in range(3000)]
    assert {value: round(drawn.count(value) / 1000, 1) for value in set(drawn)} == {
        3: 1.0, 5: 1.0, 900: 1.0,
    }  # fmt: skip


def test_a_length_file_is_one_length_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n\n 7 \n30000\n")
    assert read_lengths(path) == (12, 7, 30000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "holds no length"),
        ("4\nfour\n", r"line 2 is 'four', not a length"),
        ("4\n0\n", r"line 2 is '0'"),
        ("-3\n", r"line 1 is '-3'"),
        ("1.5\n", r"line 1 is '1\.5'"),
        ("9" * 30, "line 1 is '9+', not a length"),
    ],
)
def test_a_length_file_that_is_none_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PolicyError, match=message) as caught:
        read_lengths(path)
    assert "lengths.txt" in caught.value.message
