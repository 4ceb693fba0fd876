"""`python -m tests.chaos`: what `make chaos` runs."""

import argparse
import json
import logging
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Never

from tests.chaos.campaign import Campaign
from tests.chaos.profiles import PROFILES
from tests.chaos.report import summary


def main(arguments: list[str] | None = None) -> int:
    """Make a chaos run and write its report; the exit code is 0 if it passed and 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill and freeze the processes of a real run, and prove that nothing is lost.",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and their order")
    parser.add_argument("--faults", type=int, default=20, help="how many faults to make")
    parser.add_argument("--engine", choices=sorted(PROFILES), default="emulated")
    parser.add_argument("--report", type=Path, default=Path("chaos-report.json"))
    parser.add_argument("--directory", type=Path, help="scratch directory, kept afterwards")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dora.kafka").setLevel(logging.CRITICAL)  # the broker is a victim
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    directory = given.directory or Path(tempfile.mkdtemp(prefix="dora-chaos-"))
    campaign = Campaign(directory, PROFILES[given.engine], given.seed, given.faults)
    try:
        findings = campaign.run()
    except KeyboardInterrupt:
        if given.directory is None:
            shutil.rmtree(directory)
        raise
    report = findings.to_json()
    given.report.write_text(json.dumps(report, indent=2) + "\n")
    lines = [*summary(report), f"report: {given.report}"]
    if findings.passed and given.directory is None:
        shutil.rmtree(directory)
    else:
        lines.append(f"logs and configuration: {directory}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if findings.passed else 1


_interrupted = threading.Event()


def _interrupt(number: int, frame: FrameType | None) -> Never:
    """Let everything that was started be ended."""
    _interrupted.set()
    raise KeyboardInterrupt


def _run() -> int:
    """`main`, with the exit code of an interrupted process whatever the interruption broke."""
    try:
        code = main()
    except BaseException:
        if not _interrupted.is_set():
            raise
    if not _interrupted.is_set():
        return code
    sys.stderr.write("interrupted; every process of the run is ended\n")
    return 130


if __name__ == "__main__":
    sys.exit(_run())
