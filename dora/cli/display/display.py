"""How a run is shown: one live picture on a terminal, plain lines elsewhere.

What is drawn is a function of a `Snapshot` and the children's states; nothing is asked
of the cluster here.
"""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dora.cli.display.charts import condensed
from dora.cli.display.parts import (
    duration,
    figures,
    headline,
    problem_lines,
    shown_state,
    state_text,
    time_to_go,
    trouble_lines,
    window_title,
)
from dora.cli.run.supervisor import ChildView
from dora.closeable import Closeable
from dora.consumers.monitor.snapshot import Snapshot, StepPoint
from dora.log.presence import ProcessView


class Display(Closeable):
    """Shows a run while it goes on, until it is closed."""

    @abstractmethod
    def update(self, snapshot: Snapshot, children: Sequence[ChildView]) -> None:
        """Show the run as it is now."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show an event."""


def open_display(console: Console) -> Display:
    """A live picture on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class LiveDisplay(Display):
    """Redraws one picture in place; events scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def close(self) -> None:
        """Leave the last picture there."""
        self._live.stop()

    def update(self, snapshot: Snapshot, children: Sequence[ChildView]) -> None:
        """Redraw."""
        self._live.update(render(snapshot, children), refresh=True)

    def note(self, text: str) -> None:
        """Print above the picture."""
        self._live.console.print(Text(f"{time.strftime('%H:%M:%S')}  {text}", style="dim"))


class PlainDisplay(Display):
    """One line per step and per change of a process's state or of the run's health."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._evaluated: set[int] = set()
        self._states: dict[str, str] = {}
        self._health = ""
        self._aside = ("", 0)
        self._begun = False

    def close(self) -> None:
        """Nothing is held."""

    def update(self, snapshot: Snapshot, children: Sequence[ChildView]) -> None:
        """Print what is new since the last call; the first call finds nothing old new."""
        if not self._begun:
            self._begun = True
            self._pass_over(snapshot)
        for point in snapshot.steps[self._steps :]:
            self.note(step_line(point, snapshot))
        self._steps = len(snapshot.steps)
        for evaluation in snapshot.evaluations:
            if evaluation.complete and evaluation.version not in self._evaluated:
                self._evaluated.add(evaluation.version)
                self.note(f"evaluation of version {evaluation.version}: success {evaluation.text}")
        common = snapshot.set_aside_reason
        # Told when it becomes the commonest, and each time that it has grown tenfold.
        if common and (common.reason != self._aside[0] or common.count >= 10 * self._aside[1]):
            self._aside = (common.reason, common.count)
            self.note(f"groups set aside, {common.text}")
        for process in snapshot.processes:
            # Training and waiting, loading and ready alternate at each step: they are no news.
            busy = ("training", "waiting") if process.role == "trainer" else ("loading", "ready")
            at_work = process.version >= 0 and process.state in busy
            state: str = "at work" if at_work else process.state
            if shown_state(process) == "silent":
                state = "silent"
            if self._states.get(process.process) != state:
                self._states[process.process] = state
                message = f": {process.message}" if process.message else ""
                self.note(f"{process.process} {state}{message}")
        if snapshot.health != self._health:
            self._health = snapshot.health
            if snapshot.health == "stalled":
                self.note("stalled: " + "; ".join(snapshot.reasons))

    def _pass_over(self, snapshot: Snapshot) -> None:
        """What a run that goes on had done before is said in one line."""
        if snapshot.steps:
            self._steps = len(snapshot.steps)
            self.note(f"the run goes on after {step_line(snapshot.steps[-1], snapshot)}")
        self._evaluated = {point.version for point in snapshot.evaluations if point.complete}
        self._states = {
            process.process: shown_state(process)
            for process in snapshot.processes
            if not process.alive
        }

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_line(point: StepPoint, snapshot: Snapshot) -> str:
    """A step on one line."""
    metrics = point.metrics
    target = f"/{snapshot.steps_target}" if snapshot.steps_target else ""
    seconds = metrics.get("step_seconds", 0.0)
    trained = metrics.get("tokens", 0.0) / seconds if seconds else 0.0
    return "  ".join(
        (
            f"step {point.step}{target}",
            f"success {metrics.get('success_rate', 0.0):.3f}",
            f"reward {metrics.get('reward_mean', 0.0):.3f}",
            f"truncated {metrics.get('truncated_fraction', 0.0):.0%}",
            f"unscored {metrics.get('unscored_fraction', 0.0):.0%}",
            f"stale {metrics.get('staleness_mean', 0.0):.2f}",
            f"live {metrics.get('live_versions', 0.0):.0f}",
            f"tok/s {trained:,.0f}",
            f"mismatch {metrics.get('logprob_mismatch_mean', 0.0):.1e}",
        )
    )


def render(snapshot: Snapshot, children: Sequence[ChildView] = ()) -> RenderableType:
    """The whole picture of a run."""
    parts: list[RenderableType] = [_headline(snapshot)]
    if snapshot.steps_target:
        parts.append(_progress(snapshot))
    parts += trouble_lines(snapshot)
    parts.append(_figures(snapshot))
    if snapshot.versions:
        parts.append(_window(snapshot))
    if snapshot.processes or children:
        parts.append(_processes(snapshot.processes, children))
    parts += problem_lines(snapshot, 5)
    return Group(*parts)


def _headline(snapshot: Snapshot) -> Text:
    text = headline(snapshot)
    if snapshot.started_ms is not None:
        text.append(" since its start")
    if not snapshot.steps_target and snapshot.newest >= 0:
        text.append(f"  {snapshot.step} steps")
    return text


def _progress(snapshot: Snapshot) -> RenderableType:
    total = snapshot.steps_target or 1
    row = Table.grid(padding=(0, 1))
    to_go = time_to_go(snapshot)
    bar = ProgressBar(total=total, completed=min(snapshot.step, total), width=40)
    row.add_row(f"step {snapshot.step}/{total}", bar, f"about {to_go}" if to_go else "")
    return row


def _figures(snapshot: Snapshot) -> RenderableType:
    metrics = snapshot.metrics
    table = Table.grid(padding=(0, 2))
    success = f"{metrics['success_rate']:.3f}" if "success_rate" in metrics else "-"
    reward = f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else "-"
    says = figures(snapshot)
    table.add_row(f"success {success}", f"reward {reward}", says["held-out"])
    table.add_row(says["generated"], says["trained"], says["amount"])
    table.add_row(says["stale"], says["idle"], says["mismatch"])
    table.add_row(says["truncated"], says["unscored"], "")
    table.add_row(says["aside"], says["dead"], says["ignored"])
    return table


def _window(snapshot: Snapshot) -> RenderableType:
    table = Table(
        title=window_title(snapshot),
        title_justify="left",
        box=None,
        padding=(0, 2),
    )
    for column in ("version", "groups", "unfinished", "trajectories to go", "held-out", "workers"):
        table.add_column(column, justify="right")
    for backlog in snapshot.versions:
        table.add_row(
            *(
                str(number)
                for number in (
                    backlog.version,
                    backlog.groups_outstanding,
                    backlog.groups_unfinished,
                    backlog.trajectories_unfinished,
                    backlog.evaluation_unfinished,
                    backlog.workers,
                )
            )
        )
    return table


def _processes(processes: Sequence[ProcessView], children: Sequence[ChildView]) -> RenderableType:
    table = Table(box=None, padding=(0, 2))
    for column in ("process", "state", "version", "running", "last heard"):
        table.add_column(column, no_wrap=True)
    table.add_column("what", overflow="fold")
    local = {child.name: child for child in children}
    for process in processes:
        child = local.pop(process.process, None)
        state = shown_state(process)
        what = process.message
        if state in ("silent", "quiet"):
            what = f"not heard for {duration(process.age_seconds)}; {what}".rstrip("; ")
        if child is not None and child.state in ("restarting", "failed"):
            state, what = child.state, child.note
        if child is not None and child.restarts:
            what = f"[restarts: {child.restarts}] {what}"
        table.add_row(
            process.process,
            state_text(state),
            str(process.version) if process.version >= 0 else "",
            f"{process.running}/{process.capacity}" if process.capacity else "",
            f"{duration(process.age_seconds)} ago",
            Text(what),
        )
    for child in local.values():
        table.add_row(child.name, state_text(child.state), "", "", "", Text(child.note))
    return table


def learning_curve(snapshot: Snapshot, *, width: int = 60, height: int = 8) -> list[str]:
    """Training success over the steps as a text plot, or the reward where no response succeeded;
    empty before the first step."""
    what, key = "success", "success_rate"
    if not any(point.metrics.get(key) for point in snapshot.steps):
        what, key = "reward", "reward_mean"
    means = condensed([p.metrics.get(key, 0.0) for p in snapshot.steps], width)
    if not means:
        return []
    columns = len(means)
    bottom, top = min(0.0, *means), max(0.0, *means)
    span = top - bottom or 1.0
    lines = [f"{what} in training, by step"]
    for row in range(height, 0, -1):
        low = bottom + span * (row - 1) / height
        cells = "".join("█" if mean > low else " " for mean in means)
        lines.append(f"{bottom + span * row / height:6.2f} │{cells}")
    lines.append(" " * 7 + "└" + "─" * columns)
    first, last = str(snapshot.steps[0].step), str(snapshot.steps[-1].step)
    lines.append(" " * 8 + first + last.rjust(max(1, columns - len(first))))
    return lines
