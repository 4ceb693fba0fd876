"""Reports of committed ledger entries to metrics, trackers, lineage and traces."""

from collections.abc import Iterable

from dora.config import Config
from dora.core.ring import trajectory_id
from dora.schemas.records import GroupRef, RunStarted, Step
from dora.telemetry.lineage import lineage_of
from dora.telemetry.meter import meter
from dora.telemetry.tracer import (
    Span,
    TraceContext,
    admission_span,
    scoring_span,
    trace_of,
    tracer,
    training_span,
)
from dora.telemetry.trackers import Trackers


class StepReports:
    """Reports to everything that the configuration names, without holding the trainer up."""

    def __init__(self, config: Config) -> None:
        self._trackers = Trackers(config)
        self._lineage = lineage_of(config)
        self._run_id = ""

    def begin(self, started: RunStarted, recent: Iterable[Step], newest: int) -> None:
        """The trainer goes on after step `newest`; `recent` are the last entries of the ledger."""
        self._run_id = started.run_id
        steps = list(recent)
        self._trackers.begin(started, steps, newest)
        self._lineage.begin(started, steps, newest)

    def committed(self, step: Step) -> None:
        """An entry is in the ledger."""
        meter().on_step(step)
        if step.kind == "step":
            self._trackers.step(step)
            self._lineage.step(step)
        if tracer().active:
            for span in spans_of(step, self._run_id):
                tracer().emit(span)

    def close(self) -> None:
        """Log what is left, for a bounded time."""
        self._trackers.close()
        self._lineage.close()


def spans_of(step: Step, run_id: str) -> list[Span]:
    """The entry's span in the trace of each of its groups."""
    seconds = step.metrics.get("train_seconds", 0.0) + step.metrics.get("publish_seconds", 0.0)
    began = step.created_ms - 1000.0 * seconds
    spans = [_span("training step", ref, step, run_id, began) for ref in step.trained]
    return spans + [_span("set aside", r, step, run_id, step.created_ms) for r in step.set_aside]


def _span(name: str, ref: GroupRef, step: Step, run_id: str, began_ms: float) -> Span:
    context = TraceContext(trace_of(run_id, ref.group_id), training_span(ref.group_id), True)
    links = [
        context.at(scoring_span(trajectory_id(ref.group_id, each.sample), each.attempt))
        for each in ref.samples
    ]
    attributes: dict[str, str | int] = {
        "group": ref.group_id,
        "step": step.version_out,
        "version": ref.version,
        "staleness": step.version_in - ref.version,
    }
    if ref.reason is not None:
        attributes["reason"] = ref.reason
    return Span(name, context, admission_span(), began_ms, step.created_ms, attributes, links=links)
