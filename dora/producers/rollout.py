"""Puts the rollout workers of a process together: tokenizer, task, scorer, weight store, engine.

Invariant: everything that can be refused (worker id in use, model, tokenizer, data set, verifier)
is refused before an engine starts.
"""

import math
import os
import threading
import time
from collections.abc import Callable

from dora.bus.settings import ClusterSettings
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.errors import UsageError
from dora.producers import watchdog
from dora.producers.claim import claim_worker_ids
from dora.producers.emulated_scoring import EmulatedScorer
from dora.producers.engines import Engine, create_engine
from dora.producers.fleet import fleet_names, work
from dora.producers.installation import Installer
from dora.producers.scoring import Scorer
from dora.producers.tasks.base import create_task
from dora.producers.tasks.hooks import load_hook
from dora.producers.tokenization import stop_token_ids, tokenizer_of
from dora.producers.worker import Worker
from dora.weights.store import WeightStore


def run_workers(
    config: Config,
    settings: ClusterSettings,
    first: str,
    stop: threading.Event,
    *,
    count: int = 1,
) -> None:
    """Runs the worker named `first`, or `count` emulated ones named from there on, until told to
    stop; raises what makes it impossible to go on."""
    emulated = config.rollout.engine == "emulated"
    if count > 1 and not emulated:
        raise UsageError(
            f"{count} workers in one process need rollout.engine = emulated, not "
            f"{config.rollout.engine}"
        )
    names = fleet_names(first, count)
    # generation is one thread's work; more threads of numeric libraries only get in its way
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    claim_worker_ids(
        settings, config.run.name, names, heartbeat_seconds=config.rollout.heartbeat_seconds
    )
    tokenizer = tokenizer_of(config)
    task = create_task(config, tokenizer)
    if config.task.verifier is not None:
        # the scorer's processes load it too, but would report it only once the engine is there
        load_hook(config.task.verifier, config.home, "task.verifier")
    stops = stop_token_ids(config, tokenizer)
    opened: list[Engine | Scorer | EmulatedScorer] = []

    def make(name: str, writer: LogWriter, catch_up: Callable[[], None]) -> Worker:
        scorer = (
            EmulatedScorer(config.rollout.emulated.success_rate)
            if emulated
            else Scorer(config.task, config.home)
        )
        opened.append(scorer)
        engine = create_engine(config, name)
        opened.append(engine)
        installer = Installer(
            engine,
            WeightStore.of(config),
            config.run_directory / "cache" / name,
            # the emulated engine has no weights that could be wrong
            tolerance=math.inf if emulated else config.rollout.canary_tolerance,
            clock=time.monotonic,
        )
        return Worker(
            config, writer, name, engine=engine, installer=installer, task=task,
            tokenizer=tokenizer, scorer=scorer, stop_token_ids=stops, alive=watchdog.alive,
            catch_up=catch_up,
        )  # fmt: skip

    try:
        work(settings, names, make, stop, flush_seconds=config.kafka.request_timeout_seconds)
    finally:
        watchdog.off()
        for each in opened:
            each.close()
