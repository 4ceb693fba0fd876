"""Which rows `dora inspect` lists.

The log is read once, and of each trajectory no more is kept than its row. The trainer's
log-probabilities are computed only for the rows that are shown, unless the choice of rows depends
on them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dora.cli.inspect.reading import Inspection
from dora.consumers.inspect.conditions import Condition, all_hold
from dora.consumers.inspect.rows import (
    GroupRow,
    Row,
    Scope,
    group_rows,
    rows_of,
    scope_of,
    sort_rows,
    unfinished,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which trajectories or groups are listed, and how. Conditions are about trajectories: a group
    is listed if they all hold for one of its trajectories. `limit` 0 is none."""

    groups: bool = False
    version: int | None = None
    step: int | None = None
    sort: str | None = None
    reverse: bool = False
    conditions: tuple[Condition, ...] = ()
    limit: int = 0

    @property
    def needs_mismatch(self) -> bool:
        """Whether the choice of rows depends on what is recomputed."""
        return self.sort == "mismatch" or any(c.field == "mismatch" for c in self.conditions)


@dataclass(frozen=True, slots=True)
class Listing:
    """The rows to show, of how many `matching` ones, and how many started trajectories within the
    versions and steps asked for are `unfinished` as far as the log goes."""

    rows: Sequence[Row] | Sequence[GroupRow]
    matching: int
    unfinished: int


def choose(inspection: Inspection, selection: Selection, *, recompute: bool) -> Listing:
    """The listing of `selection`; RunError if the run has no such version or step."""
    run = inspection.log
    scope = scope_of(run, selection.version, selection.step)
    rows, left = _matching(inspection, selection, scope)
    afterwards = recompute and not selection.needs_mismatch
    limit = selection.limit or None
    if not selection.groups:
        every = sort_rows(rows, selection.sort, reverse=selection.reverse)
        shown = every[:limit]
        return Listing(inspection.mismatches(shown) if afterwards else shown, len(every), left)
    groups = sort_rows(group_rows(run, rows), selection.sort, reverse=selection.reverse)
    chosen = groups[:limit]
    if afterwards:
        wanted = {group.id for group in chosen}
        scored = inspection.mismatches([row for row in rows if row.group in wanted])
        by_id = {group.id: group for group in group_rows(run, scored)}
        chosen = [by_id[group.id] for group in chosen]
    return Listing(chosen, len(groups), left)


def _matching(inspection: Inspection, selection: Selection, scope: Scope) -> tuple[list[Row], int]:
    """The rows that meet all conditions, or those of whole groups that have such a row; and how
    many trajectories are unfinished."""
    early = [c for c in selection.conditions if c.field != "mismatch"]
    found: Counter[str] = Counter()
    rows: list[Row] = []
    for row in rows_of(inspection.log, scope):
        found[row.group] += 1
        if selection.groups or all_hold(early, row):
            rows.append(row)
    if selection.groups:
        rows = _whole_groups(rows, early)
    if selection.needs_mismatch:
        rows = inspection.mismatches(rows)
        if selection.groups:
            rows = _whole_groups(rows, selection.conditions)
        else:
            rows = [row for row in rows if all_hold(selection.conditions, row)]
    return rows, unfinished(inspection.log, scope, found)


def _whole_groups(rows: Sequence[Row], conditions: Sequence[Condition]) -> list[Row]:
    wanted = {row.group for row in rows if all_hold(conditions, row)}
    return [row for row in rows if row.group in wanted]
