"""The end of an audit: what only the whole log can tell, and the counts.

Invariant: judging changes no facts, so an audit of a live run can be asked again and again. The
violations are defined in `core.audit`.
"""

from dora.core import ring
from dora.core.audit_facts import Fate, GroupFacts, LogFacts
from dora.core.audit_report import AuditReport, Findings, Place


def verdict(facts: LogFacts, findings: Findings) -> AuditReport:
    """Judge everything that only the whole log can tell; adds to `findings`."""
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
