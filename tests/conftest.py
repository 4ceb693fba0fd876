"""How tests are spread over jobs: `make test` runs several."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from xdist.scheduler import LoadScopeScheduling

# The same examples every time, so that a failure is the change's. New examples are looked for with
# pytest --hypothesis-profile=default.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.load_profile("repeatable")

TOGETHER = {
    "test_connect": "registry",
    "test_registry_run": "registry",
    "test_schema_registry": "registry",
    "test_replay": "trained run",
    "test_inspect_recompute": "trained run",
    "test_inspect": "written run",
    "test_export": "written run",
    "test_export_refusals": "written run",
    "test_export_queries": "written run",
    "test_platform_records": "written run",
    "test_security": "secured",
    "test_security_run": "secured",
}
"""Files that share a server or a run, which then exists in one job only."""
APART = [
    *("test_bad_processes", "test_trainer_recovery", "test_run", "test_outage"),
    *("test_stalled_run", "test_fencing", "test_disk", "test_bad_log"),
]
"""Files of long tests that share nothing: each of their tests may go to another job."""
LONGEST = [
    *("test_security_run", "test_security", "test_ranks"),
    *("test_connect", "test_registry_run", "test_schema_registry"),
    *APART,
    *("test_origin", "test_changed_settings", "test_changed_inputs", "test_learner_ranks"),
    *("test_observability", "test_fleet", "test_bench"),
]
"""What is begun first, so that all jobs end at about the same time."""


def group_of(nodeid: str) -> str:
    """Tests of one group go to one job: those of a file, unless said otherwise above."""
    path, _, name = nodeid.partition("::")
    file = Path(path).stem
    return name.partition("[")[0] if file in APART else TOGETHER.get(file, file)


class Groups(LoadScopeScheduling):
    """Hands out groups in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {file: number for number, file in enumerate(LONGEST)}
    in_unit = {item: "unit" in item.path.parts for item in items}
    items.sort(key=lambda item: (in_unit[item], order.get(item.path.stem, len(order))))
