"""What is read from the identity that a run recorded, whoever wrote it."""

import json

import pytest

from dora.core.identity import (
    dispatch_partitions,
    ends_early,
    schedule_of,
    success_threshold,
    tokens_per_step,
)


def test_a_recorded_identity_is_read() -> None:
    recorded = json.dumps(
        {
            "schedule": {"kind": "partial"},
            "window": {"tokens_per_step": 4_000},
            "kafka": {"dispatch_partitions": 9},
            "task": {"success_threshold": 0.25},
        }
    )
    assert (schedule_of(recorded), dispatch_partitions(recorded)) == ("partial", 9)
    assert (tokens_per_step(recorded), ends_early(recorded)) == (4_000, True)
    assert success_threshold(recorded) == 0.25


@pytest.mark.parametrize(
    "foreign", ["", "[]", "no json", '{"task": 1, "window": [], "kafka": "x"}']
)
def test_what_a_foreign_identity_lacks_has_its_default(foreign: str) -> None:
    assert (schedule_of(foreign), dispatch_partitions(foreign)) == ("dora", 1)
    assert (tokens_per_step(foreign), ends_early(foreign)) == (None, False)
    assert success_threshold(foreign) == 1.0
