"""How the outcome of a rescoring is shown, to people and to programs.

Every count of the comparison stands in both forms; texts are shortened, and freed of
what would steer a terminal, for people only.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.console import print_table, visible
from dora.core.rescoring import Comparison, Means, Rescored, merge_versions

TREND_ROWS = 12
_TEXT_CHARACTERS = 400
_NOTES = 5


@dataclass(frozen=True, slots=True)
class Change:
    """A trajectory whose reward changes, with prompt and response."""

    score: Rescored
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a rescoring; see `Selection` for the trajectories that were not scored.

    `seconds` of the wall clock; `verifier_seconds` are those that the verifier took, over all
    processes. `notes` say what could not be read of the log.
    """

    run: str
    verifier: str
    recorded_verifier: str
    comparison: Comparison
    failed: int
    unfinished: int
    gone: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    processes: int
    verifier_seconds: float
    largest: tuple[Change, ...]

    @property
    def per_second(self) -> float:
        """Trajectories scored per second."""
        return self.comparison.trajectories / max(self.seconds, 1e-9)

    @property
    def seconds_per_score(self) -> float:
        """Mean time of a score; one that was stopped does not count."""
        return self.verifier_seconds / max(self.comparison.trajectories, 1)

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        data = dataclasses.asdict(self)
        comparison = data.pop("comparison")
        largest = [
            {**dataclasses.asdict(c.score), "prompt": c.prompt, "response": c.response}
            for c in self.largest
        ]
        return {
            **data,
            **comparison,
            "identical": self.comparison.identical,
            "per_second": self.per_second,
            "seconds_per_score": self.seconds_per_score,
            "largest": largest,
        }


def show(outcome: Outcome, console: Console) -> None:
    """Print for people."""
    c, groups = outcome.comparison, outcome.comparison.groups
    same = outcome.verifier == outcome.recorded_verifier
    before = "" if same else f" (before: {outcome.recorded_verifier})"
    console.print(
        Text.assemble(
            (f"run {outcome.run}", "bold"),
            f": {_count(c.trajectories, 'trajectory')} scored again with {outcome.verifier}{before}"
            f"\nin {outcome.seconds:.1f} s: {outcome.per_second:,.0f}/s with "
            f"{_count(outcome.processes, 'process')}, {_time(outcome.seconds_per_score)} each",
        )
    )
    for note in _left_out(outcome):
        console.print(Text.assemble(("note", "yellow"), f": {visible(note)}"))
    console.print()
    print_table(_summary(c), console)
    lines = [
        ("rewards", f"{c.up:,} up, {c.down:,} down, {c.unchanged:,} unchanged"),
        (
            "success",
            f"{c.to_success:,} become one (reward ≥ {c.threshold:g}), "
            f"{c.to_failure:,} are one no longer",
        ),
        (
            "failures",
            f"{c.newly_failed:,} new, {c.newly_scored:,} gone, {c.failed_twice:,} as before",
        ),
    ]
    if groups.compared:
        lines += [
            (
                "groups",
                f"of {groups.compared:,}, with signal {groups.signal_before:,} → "
                f"{groups.signal_after:,}: {groups.signal_gained:,} gain it, "
                f"{groups.signal_lost:,} lose it; set aside for a failed score "
                f"{groups.failed_before:,} → {groups.failed_after:,}",
            ),
            (
                "advantages",
                f"{groups.advantages_turned:,} turn their sign, "
                f"{groups.advantages_changed:,} change it (from or to zero included)",
            ),
        ]
    figures = Table.grid(padding=(0, 2))
    for name, text in lines:
        figures.add_row(name, text)
    console.print(figures)
    for failure in c.failures:
        console.print(
            Text.assemble(
                (f"  {failure.count:,} × {failure.code}", "red"), f": {visible(failure.reason)}"
            )
        )
    if len(c.by_version) > 1:
        print_table(_trend(c.by_version), console)
    if outcome.largest:
        console.print(Text("\nlargest changes", style="bold"))
    for change in outcome.largest:
        _show_change(change, console)
    if c.identical:
        console.print(Text("nothing changes: every reward is the same", style="bold green"))


def _left_out(outcome: Outcome) -> list[str]:
    notes = list(outcome.notes[:_NOTES])
    if len(outcome.notes) > _NOTES:
        notes.append(f"and {len(outcome.notes) - _NOTES:,} more of that kind (see --json)")
    if outcome.gone:
        names = ", ".join(outcome.gone[:5]) + (", ..." if len(outcome.gone) > 5 else "")
        notes.append(
            f"{_count(len(outcome.gone), 'trajectory')} that were trained are not in the log any "
            f"more: {names}"
        )
    if outcome.failed:
        notes.append(f"{_count(outcome.failed, 'trajectory')} without a response: not generated")
    if outcome.unfinished:
        notes.append(f"{_count(outcome.unfinished, 'trajectory')} not finished")
    if outcome.comparison.groups.incomplete:
        notes.append(
            f"{_count(outcome.comparison.groups.incomplete, 'group')} lack trajectories and are "
            "not compared as groups"
        )
    return notes


def _summary(c: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    for name in ("trajectories", "before", "after", ""):
        table.add_column(name, justify="right")
    for means in c.by_purpose:
        what = "training" if means.label == "train" else "held-out"
        old, new = means.reward_before, means.reward_after
        cells = (f"{what} reward", f"{means.both:,}", f"{old:.4f}", f"{new:.4f}")
        table.add_row(*cells, _signed(new - old, "+.4f"))
        old, new = means.success_before, means.success_after
        cells = (f"{what} success", "", f"{old:.1%}", f"{new:.1%}")
        table.add_row(*cells, _signed(100 * (new - old), "+.1f"))
    return table


def _trend(versions: Sequence[Means]) -> Table:
    table = Table(box=None, padding=(0, 2), title="by version", title_justify="left")
    for name in ("version", "trajectories", "reward", "success", ""):
        table.add_column(
            name, justify="right" if name in ("version", "trajectories") else "left", no_wrap=True
        )
    for means in merge_versions(versions, TREND_ROWS):
        change = means.success_after - means.success_before
        marks = ("+" if change > 0 else "-") * round(10 * abs(change))
        table.add_row(
            means.label,
            f"{means.both:,}",
            f"{means.reward_before:.3f} → {means.reward_after:.3f}",
            f"{means.success_before:.1%} → {means.success_after:.1%}",
            Text(marks, style="green" if change > 0 else "red"),
        )
    return table


def _show_change(change: Change, console: Console) -> None:
    score = change.score
    new = f"{score.new:g}" if score.new is not None else f"{score.code}: {score.reason}"
    old = "none" if score.old is None else f"{score.old:g}"
    console.print(
        Text.assemble(
            (score.trajectory, "bold"),
            f" (version {score.version}): {old} → ",
            (visible(new), "green" if score.change > 0 else "red"),
        )
    )
    for name, text in (("prompt", change.prompt), ("response", change.response)):
        if text:
            console.print(Text(f"  {name:8}  {_shortened(text)}"), soft_wrap=True)


def _shortened(text: str) -> str:
    """Begin and end of a text, on one line."""
    flat = visible(text.replace("\n", "⏎"))
    half = _TEXT_CHARACTERS // 2
    return flat if len(flat) <= _TEXT_CHARACTERS else f"{flat[:half]} … {flat[-half:]}"


def _signed(change: float, form: str) -> Text:
    return Text(format(change, form), style="green" if change > 0 else "red" if change < 0 else "")


def _count(number: int, noun: str) -> str:
    plural = {"trajectory": "trajectories", "process": "processes"}.get(noun, f"{noun}s")
    return f"{number:,} {noun if number == 1 else plural}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
