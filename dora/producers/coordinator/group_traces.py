"""The traces of groups as the coordinator begins them.

Invariant: whatever is sent about a group names the group's one trace, and its admission as what it
follows from, in every coordinator of the run alike.
"""

from collections.abc import Iterable

from dora.schemas.records import Admission, Record
from dora.telemetry.tracer import Span, TraceContext, Value, admission_span, trace_of, tracer


class GroupTraces:
    """Traces of the run `run_id`, which is empty before it is known. `sampled`: whether the run's
    processes make spans."""

    def __init__(self, *, sampled: bool) -> None:
        self.run_id = ""
        self._sampled = sampled
        self._admission = admission_span()

    def header(self, group_id: str) -> str | None:
        """`traceparent` of what concerns the group; None for what concerns none."""
        if not group_id or not self.run_id:
            return None
        return str(self._context(group_id))

    def told(self, records: Iterable[Record], began_ms: int, now_ms: int) -> None:
        """These were decided from `began_ms` on and are committed now (Unix time)."""
        if not tracer().active:
            return
        for record in records:
            if isinstance(record, Admission):
                facts: dict[str, Value] = {
                    "group": record.group_id,
                    "ordinal": record.ordinal,
                    "version": record.policy_version,
                    "purpose": record.purpose,
                }
                context = self._context(record.group_id)
                tracer().tell(Span("admission", context, "", began_ms, now_ms, facts))

    def _context(self, group_id: str) -> TraceContext:
        return TraceContext(trace_of(self.run_id, group_id), self._admission, self._sampled)
