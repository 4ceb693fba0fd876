"""Whether a configuration may continue a recorded run.

A run's data all come from one identity (`Config.identity()`); a configuration that
differs in any of it is another run and must not write to this one's topics.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def differences(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """By differing key, in alphabetical order, both values: `recorded 1, given 2`. A section that
    one side lacks has keys that one side lacks."""
    return dict(sorted(_differences("", recorded, given)))


def _differences(
    prefix: str, recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for key in {*recorded, *given}:
        name = f"{prefix}{key}"
        left, right = recorded.get(key), given.get(key)
        sections = [side for side in (left, right) if isinstance(side, Mapping)]
        if sections and all(side is None or isinstance(side, Mapping) for side in (left, right)):
            yield from _differences(f"{name}.", left or {}, right or {})
        elif left != right:
            yield name, f"recorded {left!r}, given {right!r}"


def changed_inputs(recorded: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Names of the inputs (`dora.log.inputs`) that differ, or that only one side has, sorted."""
    return sorted(name for name in {*recorded, *given} if recorded.get(name) != given.get(name))


def schedule_of(recorded: str) -> str:
    """The schedule that a recorded identity (JSON) names; `dora` where it names none."""
    return str(_section(recorded, "schedule").get("kind", "dora"))


def ends_early(recorded: str) -> bool:
    """Whether the run with this recorded identity (JSON) has a budget of tokens per step, so that a
    step may train fewer groups than `groups_per_step`."""
    return tokens_per_step(recorded) is not None


def tokens_per_step(recorded: str) -> int | None:
    """The budget of tokens per step of a recorded identity (JSON); None without one."""
    found = _section(recorded, "window").get("tokens_per_step")
    return found if isinstance(found, int) else None


def dispatch_partitions(recorded: str) -> int:
    """Partitions of the dispatch topic, 1 where their number is not recorded."""
    found = _section(recorded, "kafka").get("dispatch_partitions")
    return found if isinstance(found, int) else 1


def success_threshold(recorded: str) -> float:
    """The reward from which on a trajectory counts as a success, 1 where none is recorded."""
    found = _section(recorded, "task").get("success_threshold")
    return float(found) if isinstance(found, int | float) else 1.0


def _section(recorded: str, name: str) -> Mapping[str, Any]:
    """A section of a recorded identity; empty where it is not recorded or not readable (the
    comparison of configurations reports that)."""
    try:
        section = json.loads(recorded).get(name)
    except (ValueError, AttributeError):
        return {}
    return section if isinstance(section, dict) else {}
