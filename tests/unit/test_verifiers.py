"""Verifiers that come with dora: the forms of answers that data sets and models write."""

import pytest

from dora.producers.tasks.verifiers import exact, last_number, math

REFERENCES = [
    r"\$32,348", r"\$18.90", r"\text{\$36}", r"\dfrac{\$3}{4}", "$36", "US$5", r"5\$", "$18.90$",
    r"\frac{1}{2}", r"\frac12", r"-\frac{3}{4}", r"2\frac{1}{2}", "0.5", ".5", r"50\%", "50%",
    r"90^\circ", r"\text{(C)}", "(2,3)", r"[0,\infty)", r"x\in[-2,7]", r"\sqrt{3}", r"3\sqrt2",
    r"\pi", "1,000", r"1{,}000", r"10,\!000", r"\text{even}", "x^2+1", "x=5", r"5 \text{ cm}",
    r"\{1,2\}", "1,2", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{7}", "\u22125", "3:45",
]  # fmt: skip
"""Forms of reference answers in sets like MATH and GSM8K."""


@pytest.mark.parametrize("reference", REFERENCES)
def test_math_reads_each_form_of_a_reference(reference: str) -> None:
    boxed = reference if "boxed" in reference else rf"\boxed{{{reference}}}"
    assert math(f"So the answer is {boxed}.", {"answer": reference}) == 1.0
    assert math(r"So the answer is \boxed{987654}.", {"answer": reference}) == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        (r"\boxed{18.9}", r"\$18.90", 1.0),
        (r"\boxed{32348}", r"\$32,348", 1.0),
        (r"\boxed{36}", r"\text{\$36}", 1.0),
        (r"\boxed{37}", r"\text{\$36}", 0.0),
        (r"$\boxed{\$36}$", "36", 1.0),
        ("It costs $36", "36", 1.0),
        ("First $5, then $36.", "36", 1.0),
        (r"The price is $5, so \(x=36\)", "36", 1.0),
    ],
)
def test_math_takes_a_currency_sign_for_no_delimiter(
    response: str, reference: str, reward: float
) -> None:
    assert math(response, {"answer": reference}) == reward


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("that makes 1,234.50 dollars", "1234.5", 1.0),
        ("that makes $42.", "#### 42", 1.0),
        ("it is \u22125", "-5", 1.0),
        ("it is -5", "\u22125", 1.0),
        ("it is \u22125", "5", 0.0),
        ("so .5", "0.5", 1.0),
        ("no idea", "5", 0.0),
    ],
)
def test_last_number_reads_each_form_of_a_number(
    response: str, reference: str, reward: float
) -> None:
    assert last_number(response, {"answer": reference}) == reward


@pytest.mark.parametrize("verifier", [exact, last_number, math])
def test_an_item_without_an_answer_is_an_error(verifier: object) -> None:
    with pytest.raises(ValueError, match='the item has no "answer"'):
        verifier("42", {"answer": " "})  # type: ignore[operator]
