"""A verifier of the demo with a planted mistake; docs/debugging.md shows how to find it."""

from typing import Any

from spell_backward import read_answer


def verify(response: str, item: dict[str, Any]) -> float:
    """1 if the answer begins like the right one (the mistake)."""
    answer = read_answer(response)
    return float(answer is not None and str(item["answer"]).startswith(answer))
