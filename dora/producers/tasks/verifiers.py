"""Verifiers that come with dora, for `task.verifier`.

Invariant: a verifier judges one response to one item and keeps nothing between calls. A wrong or
unreadable response is reward 0; an item without a usable reference answer is an error, because no
response to it could ever be right.
"""

import logging
import re
from typing import Any

_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


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
    """1 if the last number of the response is the reference answer, as GSM8K is scored."""
    numbers = _NUMBER.findall(response)
    expected = _NUMBER.findall(_reference(item))
    if not expected:
        raise ValueError(f'the reference answer "{item["answer"]}" holds no number')
    if not numbers:
        return 0.0
    return float(float(numbers[-1].replace(",", "")) == float(expected[-1].replace(",", "")))


def math(response: str, item: dict[str, Any]) -> float:
    """1 if math-verify finds the answer equal to the reference, symbolically.

    math-verify's own time limits use signals and are left to the pool that runs the verifier.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    reference = _reference(item)
    # math-verify sees LaTeX only between delimiters, which reference answers often lack.
    bare = not any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    gold = parse(f"${reference}$" if bare else reference, configs, parsing_timeout=None)
    if not gold:
        raise ValueError(f'math-verify cannot read the reference answer "{reference}"')
    answer = parse(response, configs, parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))
