"""What a dry run says of what a run is watched with."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dora.cli.run.preflight import CHECKS, preflight
from dora.config.loading import load_config
from tests.configurations import emulated


def problems(tmp: Path, **sections: Any) -> dict[str, str]:
    found = preflight(emulated(tmp, **sections), tmp / "broker")
    return {check.subject: check.detail for check in found if check.outcome == "problem"}


def test_packages_of_trackers_and_traces_are_asked_for_only_if_they_are_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "opentelemetry.sdk.resources"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "dora.telemetry.span_export", raising=False)
    assert problems(tmp_path) == {}
    on = {
        "metrics": {"wandb": True, "mlflow": True},
        "traces": {"endpoint": "http://127.0.0.1:4318"},
    }
    found = problems(tmp_path, **on)
    assert found.keys() == {"metrics.wandb", "metrics.mlflow", "traces.endpoint"}
    assert "pip install wandb" in found["metrics.wandb"]
    assert "pip install mlflow" in found["metrics.mlflow"]
    assert "pip install 'dora-rl[traces]'" in found["traces.endpoint"]


def test_traces_are_no_problem_where_their_packages_are(tmp_path: Path) -> None:
    assert problems(tmp_path, traces={"endpoint": "http://127.0.0.1:4318"}) == {}


def test_every_finding_is_one_of_the_checks_that_the_docs_list(tmp_path: Path) -> None:
    emulated_run = preflight(emulated(tmp_path), tmp_path / "broker")
    example = Path(__file__).parents[2] / "examples" / "spell_backward.toml"
    real_run = preflight(load_config(example), tmp_path / "broker")
    found = {check.subject for check in (*emulated_run, *real_run)}
    assert found <= {*CHECKS, "task.render", "task.verifier", "policy.prepare"}
    assert {"model", "prompts", "libraries", "run directory", "kafka", "processes"} <= found
