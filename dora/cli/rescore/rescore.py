"""`dora rescore`: how another verifier would have scored the responses in a run's log."""

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console

from dora.bus.settings import cluster_settings
from dora.cli.console import waiting
from dora.cli.options import (
    Command,
    config_file_option,
    json_option,
    kafka_options,
    print_line,
    sets_option,
    timeout_option,
)
from dora.cli.rescore.display import Change, Outcome, show
from dora.config import Config, KafkaSection
from dora.consumers.replay.plan import parse_steps
from dora.core.rescoring import Rescored, compare, largest_changes, spread_groups
from dora.core.ring import trajectory_id
from dora.errors import RunError, UsageError
from dora.log.recorded_config import recorded_config
from dora.log.run_log import RunLog
from dora.producers.replay.rescoring import Logged, open_scorer, score_again
from dora.producers.tasks.base import Task
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import tokenizer_of
from dora.producers.worker.scoring import Scored

EMULATED = "the emulated rewards"
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups to score, by id with their sizes, and what their trajectories are in the log.

    `failed` trajectories have no whole response, `unfinished` ones none yet; `gone` ones were
    trained and are not in the log any more.
    """

    groups: dict[str, int]
    logged: list[Logged]
    failed: int
    unfinished: int
    gone: list[str]


def _verifier(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    if text is not None and not _HOOK.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not of the form module:function", context, parameter)
    return text


@click.command(cls=Command)
@click.argument("run")
@click.option(
    "--verifier",
    metavar="MODULE:FUNCTION",
    callback=_verifier,
    help="Scores the responses: a module here, beside the configuration, or installed. Without it "
    "the run's own: a check that scoring is deterministic.",
)
@click.option("--version", type=click.IntRange(min=0), help="Only trajectories of this version.")
@click.option("--steps", "span", metavar="A:B", help="Only trajectories that these steps trained.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="About N trajectories: whole groups, evenly spread over the run.",
)
@click.option("--threshold", type=float, help="Least reward of a success; by default the run's.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that run the verifier; by default one for each core.",
)
@click.option(
    "--show", "shown", type=click.IntRange(min=0), default=5, show_default=True, metavar="N",
    help="How many of the largest changes to show.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.jsonl",
    help="Write old and new reward of every trajectory, one object a line.",
)
@config_file_option
@sets_option("Change a key of it, such as task.path if the data is elsewhere.")
@timeout_option(3600.0)
@kafka_options
@json_option
def rescore(
    run: str,
    verifier: str | None,
    version: int | None,
    span: str | None,
    limit: int | None,
    threshold: float | None,
    jobs: int | None,
    shown: int,
    out: Path | None,
    config_file: Path | None,
    sets: tuple[str, ...],
    timeout: float,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Score the logged trajectories of RUN again, and show what changes.

    As in rollout workers, responses are scored in processes of their own, each within
    task.verifier_timeout_seconds. Nothing is written to the run.
    """
    steps = None if span is None else parse_steps(span)
    with waiting(f"reading {run}", quiet=as_json) as status:
        log = RunLog(cluster_settings(kafka), run, deadline=timeout)
        config = recorded_config(log.started, kafka, config_file, sets)
        threshold = config.task.success_threshold if threshold is None else threshold
        selection = select(log, version, steps, limit)
        status(f"loading the task and the verifier of {run}")
        task = create_task(config, tokenizer_of(config))
        processes = jobs or len(os.sched_getaffinity(0))
        scorer = open_scorer(config, verifier, processes, Path.cwd())
        try:
            begun = time.monotonic()
            rows: list[Rescored] = []
            with _opened(out) as file:
                for each, score in score_again(selection.logged, task, scorer):
                    rows.append(_row(each, score))
                    if file is not None:
                        file.write(json.dumps(_line(each, score)) + "\n")
                    if len(rows) % 100 == 0:
                        status(f"scoring: {len(rows):,} of {len(selection.logged):,}")
            seconds = time.monotonic() - begun
        finally:
            scorer.close()
    # scores come in as processes finish: what is shown does not depend on that
    order = {each.trajectory: place for place, each in enumerate(selection.logged)}
    rows.sort(key=lambda row: order[row.trajectory])
    outcome = Outcome(
        run=run,
        verifier=verifier or _recorded(config),
        recorded_verifier=_recorded(config),
        comparison=compare(rows, threshold=threshold, group_sizes=selection.groups),
        failed=selection.failed,
        unfinished=selection.unfinished,
        gone=tuple(selection.gone),
        notes=(*log.missing, *log.unreadable),
        seconds=seconds,
        processes=processes,
        verifier_seconds=scorer.verifier_seconds,
        largest=_changes(largest_changes(rows, shown), selection.logged, task),
    )
    if as_json:
        print_line(json.dumps(outcome.as_object(), indent=2))
    else:
        show(outcome, Console(highlight=False))
    if all(row.new is None for row in rows):
        commonest = outcome.comparison.failures[0]
        raise RunError(
            f"none of {len(rows):,} trajectories could be scored; most often, {commonest.count:,} "
            f"times: {commonest.reason}",
            hint="Nothing was compared. Fix the verifier, or name another one with --verifier.",
        )


def select(
    log: RunLog,
    version: int | None,
    steps: tuple[int | None, int | None] | None,
    limit: int | None,
) -> Selection:
    """What is to be scored. RunError if there is no such version or step, or nothing to score."""
    trained = log.trained_at()
    groups = {g: a for g, a in log.admissions.items() if version in (None, a.policy_version)}
    if version is not None and not groups:
        known = sorted({a.policy_version for a in log.admissions.values()})
        raise RunError(
            f"run {log.run} generated nothing with version {version}",
            hint=f"It has versions {known[0]} to {known[-1]}." if known else None,
        )
    if steps is not None:
        first, last = log.span(*steps)
        groups = {g: a for g, a in groups.items() if first <= trained.get(g, -1) <= last}
    sizes = {group: admission.group_size for group, admission in groups.items()}
    if limit is not None:
        chosen = spread_groups(sizes, limit) if sizes else set()
        sizes = {group: size for group, size in sizes.items() if group in chosen}
    versions = {groups[group].policy_version for group in sizes}
    logged: list[Logged] = []
    seen: set[str] = set()
    failed = 0
    for placed in log.trajectories(versions):
        record = placed.record
        if record.group_id in sizes:
            seen.add(record.trajectory_id)
            each = Logged.of(record)
            if each is None:
                failed += 1
            else:
                logged.append(each)
    missing = [
        (group, trajectory_id(group, sample))
        for group, size in sizes.items()
        for sample in range(size)
        if trajectory_id(group, sample) not in seen
    ]
    gone = [identity for group, identity in missing if group in trained]
    if not logged:
        raise RunError(
            f"run {log.run} holds no trajectory to score"
            + (f": {len(gone)} that were trained are not in the log any more" if gone else ""),
            hint="; ".join(log.missing) or None,
        )
    return Selection(sizes, logged, failed, len(missing) - len(gone), gone)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error
    with file:
        yield file


def _row(each: Logged, score: Scored) -> Rescored:
    return Rescored(
        each.trajectory,
        each.group,
        each.version,
        each.purpose,
        each.reward,
        score.reward,
        score.error_code,
        score.error,
    )


def _line(each: Logged, score: Scored) -> dict[str, Any]:
    return {
        **dataclasses.asdict(_row(each, score)),
        "ordinal": each.ordinal,
        "parts": score.parts,
    }


def _recorded(config: Config) -> str:
    if config.rollout.engine == "emulated":
        return EMULATED
    return config.task.verifier or f"reasoning-gym's scorer of {config.task.name}"


def _changes(rows: list[Rescored], logged: list[Logged], task: Task) -> tuple[Change, ...]:
    wanted = {row.trajectory for row in rows}
    texts = {each.trajectory: each for each in logged if each.trajectory in wanted}
    changes = []
    for row in rows:
        each = texts[row.trajectory]
        prompt = task.prompt(each.ordinal, each.purpose).text
        changes.append(Change(row, prompt, each.text))
    return tuple(changes)
