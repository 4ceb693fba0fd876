"""A verifier of the demo with a mistake in it, to be found: docs/debugging.md tells how."""

from typing import Any

from spell_backward import read_answer


def verify(response: str, item: dict[str, Any]) -> float:
    """1 when the answer is right as far as it goes."""
    answer = read_answer(response)
    return float(answer is not None and str(item["answer"]).startswith(answer))
