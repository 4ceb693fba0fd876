"""What some tests need of the machine. Without it they are skipped; in CI they fail."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where `CI` is set to `true`."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{reason} (CI is set: it has to be there)", pytrace=False)
    pytest.skip(reason)


def program(*names: str, install: str) -> str:
    """Path of the first of these programs that is installed."""
    found = next(filter(None, map(shutil.which, names)), None)
    return found or missing(f"{names[0]} is not installed: {install}")


@contextmanager
def small_file_system(place: Path, size: str) -> Iterator[None]:
    """A file system of `size` at `place`; only root may mount it."""
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        missing("needs root, to mount a small file system")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        missing(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
