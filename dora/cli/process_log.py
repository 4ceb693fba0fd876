"""Logging of a run's processes: to standard error, one line each, with time and level."""

import logging
import sys


def log_to_stderr(level: int = logging.INFO) -> None:
    """Configures logging of a process; libraries speak only from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("dora").setLevel(level)
