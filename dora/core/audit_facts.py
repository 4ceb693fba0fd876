"""What an audit remembers of a group: compact, because it keeps every group of the run.

Invariant: a few hundred bytes a group and about 80 a trajectory, so a million trajectories fit well
below 2 GiB. Nothing here judges.
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from dora.core.audit_report import Place
from dora.core.audit_traces import Traces
from dora.schemas.records import GroupRef, Purpose, RunStarted

Versioned = Literal["trajectories", "chunks"]
Fate = Literal["open", "trained", "set aside"]

_REF = 4  # sample, attempt, partition, offset


@dataclass(slots=True)
class GroupFacts:
    """What journal, ledger and trajectories say of a group; -1 where they have not spoken."""

    purpose: Purpose = "train"
    ordinal: int = -1
    admitted: int = -1  # version of the admission
    size: int = -1
    journal_offset: int = -1
    fate: Fate = "open"
    entry: int = -1  # sequence of the ledger entry that names it
    entry_offset: int = -1
    version_in: int = -1
    named_version: int = -1
    refs: "array[int] | None" = None
    finished: int = 0  # bit per sample: its first valid record was seen
    found: int = 0  # bit per reference: its record was seen
    traces: Traces | None = None

    @property
    def version(self) -> int:
        """Version of the admission or, without one, as the ledger says."""
        return self.admitted if self.admitted >= 0 else self.named_version

    def name(self, ref: GroupRef) -> None:
        """Keep what a ledger entry says about the group's trajectories."""
        self.named_version = ref.version
        self.ordinal = ref.ordinal if self.ordinal < 0 else self.ordinal
        self.refs = array(
            "q",
            [
                value
                for sample in ref.samples
                for value in (sample.sample, sample.attempt, sample.partition, sample.offset)
            ],
        )

    def references(self) -> list[tuple[int, int, int, int]]:
        """Sample, attempt, partition and offset of each reference."""
        refs = self.refs
        if refs is None:
            return []
        return [
            (refs[at], refs[at + 1], refs[at + 2], refs[at + 3]) for at in range(0, len(refs), _REF)
        ]

    def reference(self, sample: int, partition: int, offset: int) -> int | None:
        """Index of the reference to this record of `sample`; -1 if only others of it are named."""
        refs = self.refs
        if refs is None:
            return None
        other: int | None = None
        # Samples are named in order unless the ledger is damaged: the first look hits.
        index: int
        for index in (sample, *range(len(refs) // _REF)):
            at = index * _REF
            if 0 <= at < len(refs) and refs[at] == sample:
                if refs[at + 2] == partition and refs[at + 3] == offset:
                    return index
                other = -1
        return other


@dataclass(slots=True)
class LogFacts:
    """What an audit knows of the whole log."""

    started: RunStarted | None = None
    opening: Place | None = None  # first record of the ledger
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    steps: int = 0  # entries of kind `step`
    sequence: int = 0  # due next in the ledger
    newest: int = 0  # version reached by the ledger
    checksums: dict[int, tuple[str, Place]] = field(default_factory=dict)  # steps by version_out
    policies: dict[int, tuple[str, Place]] = field(default_factory=dict)  # by version
    next_ordinal: int = 0
    gaps: list[tuple[int, int, Place]] = field(default_factory=list)  # first, last, who skipped
    trajectories: int = 0
    duplicates: int = 0
    begins: dict[tuple[Versioned, int], int] = field(default_factory=dict)
    dispatch: str = "dispatch"  # names of the topics
    ledger: str = "steps"
    finished: str = "trajectories"
