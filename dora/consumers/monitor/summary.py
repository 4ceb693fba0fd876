"""The summary of a run, computed from its log.

Every number comes from the ledger and the counted trajectories; the same log gives the
same summary, however often the run was interrupted.
"""

import json
from pathlib import Path
from typing import Any

from dora import __version__
from dora.atomic_write import atomic_write
from dora.consumers.monitor.snapshot import Snapshot
from dora.core.step_metrics import success

FILE_NAME = "summary.json"


def summarize(snapshot: Snapshot) -> dict[str, Any]:
    """The summary as JSON-able values.

    `wall_seconds` runs from the start of the run to its last record, interruptions included.
    `success_first` and `success_last` are shares of held-out prompts solved by version 0 and by the
    last version evaluated, or of the first and last training batch where nothing was evaluated
    (`success_source` says which). `tokens` are all generated ones, evaluation included.
    """
    evaluated = [point for point in snapshot.evaluations if point.scored]
    measured = success(
        [point.success_rate for point in evaluated], [point.metrics for point in snapshot.steps]
    )
    wall = 0.0
    if snapshot.started_ms is not None and snapshot.last_ms is not None:
        wall = (snapshot.last_ms - snapshot.started_ms) / 1000
    return {
        "run": snapshot.run,
        "dora_version": __version__,
        "steps": snapshot.step,
        "wall_seconds": wall,
        "success_first": measured.first,
        "success_last": measured.last,
        "success_source": measured.source,
        "trajectories": snapshot.trajectories,
        "tokens": snapshot.tokens,
        "tokens_per_second": snapshot.tokens / wall if wall else None,
        "max_staleness": snapshot.staleness_max,
        "staleness_bound": snapshot.max_staleness,
        "live_versions_max": snapshot.live_versions_max,
        "trainer_idle_share": snapshot.trainer_idle_share,
        "logprob_mismatch_mean": snapshot.logprob_mismatch_mean,
        "groups_trained": snapshot.groups_trained,
        "groups_set_aside": snapshot.groups_set_aside,
        "duplicates_ignored": snapshot.duplicates,
        "dead_letters": snapshot.dead_letters,
        "evaluations": [
            {
                "version": point.version,
                "prompts": point.scored,
                "unscored": point.unscored,
                "success": point.success_rate,
                "reward_mean": point.reward_mean,
            }
            for point in evaluated
        ],
        "curve": [
            {
                "step": point.step,
                "seconds": max(
                    0.0, (point.created_ms - (snapshot.started_ms or point.created_ms)) / 1000
                ),
                "success": point.metrics.get("success_rate"),
                "reward_mean": point.metrics.get("reward_mean"),
                "loss": point.metrics.get("loss"),
                "staleness_mean": point.metrics.get("staleness_mean"),
                "response_length_mean": point.metrics.get("response_length_mean"),
            }
            for point in snapshot.steps
        ],
    }


def write_summary(summary: dict[str, Any], directory: Path) -> Path:
    """Write `summary.json` into `directory`, whole or not at all; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    atomic_write(path, json.dumps(summary, indent=2) + "\n")
    return path
