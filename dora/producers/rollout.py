"""Puts a rollout worker together: tokenizer, task, scorer, weight store, engine.

Invariant: everything that can be refused (worker id in use, model, tokenizer, data set, verifier)
is refused before the engine starts.
"""

import math
import os
import threading
import time
from collections.abc import Callable

from dora.bus.settings import ClusterSettings
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.producers import watchdog
from dora.producers.claim import claim_worker_id
from dora.producers.emulated_scoring import EmulatedScorer
from dora.producers.engines import create_engine
from dora.producers.installation import Installer
from dora.producers.scoring import Scorer
from dora.producers.tasks.base import create_task
from dora.producers.tasks.hooks import load_hook
from dora.producers.tokenization import load_tokenizer, stop_token_ids
from dora.producers.worker import Worker
from dora.producers.worker_loop import work
from dora.weights.store import WeightStore


def run_worker(
    config: Config, settings: ClusterSettings, worker: str, stop: threading.Event
) -> None:
    """Runs one worker until it is told to stop; raises what makes it impossible to go on."""
    emulated = config.rollout.engine == "emulated"
    # generation is one thread's work; more threads of numeric libraries only get in its way
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    claim_worker_id(
        settings, config.run.name, worker, heartbeat_seconds=config.rollout.heartbeat_seconds
    )
    tokenizer = load_tokenizer(config.policy)
    task = create_task(config, tokenizer)
    if config.task.verifier is not None:
        # the scorer's processes load it too, but would report it only once the engine is there
        load_hook(config.task.verifier, config.home, "task.verifier")
    stops = stop_token_ids(config, tokenizer)
    scorer = (
        EmulatedScorer(config.rollout.emulated.success_rate)
        if emulated
        else Scorer(config.task, config.home)
    )
    engine = create_engine(config, worker)
    installer = Installer(
        engine,
        WeightStore.of(config),
        config.run_directory / "cache" / worker,
        # the emulated engine has no weights that could be wrong
        tolerance=math.inf if emulated else config.rollout.canary_tolerance,
        clock=time.monotonic,
    )

    def make(writer: LogWriter, catch_up: Callable[[], None]) -> Worker:
        return Worker(
            config, writer, worker, engine=engine, installer=installer, task=task,
            tokenizer=tokenizer, scorer=scorer, stop_token_ids=stops, alive=watchdog.alive,
            catch_up=catch_up,
        )  # fmt: skip

    try:
        work(settings, worker, make, stop)
    finally:
        watchdog.off()
        engine.close()
        scorer.close()
