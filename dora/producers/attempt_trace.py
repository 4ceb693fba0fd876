"""An attempt as the trace of its group tells it: dispatch, generation with its chunks, scoring.

Invariant: chunks and trajectory name their spans in their headers whether or not spans are made,
so that who reads them can go on with the trace.
"""

from typing import TYPE_CHECKING

from dora.schemas.records import Chunk, Command
from dora.telemetry.trace_ids import TraceContext, dispatch_span, generation_span, scoring_span
from dora.telemetry.tracer import Event, Span, Value, tracer

if TYPE_CHECKING:
    from dora.producers.generation import Attempt

MOST_EVENTS = 256
"""Chunks of an attempt that its span tells of."""


class AttemptTrace:
    """The trace of the attempt that `command` starts; `context` stands in the command's header."""

    def __init__(self, command: Command, context: TraceContext, worker: str) -> None:
        identity, attempt = command.trajectory_id, command.attempt
        self._dispatch = context.at(dispatch_span(identity, attempt))
        self._generation = context.at(generation_span(identity, attempt))
        self._scoring = context.at(scoring_span(identity, attempt))
        self._commanded_by = context.span
        self._facts: dict[str, Value] = {
            "trajectory": identity,
            "attempt": attempt,
            "worker": worker,
            "version": command.policy_version,
        }
        self._events: list[Event] = []
        self.of_chunks = str(self._generation)
        """Header of the attempt's chunks."""
        self.of_trajectory = str(self._scoring)
        """Header of its trajectory."""

    def chunk(self, chunk: Chunk) -> None:
        """A chunk is written."""
        if tracer().active and len(self._events) < MOST_EVENTS:
            facts = {"sequence": chunk.sequence, "tokens": len(chunk.token_ids) // 4}
            self._events.append(Event("chunk", chunk.created_ms, facts))

    def generated(self, attempt: "Attempt", now_ms: int, outcome: str) -> None:
        """The attempt's last token is there, or it ends without one (`outcome` says how)."""
        if not tracer().active:
            return
        begun = attempt.command.created_ms, attempt.started_ms
        dispatch = Span("dispatch", self._dispatch, self._commanded_by, *begun, self._facts)
        facts = {
            **self._facts,
            "tokens": len(attempt.tokens),
            "resumed_tokens": attempt.resumed,
            "outcome": outcome,
        }
        tracer().tell(dispatch)
        tracer().tell(
            Span(
                "generation", self._generation, self._dispatch.span, attempt.started_ms, now_ms,
                facts, events=tuple(self._events), error=attempt.error or "",
            )
        )  # fmt: skip
        self._events.clear()

    def scored(
        self, generated_ms: int, now_ms: int, reward: float | None, error: str | None
    ) -> None:
        """The trajectory is written."""
        if tracer().active:
            facts = self._facts if reward is None else {**self._facts, "reward": reward}
            tracer().tell(
                Span(
                    "scoring", self._scoring, self._generation.span, generated_ms, now_ms, facts,
                    error=error or "",
                )
            )  # fmt: skip
