"""Redoes a run in a process of its own and prints the outcome as JSON: training wants one."""

import json
import sys
from pathlib import Path

from dora.bus import cluster_settings
from dora.config.loading import KafkaOverrides, load_config
from dora.consumers.replay.replay import replay
from dora.log.run_log import RunLog


def main(path: str, address: str) -> None:
    """Redo the run of the configuration `path` on the cluster at `address`."""
    config = load_config(Path(path), environment={}, kafka=KafkaOverrides(address))
    settings = cluster_settings(config.kafka)
    run = RunLog(settings, config.run.name)
    # without checkpoints: what is compared depends on the starting model and the log alone
    report = replay(run, config, settings, checkpoints=False)
    sys.stdout.write(json.dumps(report.to_json()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
