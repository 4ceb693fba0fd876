"""Weights that cannot be stored, or are not what was announced."""

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.bus import BEGINNING, ClusterSettings, LogReader, LogWriter
from dora.core.ring import worker_partition
from dora.schemas.records import Command, Policy, Status, WeightFile
from tests.needs import small_file_system
from tests.small_run import SmallRun, refused
from tests.training_world import World, fed

DEADLINE = 30.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB; the small model's weights do not fit."""
    place = tmp_path / "disk"
    with small_file_system(place, "16k"):
        yield place


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def test_a_full_weight_store_is_named_and_the_run_begins_once_there_is_room(
    small: SmallRun, settings: ClusterSettings, disk: Path
) -> None:
    small.make_topics(settings)
    store = ("--set", f"weights.store=file://{disk}")
    refused(
        small.dora("train", *store),
        1,
        f"cannot store version 0 at file://{disk}/{small.name}: No space left on device",
        "lower weights.keep and trainer.keep_checkpoints",
    )
    assert not any(path.is_file() for path in disk.rglob("*")), "nothing half written is left"
    remount(disk, "size=4m")
    with fed(World(settings, small.name, small.model, small.directory / "runs")):
        result = small.dora("train", *store)
    assert result.exit_code == 0, result.output


def test_a_full_disk_for_checkpoints_is_named_and_the_run_goes_on_once_there_is_room(
    small: SmallRun, settings: ClusterSettings, disk: Path
) -> None:
    small.make_topics(settings)
    sets = ("--set", f"run.directory={disk}", "--set", f"weights.store=file://{small.directory}/w")
    with fed(World(settings, small.name, small.model, small.directory / "runs")):
        refused(
            small.dora("train", *sets),
            1,
            f"cannot write a checkpoint at {disk}/",
            "where 0.0 MiB are free",
            "If the disk is full",
        )
        remount(disk, "size=16m")
        result = small.dora("train", *sets)
    assert result.exit_code == 0, result.output
    assert small.look("audit", "--no-chunks").exit_code == 0


def test_a_read_only_weight_store_is_named_with_what_to_do(
    small: SmallRun, settings: ClusterSettings, disk: Path
) -> None:
    small.make_topics(settings)
    remount(disk, "ro")
    refused(
        small.dora("train", "--set", f"weights.store=file://{disk}"),
        1,
        f"cannot store version 0 at file://{disk}/{small.name}: Read-only file system",
        "Give the trainer write access there, or set run.directory / weights.store",
    )


def test_a_weight_store_below_a_file_is_refused(small: SmallRun, settings: ClusterSettings) -> None:
    small.make_topics(settings)
    refused(
        small.dora("train", "--set", f"weights.store=file://{small.path}"),
        1,
        f"cannot store version 0 at file://{small.path}/{small.name}: Not a directory",
    )


class Conductor(threading.Thread):
    """Plays the coordinator for one worker: tells it to load version 0."""

    def __init__(self, small: SmallRun, settings: ClusterSettings) -> None:
        super().__init__(daemon=True)
        self._small, self._settings = small, settings
        self.last: Status | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        topics, config = self._small.topics, self._small.config()
        reader = LogReader(self._settings, client_id="conductor")
        writer = LogWriter(self._settings, client_id="conductor")
        reader.assign({(topics.workers, 0): BEGINNING})
        told = False
        while not self._ended.is_set():
            for message in reader.poll(timeout=0.05):
                if isinstance(message.value, Status):
                    self.last = message.value
            if self.last is not None and self.last.state == "ready" and not told:
                told = True
                command = Command(
                    self._small.name, "w0", self.last.incarnation, "switch", 0, policy_version=0
                )
                index = worker_partition("w0", config.kafka.dispatch_partitions)
                writer.send(topics.dispatch, command, key="w0", partition=index)
                writer.flush(DEADLINE)
        reader.close()
        writer.close()

    def end(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while self.last is None or self.last.state != "failed":
            assert time.monotonic() < deadline, f"the worker said nothing of it: {self.last}"
            time.sleep(0.01)
        self._ended.set()
        self.join(DEADLINE)


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "version gone"])
def test_weights_that_are_not_what_was_announced_are_never_loaded(
    small: SmallRun, settings: ClusterSettings, damage: str
) -> None:
    small.make_topics(settings)
    store = small.directory / "runs" / small.name / "weights"
    version = store / f"v00000000-{'0' * 16}"
    shutil.copytree(small.model, version)
    weights = version / "model.safetensors"
    content = weights.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    file = WeightFile(weights.name, len(content), digest)
    parts = {
        "truncated": f"{weights} has 1000 bytes, its manifest says {len(content)}",
        "changed": f"{weights} has sha256 ",
        "missing": f"{weights} is missing",
        "version gone": f"version 0 is not in the weight store: no {version}",
    }
    if damage == "truncated":
        weights.write_bytes(content[:1000])
    elif damage == "changed":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        weights.unlink()
    else:
        shutil.rmtree(version)
    record = Policy(
        small.name,
        0,
        "full",
        version.as_uri(),
        (file,),
        "c",
        b"\1\0\0\0\2\0\0\0",
        b"\0\0\0\0",
        (),
        0,
    )
    with LogWriter(settings, client_id="test") as writer:
        writer.send(small.topics.policies, record, key="0", partition=0)
    conductor = Conductor(small, settings)
    conductor.start()
    result = small.dora("rollout", "--worker-id", "w0")
    refused(result, 1, parts[damage])
    conductor.end()
    assert conductor.last is not None and parts[damage] in conductor.last.message
    if damage == "changed":
        refused(
            result, 1, f"its manifest says {digest}", "damaged or replaced after it was published"
        )
    shown = small.look("tail", "-t", "workers", "-o", "-1", "--exit")
    assert "w0 failed" in shown.stdout
