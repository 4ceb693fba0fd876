"""What another verifier would have changed, from old and new rewards alone.

Means and rates before and after are taken over the same trajectories, those that have
both rewards; groups are compared only if all their trajectories were scored again, because signal
and advantage (Dr. GRPO, arXiv 2503.20783, section 3.2: reward minus the group's mean; a division by
the standard deviation changes no sign) are properties of whole groups.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dora.core.groups import has_signal
from dora.schemas.records import Purpose

REASONS_KEPT = 10
_NEARLY_ZERO = 1e-12


@dataclass(frozen=True, slots=True)
class Rescored:
    """A trajectory's old and new reward. `old` is None where live scoring failed; `new` is None
    where scoring failed now, with `code` and `reason` as live scoring gives them."""

    trajectory: str
    group: str
    version: int
    purpose: Purpose
    old: float | None
    new: float | None
    code: str | None = None
    reason: str | None = None

    @property
    def change(self) -> float:
        """New minus old reward; 0 if one is missing."""
        return 0.0 if self.old is None or self.new is None else self.new - self.old


@dataclass(frozen=True, slots=True)
class Means:
    """Reward and success rate before and after, over the `both` trajectories with both rewards.

    All are 0 where there is none. `label` is a purpose, or a version's number.
    """

    label: str
    both: int
    reward_before: float
    reward_after: float
    success_before: float
    success_after: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Trajectories that could not be scored for one reason."""

    code: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class GroupChanges:
    """Training groups, of which those with all trajectories at hand are `compared`.

    A group has signal if its rewards differ (else it is filtered, or trains nothing); one with a
    failed score is set aside, and counts as `failed_before` or `failed_after` instead.
    `advantages_turned` counts trajectories, in groups that failed neither time, whose advantage
    changes from positive to negative or back; `advantages_changed` those whose sign changes at all,
    zero included.
    """

    compared: int
    incomplete: int
    signal_before: int
    signal_after: int
    signal_gained: int
    signal_lost: int
    failed_before: int
    failed_after: int
    advantages_turned: int
    advantages_changed: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that changed. `up`, `down` and `unchanged` count trajectories with both rewards,
    `newly_failed` those that only had one before and `newly_scored` those that only have one now;
    `to_success` and `to_failure` those that cross the threshold."""

    trajectories: int
    threshold: float
    up: int
    down: int
    unchanged: int
    newly_failed: int
    newly_scored: int
    failed_twice: int
    to_success: int
    to_failure: int
    by_purpose: tuple[Means, ...]
    by_version: tuple[Means, ...]
    groups: GroupChanges
    failures: tuple[Failure, ...]

    @property
    def identical(self) -> bool:
        """Whether every trajectory came to the same reward, or to none again."""
        return self.unchanged + self.failed_twice == self.trajectories


def compare(
    scores: Sequence[Rescored], *, threshold: float, group_sizes: Mapping[str, int]
) -> Comparison:
    """Compare old and new rewards.

    `threshold` is the least reward of a success; `group_sizes` says how many trajectories each
    group has. `by_version` is over training trajectories, or over all where there are none.
    """
    both = [s for s in scores if s.old is not None and s.new is not None]
    purposes = [(p, [s for s in scores if s.purpose == p]) for p in ("train", "eval")]
    trained = [s for s in scores if s.purpose == "train"] or list(scores)
    versions: dict[int, list[Rescored]] = {}
    for score in trained:
        versions.setdefault(score.version, []).append(score)
    return Comparison(
        trajectories=len(scores),
        threshold=threshold,
        up=sum(s.change > 0 for s in both),
        down=sum(s.change < 0 for s in both),
        unchanged=sum(s.change == 0 for s in both),
        newly_failed=sum(s.old is not None and s.new is None for s in scores),
        newly_scored=sum(s.old is None and s.new is not None for s in scores),
        failed_twice=sum(s.old is None and s.new is None for s in scores),
        to_success=sum(_crosses(s.old, s.new, threshold) for s in both),
        to_failure=sum(_crosses(s.new, s.old, threshold) for s in both),
        by_purpose=tuple(_means(purpose, each, threshold) for purpose, each in purposes if each),
        by_version=tuple(_means(str(v), versions[v], threshold) for v in sorted(versions)),
        groups=_groups(scores, group_sizes),
        failures=_failures(scores),
    )


def largest_changes(scores: Iterable[Rescored], count: int) -> list[Rescored]:
    """The `count` trajectories whose reward changes most, those newly without or with one first;
    unchanged ones are left out. Ties stay in their order."""

    def weight(score: Rescored) -> float:
        return math.inf if (score.old is None) != (score.new is None) else abs(score.change)

    changed = [score for score in scores if weight(score) > 0]
    return sorted(changed, key=weight, reverse=True)[:count]


def spread_groups(sizes: Mapping[str, int], limit: int) -> set[str]:
    """Whole groups, evenly spread over `sizes`, with at most `limit` trajectories in all (but at
    least one group)."""
    names = list(sizes)
    count = len(names)
    while True:
        chosen = {names[i * len(names) // count] for i in range(count)}
        total = sum(sizes[name] for name in chosen)
        if total <= limit or count <= 1:
            return chosen
        count = max(1, min(count - 1, count * limit // total))


def merge_versions(versions: Sequence[Means], rows: int) -> list[Means]:
    """At most `rows` means, of about equally many consecutive versions each; labels are ranges."""
    count = min(rows, len(versions))
    ends = [row * len(versions) // count for row in range(1, count + 1)]
    return [_merged(versions[begin:end]) for begin, end in pairwise([0, *ends])]


def _merged(part: Sequence[Means]) -> Means:
    both = sum(means.both for means in part)

    def mean(field: str) -> float:
        return math.fsum(getattr(m, field) * m.both for m in part) / max(both, 1)

    return Means(
        part[0].label if len(part) == 1 else f"{part[0].label}-{part[-1].label}",
        both,
        mean("reward_before"),
        mean("reward_after"),
        mean("success_before"),
        mean("success_after"),
    )


def _crosses(before: float | None, after: float | None, threshold: float) -> bool:
    return before is not None and after is not None and before < threshold <= after


def _means(label: str, scores: Sequence[Rescored], threshold: float) -> Means:
    pairs = [(s.old, s.new) for s in scores if s.old is not None and s.new is not None]
    count = max(len(pairs), 1)
    return Means(
        label,
        len(pairs),
        math.fsum(old for old, _ in pairs) / count,
        math.fsum(new for _, new in pairs) / count,
        sum(old >= threshold for old, _ in pairs) / count,
        sum(new >= threshold for _, new in pairs) / count,
    )


def _failures(scores: Sequence[Rescored]) -> tuple[Failure, ...]:
    """The commonest reasons first; what is beyond REASONS_KEPT is added up by code."""
    failed = [(s.code or "failed", s.reason or "") for s in scores if s.new is None]
    ranked = Counter(failed).most_common()
    kept = [Failure(code, reason, count) for (code, reason), count in ranked[:REASONS_KEPT]]
    rest: Counter[str] = Counter()
    for (code, _), count in ranked[REASONS_KEPT:]:
        rest[code] += count
    return (*kept, *(Failure(code, "other reasons", n) for code, n in rest.most_common()))


def _groups(scores: Sequence[Rescored], sizes: Mapping[str, int]) -> GroupChanges:
    members: dict[str, list[Rescored]] = {}
    for score in scores:
        if score.purpose == "train":
            members.setdefault(score.group, []).append(score)
    whole = [m for group, m in members.items() if len(m) == sizes.get(group, len(m))]
    count: Counter[str] = Counter()
    for group in whole:
        before = [s.old for s in group if s.old is not None]
        after = [s.new for s in group if s.new is not None]
        failed_before, failed_after = len(before) < len(group), len(after) < len(group)
        count["failed_before"] += failed_before
        count["failed_after"] += failed_after
        had, has = not failed_before and has_signal(before), not failed_after and has_signal(after)
        count["signal_before"] += had
        count["signal_after"] += has
        count["gained"] += has and not had
        count["lost"] += had and not has
        if not failed_before and not failed_after:
            for old, new in zip(_signs(before), _signs(after), strict=True):
                count["turned"] += old * new < 0
                count["changed"] += old != new
    return GroupChanges(
        compared=len(whole),
        incomplete=len(members) - len(whole),
        signal_before=count["signal_before"],
        signal_after=count["signal_after"],
        signal_gained=count["gained"],
        signal_lost=count["lost"],
        failed_before=count["failed_before"],
        failed_after=count["failed_after"],
        advantages_turned=count["turned"],
        advantages_changed=count["changed"],
    )


def _signs(rewards: Sequence[float]) -> list[int]:
    """Signs of the advantages of a group; 0 where only rounding keeps a reward from the mean."""
    mean = math.fsum(rewards) / len(rewards)
    nearly_zero = _NEARLY_ZERO * max(map(abs, rewards))
    return [(r - mean > nearly_zero) - (mean - r > nearly_zero) for r in rewards]
