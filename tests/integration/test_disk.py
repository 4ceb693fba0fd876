"""Disks that are too small or too slow, without the right to mount one: the kernel limits the size
of files (EFBIG instead of ENOSPC), and flushing is held up."""

import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora.bus import ClusterSettings, LogWriter
from dora.consumers.trainer.heartbeat import Heartbeat
from dora.consumers.trainer.trainer import Trainer
from dora.schemas.records import Status
from dora.weights import store
from tests.processes import statuses
from tests.small_run import SmallRun, refused
from tests.training_world import World, fed

SLOW_SECONDS = 3.0
WEIGHTS_KIB = 17  # what those of the small model take; a checkpoint takes several times as much


@contextmanager
def largest_file(kib: int) -> Iterator[None]:
    """This process cannot make a file larger than `kib`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_does_not_fit_on_the_disk_is_named_and_the_run_goes_on_once_it_fits(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    world = World(settings, small.name, small.model, small.directory / "runs")
    with fed(world):
        with largest_file(WEIGHTS_KIB // 2):
            refused(
                small.dora("train"),
                1,
                "cannot store version 0 at file://",
                "File too large",
                "Free space there, or lower weights.keep and trainer.keep_checkpoints",
            )
        assert world.read(small.topics.steps) == [], "nothing that is not on disk was announced"
        with largest_file(WEIGHTS_KIB * 2):
            refused(
                small.dora("train"),
                1,
                "cannot write a checkpoint at ",
                "MiB are free",
                "If the disk is full, free space there",
            )
        assert world.steps() == []
        assert not list(world.directory.rglob(".unfinished-*")), "nothing half written is left"
        result = small.dora("train")
    assert result.exit_code == 0, result.output
    assert small.look("audit", "--no-chunks").exit_code == 0


def trainer_gaps(settings: ClusterSettings, topic: str, message: str) -> list[float]:
    """Seconds between the trainer's words from the first with `message` on."""
    words = [s for s in statuses(settings, topic) if s.role == "trainer"]
    first = next(i for i, word in enumerate(words) if word.message == message)
    times = [word.created_ms / 1000 for word in words[first:]]
    return [after - before for before, after in itertools.pairwise(times)]


def test_a_trainer_is_heard_while_its_disk_is_slow_and_loses_nothing(
    small: SmallRun, settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.make_topics(settings)
    world = World(settings, small.name, small.model, small.directory / "runs")
    flush: Callable[[Path], None] = store.flush_directory
    waited = []

    def slow(directory: Path) -> None:
        time.sleep(SLOW_SECONDS)  # the disk
        flush(directory)
        waited.append(directory.name)

    monkeypatch.setattr(store, "flush_directory", slow)
    with fed(world):
        Trainer(small.config("trainer.steps=1"), settings).run(threading.Event())
    kinds = {"checkpoint": ".unfinished-step-", "weights": ".unfinished-v"}
    for kind, prefix in kinds.items():
        assert any(name.startswith(prefix) for name in waited), f"no slow {kind}"
    gaps = trainer_gaps(settings, small.topics.workers, "storing version 0")
    assert max(gaps) < SLOW_SECONDS / 2, "heartbeats come every 0.2 s, also meanwhile"
    assert [step.version_out for step in world.steps()] == [1]
    assert small.look("audit", "--no-chunks").exit_code == 0


def test_a_write_that_never_returns_is_silent_in_the_end(
    small: SmallRun, settings: ClusterSettings
) -> None:
    """Otherwise nobody would ever end such a trainer."""
    small.make_topics(settings)
    config = small.config("rollout.load_timeout_seconds=0.5", "rollout.heartbeat_seconds=0.1")
    with LogWriter(settings, client_id="trainer") as writer:
        heartbeat = Heartbeat(config, writer)
        heartbeat.report("training", "step 0 -> 1")
        began = time.time()
        with heartbeat.beat_through("storing version 1"):
            threading.Event().wait(1.5)  # the write
    words = [s for s in statuses(settings, small.topics.workers) if isinstance(s, Status)]
    assert {word.message for word in words[1:]} == {"storing version 1"}
    assert 2 <= len(words) <= 8
    assert words[-1].created_ms / 1000 - began < 1.0
    assert words[-1].pid == os.getpid()
