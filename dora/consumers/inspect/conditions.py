"""Conditions on trajectories, as people write them: `reward<0.5`, `text~regex`, `finish=length`.

A condition is data. Nothing that a person writes is run as a program, and one that makes
no sense is refused with what there is.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dora.consumers.inspect.rows import Row
from dora.errors import UsageError

NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "reward": lambda row: row.reward,
    "length": lambda row: row.length,
    "version": lambda row: row.version,
    "step": lambda row: row.fate.step,
    "staleness": lambda row: row.fate.staleness,
    "attempts": lambda row: row.attempts,
    "sample": lambda row: row.sample,
    "ordinal": lambda row: row.ordinal,
    "logprob": lambda row: row.logprob,
    "mismatch": lambda row: row.mismatch,
}
"""Fields that are compared as numbers."""
TEXTS: dict[str, Callable[[Row], str | None]] = {
    "id": lambda row: row.id,
    "group": lambda row: row.group,
    "purpose": lambda row: row.purpose,
    "state": lambda row: row.fate.state,
    "reason": lambda row: row.fate.reason,
    "finish": lambda row: row.finish,
    "worker": lambda row: row.worker,
    "engine": lambda row: row.engine,
    "error": lambda row: row.error,
    "text": lambda row: row.text,
}
"""Fields that are compared as texts."""
NONE = "none"
"""Stands for no value: `reward=none`."""
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WRITTEN = re.compile(r"\s*(\w+)\s*(==|!=|<=|>=|!~|=|<|>|~)\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; a trajectory without a value for `field` meets `!=` and `!~` alone."""

    field: str
    sign: str
    wanted: float | str | re.Pattern[str] | None

    def holds(self, row: Row) -> bool:
        """Whether `row` meets it."""
        found = (NUMBERS.get(self.field) or TEXTS[self.field])(row)
        if isinstance(self.wanted, re.Pattern):
            hit = found is not None and self.wanted.search(str(found)) is not None
            return hit == (self.sign == "~")
        if found is None or self.wanted is None:
            same = found is None and self.wanted is None
            return same if self.sign == "=" else self.sign == "!=" and not same
        return _ORDER[self.sign](found, self.wanted)


def parse_condition(text: str) -> Condition:
    """The condition that `text` writes: FIELD SIGN VALUE. UsageError, with the known fields and
    signs, if it is none."""
    written = _WRITTEN.fullmatch(text)
    if written is None:
        raise _refused(text, "not of the form FIELD SIGN VALUE")
    name, sign, value = written.group(1), written.group(2), written.group(3).strip()
    sign = "=" if sign == "==" else sign
    if name not in NUMBERS and name not in TEXTS:
        raise _refused(text, f"there is no field {name}")
    if sign in ("~", "!~"):
        if name in NUMBERS:
            raise _refused(text, f"{name} is a number, which no pattern fits")
        try:
            return Condition(name, sign, re.compile(value, re.DOTALL))
        except re.error as error:
            raise _refused(text, f"{value!r} is no regular expression: {error}") from error
    if value.lower() == NONE:
        if sign not in ("=", "!="):
            raise _refused(text, f"{NONE} is compared with = and != alone")
        return Condition(name, sign, None)
    if name in TEXTS:
        if sign not in ("=", "!="):
            raise _refused(text, f"{name} is a text: compare it with =, !=, ~ or !~")
        return Condition(name, sign, value)
    try:
        number = float(value)
    except ValueError as error:
        raise _refused(text, f"{value!r} is no number") from error
    if math.isnan(number):
        raise _refused(text, f"{value} is no number; {NONE} stands for no value")
    return Condition(name, sign, number)


def all_hold(conditions: Sequence[Condition], row: Row) -> bool:
    """Whether `row` meets every condition."""
    return all(condition.holds(row) for condition in conditions)


def _refused(text: str, reason: str) -> UsageError:
    return UsageError(
        f"--filter {text!r}: {reason}",
        hint=f"Numbers, with = != < <= > >=: {', '.join(NUMBERS)}. Texts, with = != and, for "
        f"regular expressions, ~ !~: {', '.join(TEXTS)}. Give --filter several times for "
        "conditions that must all hold.",
    )
