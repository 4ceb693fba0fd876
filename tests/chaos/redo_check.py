"""Redoes a run in a process of its own and prints the outcome as JSON: training wants one."""

import json
import sys
from pathlib import Path

from dora.bus import cluster_settings
from dora.config_file import KafkaOverrides, load_config
from dora.consumers.redo import redo_run


def main(path: str, address: str) -> None:
    """Redo the run of the configuration `path` on the cluster at `address`."""
    config = load_config(Path(path), environment={}, kafka=KafkaOverrides(address))
    sys.stdout.write(json.dumps(redo_run(config, cluster_settings(config.kafka)).to_json()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
