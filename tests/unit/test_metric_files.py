"""Dashboard, alerts and documentation against what processes export."""

import json
import re
import subprocess
from pathlib import Path

import yaml

from dora.telemetry.catalogue import CATALOGUE
from tests.prometheus_server import (
    ALERTS,
    DASHBOARD,
    alert_conditions,
    dashboard_queries,
    tool,
)

ROOT = Path(__file__).parents[2]


def exported_names() -> set[str]:
    names = set()
    for metric in CATALOGUE:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + end for end in ends}
    return names


def test_dashboard_and_alerts_ask_for_what_is_exported() -> None:
    known = exported_names()
    for query in (*dashboard_queries(), *alert_conditions()):
        used = set(re.findall(r"\bdora_[a-z0-9_]+", query))
        assert used or query.startswith("up"), query
        assert used <= known, f"{query} asks for {used - known}"


def test_the_dashboard_is_one_that_grafana_can_load() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 39 and board["uid"] and board["title"]
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["run"]["query"]["query"].startswith("label_values(dora_")
    assert variables["datasource"]["type"] == "datasource"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
        for target in panel.get("targets", ()):
            assert 'run="$run"' in target["expr"] and target["legendFormat"]
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_alert_says_what_happened_in_which_run() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["alert"].startswith("Dora")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]


SICK = {
    "DoraNoStep": [("dora_trainer_last_step_timestamp_seconds", "0+0x120")],
    "DoraTrainerIdle": [
        ("dora_trainer_idle_seconds_sum", "0+50x120"),
        ("dora_trainer_step_seconds_sum", "0+60x120"),
    ],
    "DoraStalenessAtBound": [
        ("dora_trainer_staleness_mean", "2+0x120"),
        ("dora_trainer_staleness_bound", "2+0x120"),
    ],
    "DoraProcessDown": [("up", "0+0x120")],
    "DoraProcessSilent": [("dora_process_late", "1+0x120")],
    "DoraWorkerSilent": [("dora_coordinator_workers", "1+0x120")],
    "DoraDeadLetters": [("dora_process_dead_letters_total", "0+1x120")],
    "DoraLagGrowing": [("dora_trainer_trajectories_lag_records", "0+500x120")],
    "DoraLagUnknown": [("dora_trainer_lag_age_seconds", "0+60x120")],
    "DoraMismatchHigh": [("dora_trainer_mismatch_mean_nats", "0.2+0x120")],
    "DoraCommitsRefused": [("dora_coordinator_commit_failures_total", "0+1x120")],
    "DoraWorkersLost": [("dora_coordinator_takeovers_total", "0+50x120")],
    "DoraSpansDropped": [("dora_process_spans_dropped_total", "0+10x120")],
    "DoraTrackerOff": [("dora_trainer_tracker_failures_total", "0+0x100 1+0x20")],
}
HEALTHY = {
    "up": "1+0x120",
    "dora_trainer_last_step_timestamp_seconds": "0+60x120",
    "dora_trainer_step_seconds_sum": "0+60x120",
    "dora_trainer_staleness_bound": "2+0x120",
}
LABELS = {
    "up": {"job": "dora"},
    "dora_coordinator_workers": {"state": "silent"},
    "dora_process_dead_letters_total": {"code": "verifier_died"},
    "dora_trainer_trajectories_lag_records": {"version": "3"},
}


def test_every_alert_fires_on_what_it_is_about_and_on_nothing_else(tmp_path: Path) -> None:
    """promtool plays two hours of a sick run and of a healthy one, a minute a sample."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set(SICK)
    cases = []
    for sick in (True, False):
        given = []
        for name, values in (series for each in SICK.values() for series in each):
            own = {"run": "r", "role": "x", "process": "p", **LABELS.get(name, {})}
            labels = ",".join(f'{key}="{value}"' for key, value in own.items())
            healthy = HEALTHY.get(name, "0+0x120")
            given.append({"series": f"{name}{{{labels}}}", "values": values if sick else healthy})
        checks = [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": "115m",
                "exp_samples": [{"labels": "{}", "value": 1}] if sick else [],
            }
            for alert in SICK
        ]
        cases.append({"interval": "1m", "input_series": given, "promql_expr_test": checks})
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": cases}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
