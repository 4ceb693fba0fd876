"""Whether a configuration may continue a recorded run.

Invariant: a run's data all come from one identity (`Config.identity()`); a configuration that
differs in any of it is another run and must not write to this one's topics.
"""

from collections.abc import Mapping
from typing import Any


def differences(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """One line per differing key, as `window.max_staleness: recorded 1, given 2`."""
    return sorted(_differences("", recorded, given))


def _differences(prefix: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in {*recorded, *given}:
        name = f"{prefix}{key}"
        left, right = recorded.get(key), given.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _differences(f"{name}.", left, right)
        elif left != right:
            found.append(f"{name}: recorded {left!r}, given {right!r}")
    return found
