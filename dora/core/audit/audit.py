"""The audit: proves from the log alone that no rule was broken, or says which record breaks it.

The verdict depends on records only, never on gaps in offsets (transaction markers and
aborted records take offsets too). Violations are

- `lost`: a started group that is neither trained, nor set aside with a reason, nor outstanding and
  still within the window; a ledger entry that names a trajectory record or an admission that is not
  in the log; a prompt ordinal that was skipped; a trained trajectory of which a chunk is missing,
  whose chunks hold other tokens or log-probabilities, or which resumed a prefix that no attempt
  before it generated.
- `duplicated`: a group named by two ledger entries (or twice by one), an ordinal or a group
  admitted twice, a second record of a chunk of a trained trajectory.
- `mixed_version`: a counted trajectory that holds tokens of another version than its group's, or
  was generated under another; a ledger entry that gives a group another version than its admission;
  a chunk of another version than its group's.
- `mixed_prompt`: a trained group whose samples have different prompts, or a trained trajectory that
  an attempt generated or began for another prompt.
- `stale`: a group trained at a version more than `K` after its own, or before it.
- `incomplete_group`: a group trained with other than `G` samples, or with one of them twice.
- `torn_step`: ledger entries whose sequence or versions do not follow one another; a step that does
  not train `B` groups; a step without its policy or a policy without its step; a named sample
  that is not the first valid finished record of its trajectory.
- `checksum`: a step's weights checksum that differs from its policy's.

No violations: later finished records of a trajectory and chunks of attempts that do not count (a
worker believed dead that was only slow), finished records of another version that are not named,
groups outstanding within the window (the run may be alive), groups set aside, evaluation groups.
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from dora.core import identity, ring
from dora.core.audit.chunks import Traces
from dora.core.audit.report import AuditReport, Findings, Place
from dora.core.groups import misfit
from dora.schemas.records import (
    Admission,
    Chunk,
    GroupRef,
    Policy,
    Purpose,
    Record,
    RunStarted,
    Step,
    Trajectory,
)

# An audit keeps every group of the run: a few hundred bytes a group and about 80 a trajectory, so a
# million trajectories fit well below 2 GiB.

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
    prompt: str = ""  # hash of the prompt of the first trained sample that was seen

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


def verdict(facts: LogFacts, findings: Findings) -> AuditReport:
    """Judge what only the whole log can tell; adds to `findings` and changes no facts, so that an
    audit of a live run can be asked again."""
    counts: dict[Fate, int] = {"open": 0, "trained": 0, "set aside": 0}
    started, staleness, unchecked = 0, 0, 0
    for group_id, group in facts.groups.items():
        if group.purpose == "eval":
            if group.fate != "open":
                place = _entry(facts, group)
                sentence = f"{place} names the evaluation group {group_id}"
                findings.add("torn_step", sentence, place, ids=(group_id,))
            continue
        started += group.admitted >= 0
        if group.fate == "open":
            counts["open"] += _judge_open(facts, group_id, group, findings)
            continue
        counts[group.fate] += 1
        _judge_named(facts, group_id, group, findings)
        if group.fate == "trained":
            staleness = max(staleness, group.version_in - group.version)
            unchecked += _judge_trained(facts, group_id, group, findings)
    for first, last, place in facts.gaps:
        findings.add(
            "lost",
            f"prompt ordinals {first} to {last} were skipped",
            place,
            count=last - first + 1,
        )
    _judge_versions(facts, findings)
    if unchecked:
        findings.note(
            f"the chunks of {unchecked} trained trajectories cannot be checked: "
            "retention deleted the beginning of their partitions"
        )
    if findings.notes_omitted:
        findings.notes.append(f"{findings.notes_omitted} more notes")
    return AuditReport(
        run=facts.started.run if facts.started else "",
        steps=facts.steps,
        groups_started=started,
        groups_trained=counts["trained"],
        groups_set_aside=counts["set aside"],
        groups_outstanding=counts["open"],
        max_staleness=staleness,
        trajectories=facts.trajectories,
        duplicates_ignored=facts.duplicates,
        violations=findings.counts,
        findings=findings.sorted,
        notes=tuple(findings.notes),
    )


def _entry(facts: LogFacts, group: GroupFacts) -> Place:
    return Place(facts.ledger, 0, group.entry_offset)


def _judge_open(facts: LogFacts, group_id: str, group: GroupFacts, findings: Findings) -> bool:
    """Whether the group is outstanding; one that can never be trained any more is lost."""
    oldest = facts.newest - facts.started.max_staleness if facts.started else group.version
    if group.version < oldest:
        findings.add(
            "lost",
            f"group {group_id} of version {group.version} was started but neither trained nor "
            f"set aside, and version {oldest} is the oldest that still may be trained",
            Place(facts.dispatch, 0, group.journal_offset),
            ids=(group_id,),
        )
    return group.version >= oldest


def _judge_named(facts: LogFacts, group_id: str, group: GroupFacts, findings: Findings) -> None:
    entry = _entry(facts, group)
    if group.admitted < 0:
        sentence = f"ledger entry {group.entry} names group {group_id}, which never started"
        findings.add("lost", sentence, entry, ids=(group_id,))
    elif group.named_version != group.admitted:
        findings.add(
            "mixed_version",
            f"ledger entry {group.entry} gives group {group_id} version {group.named_version}, "
            f"but it was started under version {group.admitted}",
            entry,
            Place(facts.dispatch, 0, group.journal_offset),
            ids=(group_id,),
        )
    references = group.references()
    found = {ref[2:] for index, ref in enumerate(references) if group.found >> index & 1}
    for sample, _, partition, offset in references:
        if (partition, offset) in found:
            continue
        place = Place(facts.finished, partition, offset)
        begin = facts.begins.get(("trajectories", partition), 0)
        cause = f" (older than offset {begin} was deleted)" if offset < begin else ""
        name = ring.trajectory_id(group_id, sample)
        findings.add(
            "lost",
            f"ledger entry {group.entry} names {place} for {name}, "
            f"but no such record is there{cause}",
            entry,
            place,
            ids=(group_id, name),
        )


def _judge_trained(facts: LogFacts, group_id: str, group: GroupFacts, findings: Findings) -> int:
    """Judge staleness and chunks; returns how many trajectories' chunks cannot be checked."""
    staleness = group.version_in - group.version
    bound = facts.started.max_staleness if facts.started else staleness
    if not 0 <= staleness <= bound:
        findings.add(
            "stale",
            f"group {group_id} of version {group.version} is trained at version "
            f"{group.version_in}; {bound} versions behind are allowed",
            _entry(facts, group),
            ids=(group_id,),
        )
    unchecked = 0
    for sample, _, partition, offset in group.references():
        fault = group.traces.fault(sample) if group.traces else None
        if fault is None:
            continue
        if ("chunks", partition) in facts.begins:
            unchecked += 1
            continue
        name = ring.trajectory_id(group_id, sample)
        findings.add(
            "lost",
            f"trajectory {name}: {fault}",
            Place(facts.finished, partition, offset),
            ids=(group_id, name),
        )
    return unchecked


def _judge_versions(facts: LogFacts, findings: Findings) -> None:
    opening = () if facts.opening is None else (facts.opening,)
    if facts.started is None and (facts.sequence or facts.groups or facts.policies):
        sentence = "the ledger does not begin with the start of the run"
        findings.add("torn_step", sentence, *opening)
    if facts.started is not None and 0 not in facts.policies:
        findings.add("torn_step", "version 0 was never published", *opening, ids=("0",))
    for version, (checksum, place) in facts.checksums.items():
        policy = facts.policies.get(version)
        if policy is None:
            sentence = f"the step to version {version} has no policy record"
            findings.add("torn_step", sentence, place, ids=(str(version),))
        elif policy[0] != checksum:
            findings.add(
                "checksum",
                f"the step to version {version} says weights {checksum}, "
                f"its policy says {policy[0]}",
                place,
                policy[1],
                ids=(str(version),),
            )
    for version, (_, place) in facts.policies.items():
        if version != 0 and version not in facts.checksums:
            sentence = f"version {version} is published without a step that leads to it"
            findings.add("torn_step", sentence, place, ids=(str(version),))


class Audit:
    """Streams over a run's records with memory for a few facts per group.

    Feed every committed record, each partition in offset order and topics in this order: steps and
    policies (in any order between them), the admission journal, trajectories, chunks. For a live
    run, read in the order policies, steps, then of the policies that came meanwhile those of
    versions that the steps have reached; then a policy never seems to lack its step. Other records
    are ignored. Without `chunks` the chunks are not expected and not checked.
    """

    def __init__(self, *, chunks: bool = True) -> None:
        self._chunks = chunks
        self._findings = Findings()
        self._facts = LogFacts()

    @property
    def newest(self) -> int:
        """Newest version that the ledger has reached so far."""
        return self._facts.newest

    def begins(self, topic: Versioned, partition: int, offset: int) -> None:
        """The log of this partition begins at `offset` only: older records were deleted."""
        if offset > 0:
            self._facts.begins[topic, partition] = offset

    def unreadable(self, topic: str, partition: int, offset: int, reason: str) -> None:
        """A record that cannot be decoded; if the ledger needs it, it counts as missing."""
        self._findings.note(f"{Place(topic, partition, offset)} cannot be read: {reason}")

    def feed(self, record: Record, topic: str, partition: int, offset: int) -> None:
        """Take one record into account (see the class for the order)."""
        if isinstance(record, Chunk):  # by far the most
            self._chunk(record, topic, partition, offset)
            return
        place = Place(topic, partition, offset)
        match record:
            case Trajectory():
                self._facts.finished = topic
                self._trajectory(record, place)
            case Admission():
                self._facts.dispatch = topic
                self._admission(record, place)
            case Step():
                self._opens(place)
                self._step(record, place)
            case Policy():
                self._policy(record, place)
            case RunStarted():
                self._opens(place)
                self._run_started(record, place)
            case _:
                pass

    def _opens(self, place: Place) -> None:
        self._facts.ledger = place.topic
        if self._facts.opening is None:
            self._facts.opening = place

    def _run_started(self, started: RunStarted, place: Place) -> None:
        if self._facts.started is not None:
            self._findings.add("torn_step", f"{place} starts the run a second time", place)
            return
        if self._facts.sequence:
            self._findings.add("torn_step", f"{place} starts the run after its first step", place)
        self._facts.started = started
        if identity.schedule_of(started.identity) == "partial":
            self._findings.note(
                "the run has the schedule `partial`, which interrupts trajectories at each new "
                "version by design: C1 (one version per trajectory) does not hold in it"
            )

    def _policy(self, policy: Policy, place: Place) -> None:
        known = self._facts.policies.setdefault(policy.version, (policy.weights_checksum, place))
        if known[0] != policy.weights_checksum:
            self._findings.add(
                "torn_step",
                f"version {policy.version} is published twice with different weights",
                known[1],
                place,
                ids=(str(policy.version),),
            )

    def _step(self, step: Step, place: Place) -> None:
        number = f"ledger entry {step.sequence}"
        torn = []
        if step.sequence != self._facts.sequence:
            torn.append(f"{number} comes where {self._facts.sequence} is due")
        due = self._facts.newest + 1 if step.kind == "step" else self._facts.newest
        if (step.version_in, step.version_out) != (self._facts.newest, due):
            torn.append(
                f"{number} ({step.kind}) leads from version {step.version_in} to "
                f"{step.version_out} where {self._facts.newest} to {due} is due"
            )
        started = self._facts.started
        batch = started.groups_per_step if started else len(step.trained)
        short = started is not None and identity.ends_early(started.identity)
        most = batch if step.kind == "step" else 0
        fewest = min(1, most) if short else most
        if not fewest <= len(step.trained) <= most:
            torn.append(f"{number} ({step.kind}) trains {len(step.trained)} groups, B is {batch}")
        for sentence in torn:
            self._findings.add("torn_step", sentence, place, ids=(str(step.sequence),))
        self._facts.sequence = max(self._facts.sequence, step.sequence + 1)
        self._facts.newest = max(self._facts.newest, step.version_out)
        if step.kind == "step":
            self._facts.steps += 1
            self._facts.checksums.setdefault(step.version_out, (step.weights_checksum, place))
        for ref in step.trained:
            self._name(ref, step, "trained", place)
        for ref in step.set_aside:
            self._name(ref, step, "set aside", place)

    def _name(self, ref: GroupRef, step: Step, fate: Fate, place: Place) -> None:
        ids = (ref.group_id,)
        group = self._facts.groups.setdefault(ref.group_id, GroupFacts())
        if group.fate != "open":
            self._findings.add(
                "duplicated",
                f"group {ref.group_id} is {fate} by ledger entry {step.sequence}, "
                f"but was {group.fate} by entry {group.entry} already",
                Place(place.topic, place.partition, group.entry_offset),
                place,
                ids=ids,
            )
            return
        group.fate, group.entry, group.entry_offset = fate, step.sequence, place.offset
        group.version_in = step.version_in
        group.name(ref)
        if fate == "set aside":
            if not ref.reason:
                self._findings.add(
                    "lost", f"group {ref.group_id} is set aside without a reason", place, ids=ids
                )
            return
        samples = [sample.sample for sample in ref.samples]
        size = self._facts.started.group_size if self._facts.started else len(samples)
        if sorted(samples) != list(range(size)):
            self._findings.add(
                "incomplete_group",
                f"group {ref.group_id} is trained with samples {samples} "
                f"instead of each of 0 .. {size - 1} once",
                place,
                ids=ids,
            )

    def _admission(self, admission: Admission, place: Place) -> None:
        group = self._facts.groups.setdefault(admission.group_id, GroupFacts())
        if group.admitted >= 0:
            self._findings.add(
                "duplicated",
                f"group {admission.group_id} is admitted twice",
                Place(place.topic, place.partition, group.journal_offset),
                place,
                ids=(admission.group_id,),
            )
            return
        group.purpose = admission.purpose
        group.ordinal, group.size = admission.ordinal, admission.group_size
        group.admitted, group.journal_offset = admission.policy_version, place.offset
        if admission.purpose == "train":
            self._ordinal(admission, place)

    def _ordinal(self, admission: Admission, place: Place) -> None:
        ordinal = admission.ordinal
        if ordinal >= self._facts.next_ordinal:
            if ordinal > self._facts.next_ordinal:
                self._facts.gaps.append((self._facts.next_ordinal, ordinal - 1, place))
            self._facts.next_ordinal = ordinal + 1
            return
        for index, (first, last, skipper) in enumerate(self._facts.gaps):
            if first <= ordinal <= last:  # only late: split the gap
                halves = [(first, ordinal - 1, skipper), (ordinal + 1, last, skipper)]
                self._facts.gaps[index : index + 1] = [
                    half for half in halves if half[0] <= half[1]
                ]
                return
        self._findings.add(
            "duplicated",
            f"prompt ordinal {ordinal} is admitted again as group {admission.group_id}",
            place,
            ids=(admission.group_id,),
        )

    def _valid(self, trajectory: Trajectory, group: GroupFacts, place: Place) -> bool:
        """Whether the record may count: right version, name and partition."""
        version, started = group.version, self._facts.started
        if version < 0:
            return False
        home = place.partition
        size = group.size if group.size >= 0 else trajectory.sample + 1
        if started is not None:
            home = ring.partition(version, trajectory.group_id, started.ring, started.lanes)
            size = group.size if group.size >= 0 else started.group_size
        return misfit(trajectory, version, size, place=place.partition, home=home) is None

    def _trajectory(self, trajectory: Trajectory, place: Place) -> None:
        self._facts.trajectories += 1
        group = self._facts.groups.get(trajectory.group_id)
        if group is None:
            return  # admitted after the journal was read
        reference = group.reference(trajectory.sample, place.partition, place.offset)
        named = reference is not None and reference >= 0
        valid = self._valid(trajectory, group, place)
        first = valid and not group.finished >> trajectory.sample & 1
        if first:
            group.finished |= 1 << trajectory.sample
        elif valid:
            self._facts.duplicates += 1
        if reference is not None and named:
            self._named_trajectory(trajectory, group, reference, valid, first, place)
        if named or (first and reference is None):
            self._version_runs(trajectory, group, place)

    def _named_trajectory(
        self,
        trajectory: Trajectory,
        group: GroupFacts,
        reference: int,
        valid: bool,
        first: bool,
        place: Place,
    ) -> None:
        attempt = group.references()[reference][1]
        group.found |= 1 << reference
        ids = (trajectory.group_id, trajectory.trajectory_id)
        says = f"ledger entry {group.entry} names {place} for {trajectory.trajectory_id}"
        if trajectory.policy_version != group.version:
            self._findings.add(
                "mixed_version",
                f"{says}, but it is of version {trajectory.policy_version} "
                f"and its group of version {group.version}",
                place,
                ids=ids,
            )
        elif not valid:
            self._findings.add(
                "torn_step", f"{says}, but its name or partition is not its group's", place, ids=ids
            )
        elif not first:
            self._findings.add(
                "torn_step", f"{says}, but an earlier finished record counts", place, ids=ids
            )
        if attempt != trajectory.attempt:
            self._findings.add(
                "torn_step",
                f"{says} as attempt {attempt}, but it is attempt {trajectory.attempt}",
                place,
                ids=ids,
            )
        if group.fate == "trained":
            group.prompt = group.prompt or trajectory.prompt_hash
            if trajectory.prompt_hash != group.prompt:
                self._findings.add(
                    "mixed_prompt",
                    f"{says}, whose prompt has the hash {trajectory.prompt_hash}; other samples of "
                    f"the group have {group.prompt}",
                    place,
                    ids=ids,
                )
        if self._chunks and group.fate == "trained":
            if group.traces is None:
                group.traces = Traces(len(group.references()))
            group.traces.expect(trajectory)

    def _version_runs(self, trajectory: Trajectory, group: GroupFacts, place: Place) -> None:
        runs = trajectory.version_runs
        if len(runs) > 1 or (runs and runs[0].version != group.version):
            parts = ", ".join(f"{run.tokens} tokens of version {run.version}" for run in runs)
            self._findings.add(
                "mixed_version",
                f"trajectory {trajectory.trajectory_id} of version {group.version} holds {parts}",
                place,
                ids=(trajectory.group_id, trajectory.trajectory_id),
            )

    def _chunk(self, chunk: Chunk, topic: str, partition: int, offset: int) -> None:
        group = self._facts.groups.get(chunk.group_id)
        if group is None or group.purpose == "eval" or not self._chunks:
            return
        if chunk.policy_version != group.version:
            place = Place(topic, partition, offset)
            self._findings.add(
                "mixed_version",
                f"{place} is a chunk of version {chunk.policy_version} of attempt {chunk.attempt} "
                f"at {chunk.trajectory_id}, whose group is of version {group.version}",
                place,
                ids=(chunk.group_id, chunk.trajectory_id),
            )
        if (
            group.traces is not None
            and chunk.prompt_hash not in ("", group.prompt)
            and group.traces.concerns(chunk)
        ):
            place = Place(topic, partition, offset)
            self._findings.add(
                "mixed_prompt",
                f"{place}, the first chunk of attempt {chunk.attempt} at {chunk.trajectory_id}, is "
                f"of a prompt with the hash {chunk.prompt_hash}; its group's is {group.prompt}",
                place,
                ids=(chunk.group_id, chunk.trajectory_id),
            )
        if group.traces is not None and not group.traces.see(chunk):
            place = Place(topic, partition, offset)
            self._findings.add(
                "duplicated",
                f"{place} is a second record of chunk {chunk.sequence} of attempt {chunk.attempt} "
                f"at {chunk.trajectory_id}",
                place,
                ids=(chunk.group_id, chunk.trajectory_id),
            )

    def report(self) -> AuditReport:
        """The verdict on what was fed so far; feeding may go on afterwards."""
        return verdict(self._facts, self._findings.copy())
