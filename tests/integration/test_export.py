"""`dora export` of a written run: what arrives, once, whatever happens to the command."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dora.bus import LogWriter
from dora.consumers.export.directories import UNFINISHED as DRAFT
from dora.consumers.export.rows import SOURCE_KEY, Source
from dora.log.run_log import RunLog
from dora.schemas.records import GroupRef, SampleRef, Step, unpack_logprobs, unpack_tokens
from tests.brokers import Cluster
from tests.exports import CLOSED, dead_letters, export, kill, rows, summary, visible
from tests.factories import status
from tests.small_run import refused
from tests.written_run import (
    DEADLINE,
    EVALUATED,
    OUTSTANDING,
    SET_ASIDE,
    UNFINISHED,
    WrittenRun,
    admissions,
    spoil,
    trajectory,
    write,
)


def test_each_counted_trajectory_of_a_closed_version_is_one_row(
    written: WrittenRun, exported: Path
) -> None:
    counted = {
        p.record.trajectory_id: p
        for p in RunLog(written.settings, written.run).trajectories(CLOSED)
    }
    found = {row["trajectory_id"]: row for row in rows(exported)}
    assert found.keys() == counted.keys() and len(rows(exported)) == len(counted) == 15
    for identity, row in found.items():
        record = counted[identity].record
        tokens = [*row["prompt_token_ids"], *row["response_token_ids"]]
        assert tokens == unpack_tokens(record.token_ids).tolist()
        generated = record.mask.index(1)
        assert len(row["prompt_token_ids"]) == generated
        assert row["response_logprobs"] == unpack_logprobs(record.logprobs)[generated:].tolist()
        assert row["response_mask"] == [bool(each) for each in record.mask[generated:]]
        assert (row["kafka_partition"], row["kafka_offset"]) == (
            counted[identity].partition,
            counted[identity].offset,
        )
        for name in ("run", "group_id", "sample", "reward", "reward_parts", "text", "error"):
            assert row[name] == getattr(record, name)
        assert row["version"] == record.policy_version


def test_a_row_says_what_became_of_its_group(exported: Path) -> None:
    fates = {
        row["group_id"]: (row["state"], row["trained_step"], row["staleness"])
        for row in rows(exported)
    }
    assert fates["g0"] == ("trained", 1, 0)
    assert fates["g3"] == ("trained", 3, 1)
    assert fates[SET_ASIDE] == ("set-aside", None, None)
    assert fates[EVALUATED] == ("evaluation", None, None)
    reasons = {row["set_aside_reason"] for row in rows(exported) if row["group_id"] == SET_ASIDE}
    assert reasons == {"verifier timed out"}


def test_files_say_which_offsets_they_came_from(written: WrittenRun, exported: Path) -> None:
    log = RunLog(written.settings, written.run)
    assert visible(exported) == [f"version={v}/trajectories.parquet" for v in CLOSED]
    for version in CLOSED:
        file = exported / f"version={version}" / "trajectories.parquet"
        source = Source.from_json(pq.read_metadata(file).metadata[SOURCE_KEY.encode()])
        assert (source.run, source.version) == (written.run, version)
        assert source.cluster_id == log.started.cluster_id
        offsets = [(p.partition, p.offset) for p in log.trajectories({version})]
        assert source.ranges == {version: (0, len(offsets))}, "a slot of one lane"
        assert all(source.ranges[p][0] <= o < source.ranges[p][1] for p, o in offsets)


def test_json_lines_hold_the_same(written: WrittenRun, exported: Path, tmp_path: Path) -> None:
    result = export(written, tmp_path, to="jsonl")
    assert result.exit_code == 0, result.output
    assert rows(tmp_path) == rows(exported)
    sources = [json.loads(p.read_text()) for p in tmp_path.glob("*/_source.json")]
    assert sorted(each["version"] for each in sources) == list(CLOSED)


def test_only_what_is_new_is_added(written: WrittenRun, exported: Path, tmp_path: Path) -> None:
    first = summary(export(written, tmp_path, "--versions", ":0", "--json"))
    assert (first["exported"], first["there"], first["rows"]) == ([0], 0, 4)
    file = tmp_path / "version=0" / "trajectories.parquet"
    before = file.stat()
    second = summary(export(written, tmp_path, "--json"))
    assert (second["exported"], second["there"], second["rows"]) == ([1, 2], 1, 11)
    assert second["bytes"] == sum(
        (tmp_path / f"version={v}" / file.name).stat().st_size for v in (1, 2)
    )
    assert second["open"] == {"3": "2 of its groups are outstanding"}
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert rows(tmp_path) == rows(exported)
    third = export(written, tmp_path)
    assert "nothing to add" in third.stdout and "3 versions were there already" in third.stdout


@pytest.mark.parametrize(
    ("to", "point", "there"),
    [
        ("parquet", "export.batch_read", 1),
        ("parquet", "export.version_written", 1),
        ("parquet", "export.version_exported", 2),
        ("jsonl", "export.batch_read", 1),
        ("jsonl", "export.version_placed", 2),
    ],
)
def test_a_killed_export_leaves_whole_versions_and_the_next_one_the_rest(
    written: WrittenRun, exported: Path, tmp_path: Path, to: str, point: str, there: int
) -> None:
    kill(written, tmp_path, f"{point}:kill:2", to=to)
    whole = [row for row in rows(exported) if row["version"] < there]
    assert rows(tmp_path) == whole, "no half file, nothing twice"
    drafts = [p.name for p in tmp_path.iterdir() if p.name.startswith(DRAFT)]
    assert bool(drafts) == (there == 1)
    result = export(written, tmp_path, to=to)
    assert result.exit_code == 0, result.output
    said = "removed the half-written version=1 that an interrupted export left"
    assert (said in result.stderr) == bool(drafts)
    assert rows(tmp_path) == rows(exported)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(DRAFT)]


def test_what_does_not_belong_there_becomes_dead_letters_once_and_the_rest_is_exported(
    kafka: Cluster, tmp_path: Path
) -> None:
    written = write(kafka)
    spoil(written)  # partition 0: behind version 3
    with LogWriter(written.settings, client_id="test") as writer:
        writer.send(written.topics.trajectories, status("w0", run=written.run), partition=2)
        other = trajectory(admissions("another")[5], 0)
        writer.send(written.topics.trajectories, other, partition=2)
        writer.send(written.topics.steps, status("w0", run=written.run), partition=0)
        writer.flush(DEADLINE)
    quiet = summary(export(written, tmp_path / "quiet", "--no-dead-letters", "--json"))
    assert (quiet["exported"], quiet["foreign"], quiet["dead_letters"]) == ([0, 1, 2], 3, 0)
    assert dead_letters(written) == []
    kill(written, tmp_path / "a", "export.version_written:kill:3")
    assert len(dead_letters(written)) == 3, "they are there before the version is"
    first = summary(export(written, tmp_path / "a", "--json"))
    assert (first["exported"], first["foreign"], first["dead_letters"]) == ([2], 3, 0)
    assert len(rows(tmp_path / "a")) == 15
    letters = {(each.topic, each.partition): each for each in dead_letters(written)}
    assert "holds a Status" in letters[written.topics.steps, 0].reason
    second = export(written, tmp_path / "b", "--ended", "--json")
    told = summary(second)
    assert (told["exported"], told["foreign"], told["dead_letters"]) == ([0, 1, 2, 3], 7, 4)
    assert told["duplicates"] == 1, "g0/0 finished a second time behind version 3"
    reasons = sorted(each.reason for each in dead_letters(written))
    assert [reason.split(",")[0] for reason in reasons] == [
        "cannot be read: starts with 6e6f",
        "holds a DeadLetter",
        "holds a Status",
        "holds a Status",
        "is g0/7 of version 0",
        "is of group g99",
        "is of run another",
    ]
    unreadable = next(each for each in dead_letters(written) if each.code == "bad_magic")
    assert unreadable.payload == b"no record" and unreadable.partition == 0
    assert {row["state"] for row in rows(tmp_path / "b") if row["version"] == 3} == {"outstanding"}
    third = export(written, tmp_path / "c", "--ended")
    assert "7 records do not belong where they lie" in third.stdout
    assert "0 of them are new among the dead letters" in third.stdout
    assert len(dead_letters(written)) == 7


def test_a_version_is_replaced_when_its_run_went_on_after_all(
    kafka: Cluster, tmp_path: Path
) -> None:
    written = write(kafka)
    assert export(written, tmp_path, "--ended").exit_code == 0

    def train(group_id: str, refs: tuple[SampleRef, ...], version: int) -> None:
        group = next(each for each in admissions(written.run) if each.group_id == group_id)
        ref = GroupRef(group_id, group.ordinal, group.policy_version, refs)
        entry = Step(written.run, "step", version, version, version + 1, (ref,), (), {}, "s", None,
                     "trainer", 0)  # fmt: skip
        with LogWriter(written.settings, client_id="test") as writer:
            writer.send(written.topics.steps, entry, partition=0)
            writer.flush(DEADLINE)

    placed = RunLog(written.settings, written.run).group(OUTSTANDING)
    train(OUTSTANDING, tuple(SampleRef(s, 0, p.partition, p.offset) for s, p in placed.items()), 3)
    told = summary(export(written, tmp_path, "--ended", "--json"))
    assert (told["exported"], told["updated"], told["there"]) == ([3], [3], 3)
    assert {row["state"] for row in rows(tmp_path) if row["version"] == 3} == {"trained"}
    assert len(rows(tmp_path)) == 17

    train(UNFINISHED, (SampleRef(0, 0, 0, 98), SampleRef(1, 0, 0, 99)), 4)
    refused(
        export(written, tmp_path, "--ended"),
        1,
        f"version 3: the ledger names {UNFINISHED}/0 (partition 0 offset 98), {UNFINISHED}/1",
        "which cannot be read there",
    )
    assert len(rows(tmp_path)) == 17, "what was there stays"
