"""Verifiers that come with dora, for `task.verifier`.

A verifier judges one response to one item and keeps nothing between calls. A wrong or unreadable
response is reward 0. An item without a usable reference answer is an error, because no response to
it could be right.
"""

import logging
import re
from typing import Any

_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)")
_MINUS_SIGN = "\u2212"
_CURRENCY = re.compile(r"\\\$")


def _reference(item: dict[str, Any]) -> str:
    answer = item.get("answer")
    if answer is None or not str(answer).strip():
        raise ValueError('the item has no "answer"')
    return str(answer)


def answer_of(response: str) -> str:
    """What stands between the last `<answer>` tags, or else the whole response, stripped."""
    found = _ANSWER.findall(response)
    return str(found[-1] if found else response).strip()


def exact(response: str, item: dict[str, Any]) -> float:
    """1 if the answer equals the reference answer, blanks and case aside."""
    return float(
        " ".join(answer_of(response).lower().split()) == " ".join(_reference(item).lower().split())
    )


def last_number(response: str, item: dict[str, Any]) -> float:
    """1 if the last number of the response is the reference answer, as GSM8K is scored.

    Reads `1,234.50`, `.5`, and a minus written as a hyphen or as U+2212.
    """
    numbers = _NUMBER.findall(response)
    expected = _NUMBER.findall(_reference(item))
    if not expected:
        raise ValueError(f'the reference answer "{item["answer"]}" holds no number')
    return float(bool(numbers) and _value(numbers[-1]) == _value(expected[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", "").replace(_MINUS_SIGN, "-"))


def math(response: str, item: dict[str, Any]) -> float:
    """1 if math-verify finds the answer equal to the reference, symbolically.

    math-verify's own time limits use signals and are left to the pool that runs the verifier.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    reference = _reference(item)
    gold = parse(_in_math(reference), configs, parsing_timeout=None)
    if not gold:
        raise ValueError(f'math-verify cannot read the reference answer "{reference}"')
    answer = parse(_without_currency(response), configs, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def _in_math(reference: str) -> str:
    """The reference between delimiters: math-verify reads LaTeX only there, and reference answers
    often lack them."""
    text = _without_currency(reference)
    delimited = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    return text if delimited else f"${text}$"


def _without_currency(text: str) -> str:
    """The text without dollar signs that mean money: escaped ones, and a single one, which cannot
    be a delimiter."""
    text = _CURRENCY.sub("", text)
    return text.replace("$", "") if text.count("$") == 1 else text
