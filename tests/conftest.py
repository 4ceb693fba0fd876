"""Fixtures for every test, and how tests are spread over jobs (`make test` runs several)."""

import pytest
from hypothesis import settings as hypothesis_settings

from tests.brokers import kafka, run_name, settings
from tests.engines import make_model, tiny_model_dir, vllm_engine
from tests.played_trainer import cluster, config
from tests.schema_registry import registry
from tests.secured_broker import secured

__all__ = [
    "cluster",
    "config",
    "kafka",
    "make_model",
    "registry",
    "run_name",
    "secured",
    "settings",
    "tiny_model_dir",
    "vllm_engine",
]

# The same examples every time, so that a failure is the change's. New examples are looked for with
# pytest --hypothesis-profile=default.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.load_profile("repeatable")

TOGETHER = {
    "test_connect": "registry",
    "test_registry_run": "registry",
    "test_schema_registry": "registry",
    "test_security": "secured",
    "test_security_run": "secured",
}
"""Files that share a costly server, which then runs in one job only."""
APART = [
    *("test_ranks", "test_bad_processes", "test_trainer_recovery", "test_run", "test_outage"),
    *("test_stalled_run", "test_fencing", "test_disk", "test_bad_log"),
]
"""Files of long tests that share nothing: each of their tests may go to another job."""
LONGEST = [*APART[:5], *TOGETHER, *APART[5:], "test_observability", "test_fleet", "test_bench"]
"""What is begun first, so that all jobs end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file go to one job, unless said otherwise above."""
    for item in items:
        file = item.path.stem
        group = getattr(item, "originalname", file) if file in APART else TOGETHER.get(file, file)
        item.add_marker(pytest.mark.xdist_group(group))
    order = {file: number for number, file in enumerate(LONGEST)}
    in_unit = {item: "unit" in item.path.parts for item in items}
    items.sort(key=lambda item: (in_unit[item], order.get(item.path.stem, len(order))))
