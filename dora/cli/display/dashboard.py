"""`dora status --watch`: a run on one screen, as large as the terminal.

The picture never has more lines or columns than it is given, and says nothing by colour
alone. It is a function of a `Snapshot` and of the size. What matters most has its lines first.
"""

import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dora.cli.display.charts import bar, chart, to_ascii
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
from dora.consumers.monitor.snapshot import Snapshot
from dora.log.incidents import RecentIncident
from dora.log.presence import ProcessView

TWO_COLUMNS_FROM = 120
_GAP = 2
_TALLEST_CHART = 7
_STYLES = {
    "takeover": "yellow",
    "move": "cyan",
    "taken back": "cyan",
    "failed": "bold red",
    "dead letter": "red",
    "set aside": "magenta",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the picture: it makes do with `least` lines, gets `fair` before any other gets
    more, and can use `wanted`; `draw(width, lines)` fills at most as many as it is given."""

    least: int
    fair: int
    wanted: int
    draw: Callable[[int, int], list[Text]]


_EMPTY = Section(0, 0, 0, lambda width, lines: [])


@dataclass(frozen=True, slots=True)
class Dashboard:
    """The picture for `rich`, in the size of the console."""

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        for line in picture(self.snapshot, options.max_width, height):
            yield to_ascii(line) if options.ascii_only else line


def picture(snapshot: Snapshot, width: int, height: int) -> list[Text]:
    """At most `height` lines of at most `width` cells."""
    top = [_headline(snapshot, width), *_reasons(snapshot, max(1, height // 6))]
    room = max(0, height - len(top))
    charts, figures, window = _charts(snapshot), _figures(snapshot), _window(snapshot)
    processes, incidents = _processes(snapshot), _incidents(snapshot)
    if width < TWO_COLUMNS_FROM:
        body = _column([charts, figures, window, processes, incidents], width, room)
    else:
        left_width = (width - _GAP) // 2
        right_width = width - _GAP - left_width
        left = _column([charts, figures, window], left_width, room)
        right = _column([processes, incidents], right_width, room)
        body = _side_by_side(left, right, left_width)
    lines = [*top, *body][:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def write_svg(snapshot: Snapshot, width: int, height: int) -> str:
    """The picture as SVG that refers to nothing outside itself."""
    console = Console(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        _environ={},
    )
    console.print(Dashboard(snapshot))
    svg = console.export_svg(title=f"dora status {snapshot.run} --watch")
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)


def _column(sections: Sequence[Section], width: int, room: int) -> list[Text]:
    """The sections one below the other; lines that are to spare go to those that come first."""
    given = [section.least for section in sections]
    while sum(given) > room:
        last = max(index for index, lines in enumerate(given) if lines)
        given[last] = max(0, given[last] - (sum(given) - room))
    for index, section in enumerate(sections):
        given[index] += max(0, min(section.fair - given[index], room - sum(given)))
    between = min(max(0, sum(map(bool, given)) - 1), room - sum(given))
    for index, section in enumerate(sections):
        given[index] += max(0, min(section.wanted - given[index], room - between - sum(given)))
    drawn = [
        section.draw(width, lines)[:lines]
        for section, lines in zip(sections, given, strict=True)
        if lines
    ]
    blank = room - sum(map(len, drawn))
    lines: list[Text] = []
    for part in filter(None, drawn):
        if lines and blank > 0:
            lines.append(Text(""))
            blank -= 1
        lines += part
    return lines


def _list_of(lines: int, least: int, fair: int, draw: Callable[[int, int], list[Text]]) -> Section:
    """A list that has `lines` lines in all."""
    return Section(min(least, lines), min(fair, lines), lines, draw)


def _side_by_side(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    lines = []
    for index in range(max(len(left), len(right))):
        line = left[index].copy() if index < len(left) else Text("")
        line.truncate(left_width, overflow="ellipsis", pad=True)
        line.append(" " * _GAP)
        if index < len(right):
            line.append_text(right[index])
        lines.append(line)
    return lines


def _headline(snapshot: Snapshot, width: int) -> Text:
    text = headline(snapshot)
    total = snapshot.steps_target
    if not total:
        return text.append(f"  {snapshot.step} steps" if snapshot.newest >= 0 else "")
    text.append(f"  step {snapshot.step}/{total} ")
    to_go = time_to_go(snapshot)
    room = min(40, width - text.cell_len - len(to_go) - 1)
    if room > 4:
        text.append_text(bar([(snapshot.step / total, "green")], room))
    return text.append(f" {to_go}")


def _reasons(snapshot: Snapshot, most: int) -> list[Text]:
    lines = trouble_lines(snapshot)
    lines += problem_lines(snapshot, 2)
    if len(lines) > most:
        hidden = len(lines) - most + 1
        lines = [*lines[: most - 1], Text(f"  ... and {hidden} more lines", style="dim")]
    return lines


def _charts(snapshot: Snapshot) -> Section:
    named = [("success", "success_rate", "green"), ("reward", "reward_mean", "blue"),
             ("loss", "loss", "magenta")]  # fmt: skip
    series = [
        (label, [p.metrics[key] for p in snapshot.steps if key in p.metrics], style)
        for label, key, style in named
    ]
    shown = [each for each in series if each[1]]

    def draw(width: int, lines: int) -> list[Text]:
        each = max(1, lines // len(shown))
        each = 1 if each == 2 else each  # a heading and one line say no more than one line
        drawn = []
        for label, values, style in shown[:lines]:
            top = 1.0 if label == "success" else None
            drawn += chart(label, values, width, each, style, low=0.0 if top else None, high=top)
        return drawn

    if not shown:
        return _EMPTY
    return Section(len(shown), len(shown), _TALLEST_CHART * len(shown), draw)


def _figures(snapshot: Snapshot) -> Section:
    says = figures(snapshot)
    rows = [["generated", "trained", "idle"], ["stale", "mismatch"], ["truncated", "unscored"],
            ["held-out"], ["amount"],
            ["aside", "dead", "ignored"]]  # fmt: skip
    if not any(point.scored for point in snapshot.evaluations):
        rows.remove(["held-out"])
    lines = ["  ".join(says[name] for name in row) for row in rows]
    return Section(2, len(lines), len(lines), lambda width, room: [Text(line) for line in lines])


def _window(snapshot: Snapshot) -> Section:
    if not snapshot.versions:
        return _EMPTY
    scale = max(snapshot.groups_per_step, *(v.groups_outstanding for v in snapshot.versions), 1)
    head = Text(window_title(snapshot), style="bold")

    def draw(width: int, lines: int) -> list[Text]:
        rows = [head]
        versions = list(snapshot.versions)
        hidden = len(versions) - (lines - 1)
        if hidden > 0:
            versions = versions[hidden:]  # the newest
            rows = [
                head.copy().append(f"; versions from v{versions[0].version}" if versions else "")
            ]
        for v in versions:
            finished = v.groups_outstanding - v.groups_unfinished
            text = Text(f"v{v.version:<5}")
            text.append_text(
                bar(
                    [(finished / scale, "green"), (v.groups_unfinished / scale, "yellow")],
                    max(8, min(30, width // 4)),
                )
            )
            text.append(
                f" {v.groups_outstanding} groups, {finished} done; "
                f"{v.trajectories_unfinished} to go"
            )
            if v.evaluation_unfinished:
                text.append(f", {v.evaluation_unfinished} held-out")
            text.append(f"; {v.workers} worker{'' if v.workers == 1 else 's'}")
            rows.append(text)
        return rows

    return _list_of(1 + len(snapshot.versions), 3, 6, draw)


def _processes(snapshot: Snapshot) -> Section:
    processes = snapshot.processes
    if not processes:
        return _EMPTY
    # those that need looking at come first where not all fit
    urgent = sorted(processes, key=lambda p: (p.role == "rollout", p.alive, p.process))
    names = min(20, max(len(p.process) for p in processes))

    def draw(width: int, lines: int) -> list[Text]:
        if lines > len(processes):
            chosen: Sequence[ProcessView] = processes
        else:
            chosen = urgent[: max(0, lines - 2)]
        head = f"{'process':{names}}  {'state':8}  {'version':7}  {'running':18}  {'tok/s':>7}"
        rows = [Text(head, style="bold")]
        rows += [_process(process, names) for process in chosen]
        rest = [process for process in processes if process not in chosen]
        if rest:
            alive = sum(process.alive for process in rest)
            rate = sum(p.metrics.get("tokens_per_second", 0.0) for p in rest if p.alive)
            rows.append(
                Text(f"and {len(rest)} more, {alive} alive: {rate:,.0f} tok/s", style="dim")
            )
        return rows

    return _list_of(1 + len(processes), 5, 9, draw)


def _process(process: ProcessView, names: int) -> Text:
    state = shown_state(process)
    text = Text(f"{process.process[:names]:{names}}  ")
    shown = state_text(state)
    shown.truncate(8, pad=True)
    text.append_text(shown)
    version = f"v{process.version}" if process.version >= 0 else ""
    text.append(f"  {version:7}  ")
    if process.capacity:
        load = f"{process.running}/{process.capacity}"
        text.append_text(bar([(process.running / process.capacity, "cyan")], 8))
        text.append(f" {load:9}")
    else:
        text.append(" " * 18)
    rate = process.metrics.get("tokens_per_second")
    text.append(f"  {rate:7,.0f}" if rate is not None and process.alive else " " * 9)
    if state in ("silent", "quiet"):
        style = "red" if state == "silent" else "yellow"
        text.append(f"  not heard for {duration(process.age_seconds)}", style=style)
    if process.message:
        text.append(f"  {process.message}")
    return text


def _incidents(snapshot: Snapshot) -> Section:
    merged = merge(snapshot.incidents)
    if not merged:
        return _EMPTY

    def draw(width: int, lines: int) -> list[Text]:
        rows = [Text("recent incidents", style="bold")]
        for incident, count in merged[-(lines - 1) :] if lines > 1 else []:
            moment = time.strftime("%H:%M:%S", time.localtime(incident.time_ms / 1000))
            more = f" and {count - 1} more" if count > 1 else ""
            where = f" {incident.process}" if incident.process else ""
            about = f" {incident.subject}{more}" if incident.subject else more
            rows.append(
                Text.assemble(
                    (f"{moment} ", "dim"),
                    (incident.kind, _STYLES.get(incident.kind, "")),
                    f"{where}{about}" + (f": {incident.text}" if incident.text else ""),
                )
            )
        return rows

    return _list_of(1 + len(merged), 3, 5, draw)


def merge(incidents: Sequence[RecentIncident]) -> list[tuple[RecentIncident, int]]:
    """Incidents of one kind and process that follow one another for one reason, as one."""

    def same(incident: RecentIncident) -> tuple[str, str, str]:
        # what an attempt goes on from differs from one to the next
        text = "" if incident.kind == "takeover" else incident.text
        return incident.kind, incident.process, text

    return [(each[0], len(each)) for _, group in groupby(incidents, same) if (each := list(group))]
