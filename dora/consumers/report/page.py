"""The page of a report: what stands where.

The template escapes everything that comes from a log. The page loads nothing, and its size does not
grow with the run: long tables are cut and say so.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup

from dora import __version__
from dora.consumers.report import charts, svg
from dora.consumers.report.charts import curve, metric
from dora.consumers.report.data import (
    Difference,
    KeyNumbers,
    RunReport,
    VersionRow,
    differing,
    other_task,
)
from dora.consumers.report.svg import VERSIONS, Chart, compact, duration, integer, percent
from dora.core.audit.report import MEANINGS
from dora.log.incidents import EVENTS_KEPT, IncidentKind

VERSIONS_SHOWN = 400
LINES_SHOWN = 100

INCIDENT_LABELS: dict[IncidentKind, str] = {
    "takeover": "Takeovers of trajectories",
    "migration": "Migrations of trajectories",
    "superseded": "Superseded attempts",
    "trainer": "Trainer started anew or fenced",
    "coordinator": "Coordinator started anew or fenced",
    "worker": "Workers started anew",
    "fencing": "Workers told to make way",
    "failure": "Failed processes",
    "dead letter": "Dead letters",
    "set aside": "Groups set aside",
}


@dataclass(frozen=True, slots=True)
class Number:
    """A key number of each run, and the difference of two."""

    label: str
    values: tuple[str, ...]
    detail: str
    difference: str


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading."""

    identity: str
    title: str
    charts: tuple[Chart, ...]


def render(reports: Sequence[RunReport]) -> str:
    """The page of one run, or of two compared."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dora.consumers.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "compact": compact,
        "duration": duration,
        "integer": integer,
        "percent": percent,
        "bytes": svg.size,
        "moment": svg.moment,
        "chart": lambda chart: Markup(chart.svg),
        "paint": lambda version: VERSIONS[version % len(VERSIONS)],
    }
    environment.filters.update(filters)
    first, second = reports[0], reports[-1]
    compared = len(reports) > 1
    differences: list[Difference] = differing(first.config, second.config) if compared else []
    return environment.get_template("report.html.jinja").render(
        reports=reports,
        compared=compared,
        numbers=key_numbers([report.numbers for report in reports]),
        sections=sections(reports),
        timelines=_drawn(charts.timeline(r, n, compared) for n, r in enumerate(reports, start=1)),
        differences=differences,
        other_task=compared and other_task(first.config, second.config),
        versions_shown={report.run: shown_versions(report) for report in reports},
        lines_shown=LINES_SHOWN,
        events_kept=EVENTS_KEPT,
        incident_labels=INCIDENT_LABELS,
        meanings=MEANINGS,
        made_ms=time.time_ns() // 1_000_000,
        dora_version=__version__,
        version_names=VERSIONS,
    )


def sections(reports: Sequence[RunReport]) -> list[Section]:
    """The sections of charts that have something to show."""
    several = len(reports) > 1

    def line(identity: str, title: str, name: str, *, log: bool = False) -> Chart | None:
        return curve(reports, identity, title, metric(name), log=log)

    found = [
        Section(
            "learning",
            "Learning",
            _drawn(
                curve(
                    reports,
                    f"{name}-{'time' if over_time else 'steps'}",
                    f"{title} over {'wall time' if over_time else 'steps'}",
                    points,
                    held_out=held_out if any(map(held_out, reports)) else None,
                    over_time=over_time,
                    share=name == "success",
                )
                for name, title, points, held_out in (
                    ("success", "Success", lambda r: r.success, lambda r: r.evaluations),
                    ("reward", "Reward", lambda r: r.reward, lambda r: r.evaluation_rewards),
                )
                for over_time in (False, True)
            ),
        ),
        Section(
            "optimization",
            "Optimization",
            _drawn(
                (
                    line("loss", "Loss", "loss"),
                    line("gradient", "Gradient norm before clipping", "grad_norm"),
                    line("kl", "KL to the reference", "reference_kl"),
                    line("entropy", "Entropy estimate (nats)", "entropy"),
                    line("clip", "Share of clipped tokens", "clip_fraction"),
                )
            ),
        ),
        Section(
            "data",
            "What was trained on",
            _drawn(
                (
                    charts.staleness(reports),
                    charts.lengths(reports),
                    charts.tails(reports),
                    charts.mismatch(reports),
                    line("mismatch-kl", "KL of engine to trainer", "logprob_mismatch_kl", log=True),
                    line("drift", "Drift of older versions (nats)", "logprob_drift_mean"),
                )
            ),
        ),
        Section(
            "speed",
            "Speed",
            _drawn(
                (
                    charts.throughput(reports),
                    *(charts.times(r, n, several) for n, r in enumerate(reports, start=1)),
                )
            ),
        ),
    ]
    return [section for section in found if section.charts]


def _drawn(charts: Iterable[Chart | None]) -> tuple[Chart, ...]:
    return tuple(chart for chart in charts if chart is not None)


def key_numbers(numbers: Sequence[KeyNumbers]) -> list[Number]:
    """The numbers at the top."""
    sources = {each.success_source for each in numbers}
    where = "held-out prompts" if sources == {"evaluation"} else "training batches"
    where = where if len(sources) == 1 else "held-out prompts where evaluated"

    def row(
        label: str,
        value: Callable[[KeyNumbers], float | None],
        show: Callable[[float | None], str],
        detail: Callable[[KeyNumbers], str] = lambda _: "",
        *,
        points: bool = False,
    ) -> Number:
        values = [value(each) for each in numbers]
        difference = ""
        first, last = values[0], values[-1]
        if len(values) > 1 and first is not None and last is not None:
            apart = last - first
            sign = "+" if apart > 0 else "−" if apart < 0 else "±"
            size = f"{100 * abs(apart):.1f} points" if points else show(abs(apart))
            difference = f"{sign}{size}"
            if first and not points:
                difference += f" ({100 * apart / abs(first):+.1f} %)".replace("-", "−")
        return Number(label, tuple(map(show, values)), detail(numbers[0]), difference)

    return [
        row("Steps", lambda n: n.steps, integer, lambda n: f"{duration(n.step_seconds)} each"),
        row("Success first", lambda n: n.success_first, percent, lambda n: where, points=True),
        row("Success last", lambda n: n.success_last, percent, lambda n: where, points=True),
        row("Wall time", lambda n: n.wall_seconds, duration),
        row(
            "Trajectories",
            lambda n: n.trajectories,
            integer,
            lambda n: f"{compact(n.response_length_mean)} tokens each",
        ),
        row(
            "Tokens/s",
            lambda n: n.tokens_per_second,
            compact,
            lambda n: f"{compact(n.tokens)} in all",
        ),
        row(
            "Largest staleness",
            lambda n: n.max_staleness,
            integer,
            lambda n: f"bound {n.staleness_bound}, mean {compact(n.staleness_mean)}",
        ),
        row(
            "Trainer waited",
            lambda n: n.trainer_idle_share,
            percent,
            lambda n: "of its time",
            points=True,
        ),
        row(
            "Groups trained",
            lambda n: n.groups_trained,
            integer,
            lambda n: (
                f"{integer(n.groups_set_aside)} set aside"
                + (f", {n.set_aside_reason}" if n.set_aside_reason else "")
            ),
        ),
        row(
            "Truncated",
            lambda n: n.truncated_share,
            percent,
            lambda n: "of trained responses",
            points=True,
        ),
        row(
            "Unscored",
            lambda n: n.unscored_share,
            percent,
            lambda n: f"dead letters, {n.dead_letter_reason}" if n.dead_letter_reason else "",
            points=True,
        ),
        row("Live versions", lambda n: n.live_versions_max, integer, lambda n: "most at once"),
        row(
            "Mismatch",
            lambda n: n.logprob_mismatch_mean,
            compact,
            lambda n: "nats, engine to trainer",
        ),
        row(
            "Takeovers",
            lambda n: n.takeovers,
            integer,
            lambda n: f"{integer(n.migrations)} migrations",
        ),
    ]


def shown_versions(report: RunReport) -> list[VersionRow]:
    """The first and the newest versions where there are too many for a table."""
    rows = list(report.versions)
    if len(rows) <= VERSIONS_SHOWN:
        return rows
    head = VERSIONS_SHOWN // 8
    return [*rows[:head], *rows[-(VERSIONS_SHOWN - head) :]]
