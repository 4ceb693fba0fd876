"""Trajectories as rows, and rows as files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dora.cli.export import wanted_versions
from dora.consumers.export import rows as export_rows
from dora.consumers.export.directories import DirectoryTarget, JsonlTarget, ParquetTarget, lines
from dora.consumers.export.rows import Source, batch_of, batches
from dora.consumers.export.run import spans
from dora.consumers.inspect.rows import Fate, Fates
from dora.errors import RunError, UsageError
from dora.log.run_log import Placed
from dora.log.table_schema import SCHEMA
from dora.schemas.records import Trajectory, VersionRun, pack_logprobs, pack_tokens
from tests.factories import admission, run_started, trajectory

TRAINED = Fate("trained", 3, 1)
SOURCE = Source("r", "id", "cluster", "r.trajectories", 1, {1: (4, 9), 2: (0, 3)}, 2, "0.1.0", 1)


class Log:
    """What `batches` asks of a run's log."""

    def __init__(self, groups: int) -> None:
        self.admissions = {f"g{n}": admission(n, 1) for n in range(groups)}

    def trained_at(self) -> dict[str, int]:
        return {"g0": 2}

    def set_aside(self) -> dict[str, str]:
        return {"g1": "verifier timed out"}


def placed(record: Trajectory, offset: int = 0) -> Placed[Trajectory]:
    return Placed(1, offset, record)


def one(record: Trajectory, fate: Fate = TRAINED) -> dict[str, object]:
    found: dict[str, object] = batch_of([placed(record, 7)], [fate]).to_pylist()[0]
    return found


def test_the_response_begins_with_the_first_generated_token_and_keeps_what_tools_said() -> None:
    made = replace(
        trajectory(admission(0, 1)),
        token_ids=pack_tokens([7, 8, 1, 9, 2]),
        mask=b"\0\0\1\0\1",
        logprobs=pack_logprobs([0, 0, -1, 0, -0.5]),
        version_runs=(VersionRun(1, 2),),
    )
    row = one(made)
    assert row["prompt_token_ids"] == [7, 8]
    assert row["response_token_ids"] == [1, 9, 2]
    assert row["response_mask"] == [True, False, True]
    assert row["response_logprobs"] == [-1.0, 0.0, -0.5]
    assert row["generated_tokens"] == 2


@pytest.mark.parametrize(("forged", "year"), [(2**63 - 1, 9999), (-(2**63), 1)])
def test_times_that_no_calendar_has_do_not_end_an_export(forged: int, year: int) -> None:
    made = replace(
        trajectory(admission(0, 1)), started_ms=forged, generated_ms=forged, created_ms=forged
    )
    row = one(made)
    for name in ("started_at", "generated_at", "created_at"):
        found = row[name]
        assert isinstance(found, datetime) and found.year == year


def test_a_trajectory_without_a_generated_token_is_all_prompt() -> None:
    made = replace(
        trajectory(admission(0, 1), reward=None), mask=bytes(5), version_runs=(), text=None
    )
    row = one(made, Fate("set-aside", reason="failed"))
    assert row["prompt_token_ids"] == [7, 8, 1, 2, 3]
    assert row["response_token_ids"] == row["response_logprobs"] == row["response_mask"] == []
    assert (row["reward"], row["text"], row["error"]) == (None, None, "verifier timed out")
    assert (row["state"], row["trained_step"], row["staleness"]) == ("set-aside", None, None)
    assert row["set_aside_reason"] == "failed"


def test_a_batch_holds_only_so_many_rows_and_few_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(10)
    records = [trajectory(log.admissions[f"g{n}"]) for n in range(10)]

    def sizes() -> list[int]:
        source = (placed(record, offset) for offset, record in enumerate(records))
        made = list(batches(source, log.admissions, Fates(log)))  # type: ignore[arg-type]
        assert all(batch.schema.equals(SCHEMA) for batch in made)
        states = [row["state"] for batch in made for row in batch.to_pylist()]
        assert states == ["trained", "set-aside", *["outstanding"] * 8]
        return [batch.num_rows for batch in made]

    monkeypatch.setattr(export_rows, "BATCH_ROWS", 4)
    assert sizes() == [4, 4, 2]
    monkeypatch.setattr(export_rows, "BATCH_BYTES", 120)  # each has 52
    assert sizes() == [3, 3, 3, 1]


def test_json_lines_give_every_number_back_exactly() -> None:
    values = np.random.default_rng(0).normal(-1, 2, 500).astype(np.float32)
    values[:3] = [-1e-30, -3.4e38, 0]
    made = replace(
        trajectory(admission(0, 1)),
        token_ids=pack_tokens(range(500)),
        mask=b"\1" * 500,
        logprobs=pack_logprobs(values),
        version_runs=(VersionRun(1, 500),),
        text='two\nlines, "quoted" \u2028 ☃',
        reward_parts={"right": 0.1, 'odd "name"': 1.0},
    )
    text = list(lines(batch_of([placed(made)] * 2, [TRAINED] * 2)))
    assert [line.count("\n") for line in text] == [1, 1]
    row = json.loads(text[0])
    assert row.keys() == set(SCHEMA.names)
    assert (np.array(row["response_logprobs"], np.float32) == values).all()
    assert row["response_token_ids"] == list(range(500)) and row["prompt_token_ids"] == []
    assert row["response_mask"] == [True] * 500
    assert (row["text"], row["reward_parts"]) == (made.text, made.reward_parts)
    assert row["created_at"] == "1970-01-01T00:00:00+00:00"


def test_json_has_no_word_for_what_is_no_number() -> None:
    made = replace(
        trajectory(admission(0, 1)), reward_parts={"a": float("nan"), "b": -float("inf"), "c": 0.5}
    )
    (text,) = lines(batch_of([placed(made)], [TRAINED]))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    row = json.loads(text, parse_constant=refuse)
    assert row["reward_parts"] == {"a": None, "b": None, "c": 0.5}
    assert row["response_token_ids"] == [1, 2, 3] and row["created_at"].startswith("1970-01-01T")


def test_a_source_reads_back_as_it_was_and_nothing_else_passes_for_one() -> None:
    assert Source.from_json(SOURCE.to_json()) == SOURCE
    for text in ("", "[]", "{}", '{"ranges": 1}', '{"ranges": {}, "run": "r"}'):
        with pytest.raises(ValueError):
            Source.from_json(text)


@pytest.mark.parametrize("target", [ParquetTarget, JsonlTarget])
def test_a_version_whose_rows_fail_half_way_is_not_there_and_an_older_state_of_it_stays(
    tmp_path: Path, target: type[DirectoryTarget]
) -> None:
    batch = batch_of([placed(trajectory(admission(0, 1)))], [TRAINED])

    def failing() -> Iterator[pa.RecordBatch]:
        yield batch
        raise RunError("gone")

    newer = replace(SOURCE, groups=5)
    with target(tmp_path, run_started(), print) as directory:
        with pytest.raises(RunError, match="gone"):
            directory.write(SOURCE, failing())
        assert directory.exported == {}
        directory.write(SOURCE, iter([batch]))
        before = (tmp_path / "version=1" / target.file_name).read_bytes()
        with pytest.raises(RunError, match="gone"):
            directory.write(newer, failing())
        assert (tmp_path / "version=1" / target.file_name).read_bytes() == before
    with target(tmp_path, run_started(), print) as directory:
        assert directory.exported == {1: SOURCE}
        directory.write(newer, iter([batch, batch]))
    with target(tmp_path, run_started(), print) as directory:
        assert directory.exported == {1: newer}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".dora-export.lock", "version=1"]


def test_json_lines_without_their_offsets_count_as_not_exported(tmp_path: Path) -> None:
    batch = batch_of([placed(trajectory(admission(0, 1)))], [TRAINED])
    with JsonlTarget(tmp_path, run_started(), print) as directory:
        directory.write(SOURCE, iter([batch]))
    (tmp_path / "version=1" / JsonlTarget.sidecar).unlink()
    with JsonlTarget(tmp_path, run_started(), print) as directory:
        assert directory.exported == {}


def test_a_directory_that_is_called_like_a_draft_is_nothing_of_an_export(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-version=1").mkdir()
    with pytest.raises(UsageError, match=r"did not put there: .*unfinished-version=1"):
        ParquetTarget(tmp_path, run_started(), print)


def test_an_earlier_run_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    with ParquetTarget(tmp_path, run_started(), print) as directory:
        directory.write(SOURCE, iter([]))
    with pytest.raises(UsageError, match="the export of an earlier run of the name r"):
        ParquetTarget(tmp_path, replace(run_started(), run_id="new"), print)
    (tmp_path / "version=1").rename(tmp_path / "version=2")
    with pytest.raises(UsageError, match="it is of version 1"):
        ParquetTarget(tmp_path, run_started(), print)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("2:4", {2, 4}, {1, 5}), ("2:", {2, 99}, {1}), (":2", {0, 2}, {3}), (":", {0, 9}, set())],
)
def test_version_ranges_include_both_ends(text: str, inside: set[int], outside: set[int]) -> None:
    wanted = wanted_versions(None, text)
    assert all(version in wanted for version in inside)
    assert not any(version in wanted for version in outside)


@pytest.mark.parametrize("text", ["3", "a:b", "4:2", "-1:2", ""])
def test_other_version_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not of the form A:B"):
        wanted_versions(None, text)


def test_versions_are_named_as_spans() -> None:
    assert spans([3]) == "version 3"
    assert spans([0, 1, 2, 4, 6, 7]) == "versions 0 to 2, 4, 6 to 7"
