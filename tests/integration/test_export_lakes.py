"""`dora export` of a real run to tables and data sets, read by what people read them with."""

import json
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from dora.schemas.records import Admission, Trajectory
from tests import written_run
from tests.brokers import Cluster
from tests.small_run import dora, refused
from tests.written_run import RunWriter, WrittenRun, spoil

EOS = 1
"""The token that ends a text of the small model."""
CLOSED_ROWS = {0: 4, 1: 5, 2: 6}
"""Two in each group of the three versions that are closed, and one evaluation."""


@pytest.fixture(scope="module")
def written(kafka: Cluster, small_model: Path) -> WrittenRun:
    """A run with foreign records among its own, whose responses all end by themselves."""
    from dora.bus import cluster_settings
    from dora.config import KafkaSection

    original = written_run.trajectory

    def whole(group: Admission, sample: int, attempt: int = 0) -> Trajectory:
        made = original(group, sample, attempt)
        sampling = replace(made.sampling, stop_token_ids=(EOS,))
        ended = made.token_ids[:-4] + EOS.to_bytes(4, "little")
        finish: Any = "error" if made.reward is None else "stop"
        return replace(made, sampling=sampling, token_ids=ended, finish_reason=finish)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_run, "trajectory", whole)
        settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
        made = RunWriter(settings, f"lakes-{uuid.uuid4().hex[:8]}", str(small_model)).write()
    spoil(made)
    return made


def exported(written: WrittenRun, to: str, place: object, *options: str) -> dict[str, Any]:
    """The summary of a successful `dora export`."""
    address = written.settings.bootstrap_servers
    result = dora("export", written.run, str(place), "--to", to, "-b", address, *options, "--json")
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def test_an_iceberg_table_grows_with_the_run(written: WrittenRun, tmp_path: Path) -> None:
    first = exported(written, "iceberg", tmp_path, "--versions", ":1")
    assert first["exported"] == [0, 1] and first["rows"] == 9 and first["bytes"] > 0
    second = exported(written, "iceberg", tmp_path)
    assert (second["exported"], second["there"], list(second["open"])) == ([2], 2, ["3"])
    catalog = load_catalog("dora", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db")
    table = catalog.load_table(("dora", written.run))
    query = "SELECT version, count(*) FROM trajectories GROUP BY version"
    rows = table.scan().to_duckdb("trajectories").sql(query).fetchall()
    assert dict(rows) == CLOSED_ROWS
    best = (
        pl.scan_iceberg(table)
        .filter(pl.col("purpose") == "train", pl.col("group_id") == "g4")
        .sort("reward", descending=True)
        .collect()
    )
    assert best["trajectory_id"].to_list() == ["g4/1", "g4/0"]
    assert best["response_token_ids"][0].to_list()[-1] == EOS
    source = json.loads(table.current_snapshot().summary["dora.source"])
    assert source["run"] == written.run and source["version"] == 2 and source["ranges"]


def test_a_delta_table_grows_with_the_run(written: WrittenRun, tmp_path: Path) -> None:
    assert exported(written, "delta", tmp_path, "--version", "1")["exported"] == [1]
    assert exported(written, "delta", tmp_path)["exported"] == [0, 2]
    assert exported(written, "delta", tmp_path)["exported"] == []
    trajectories = DeltaTable(tmp_path).to_pyarrow_dataset()
    assert trajectories.count_rows() == sum(CLOSED_ROWS.values())
    rows = duckdb.sql(
        "SELECT set_aside_reason, count(*) FROM trajectories WHERE state = 'set-aside' GROUP BY ALL"
    )
    assert rows.fetchall() == [("verifier timed out", 2)]
    late = pl.scan_delta(str(tmp_path)).filter(pl.col("staleness") > 0).collect()
    assert set(late["group_id"]) == {"g3"}


def data_set(directory: Path) -> Any:
    """As people load it."""
    from datasets import load_dataset

    return load_dataset(str(directory), cache_dir=str(directory.parent / "cache"))["train"]


def test_trl_trains_on_the_best_responses(
    written: WrittenRun, small_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "sft"
    summary = exported(written, "sft", home, "--versions", ":1")
    assert summary["details"] == {"examples": 4}  # the best of each group has a reward of 1 or more
    summary = exported(written, "sft", home, "--ended")
    assert summary["exported"] == [2, 3]
    # g6 was not scored in one of its samples, g8 is not finished in the log
    rows = data_set(home)
    assert sorted(rows["trajectory_id"]) == [
        f"g{n}/{1 if n != 6 else 0}" for n in range(8) if n != 6
    ]
    assert set(rows["prompt"]) == {"abc"}
    model, tokenizer = policy(small_model)
    from trl import SFTConfig, SFTTrainer

    arguments: Any = settings_of(SFTConfig, tmp_path)
    trainer = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=rows, args=arguments
    )
    prepared = {row["trajectory_id"]: row for row in trainer.train_dataset}
    ids = written_run.response(0, 1)[:-1]
    assert prepared["g0/1"]["input_ids"] == [*written_run.PROMPT, *ids, EOS]
    assert prepared["g0/1"]["labels"] == [-100, -100, -100, *ids, EOS]
    assert trainer.train().global_step == 1


def test_token_ids_go_to_trl_as_the_policy_wrote_them(
    written: WrittenRun, small_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "tokens"
    exported(written, "sft", home, "--form", "tokens", "--version", "0")
    model, tokenizer = policy(small_model)
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=data_set(home),
        args=settings_of(SFTConfig, tmp_path),
    )
    ids = [*written_run.response(0, 1)[:-1], EOS]
    (row,) = [row for row in trainer.train_dataset if row["group_id"] == "g0"]
    assert row["input_ids"] == [*written_run.PROMPT, *ids]
    assert row["labels"] == [-100, -100, -100, *ids]


def test_trl_learns_the_preference_of_a_group(
    written: WrittenRun, small_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "dpo"
    summary = exported(written, "dpo", home, "--min-margin", "0.5")
    assert summary["details"] == {"examples": 6, "without_difference": 1}  # g6 has one reward
    rows = data_set(home)
    assert rows[0]["chosen_reward"] - rows[0]["rejected_reward"] == 1.0
    model, tokenizer = policy(small_model)
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
        args=settings_of(DPOConfig, tmp_path),
    )
    prepared = {row["group_id"]: row for row in trainer.train_dataset}
    assert prepared["g0"]["chosen_ids"] == [*written_run.response(0, 1)[:-1], EOS]
    assert prepared["g0"]["rejected_ids"] == [*written_run.response(0, 0)[:-1], EOS]
    assert trainer.train().global_step == 1


def policy(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )


def settings_of(kind: Any, directory: Path) -> Any:
    """One step on a CPU, reported to nobody."""
    return kind(
        output_dir=str(directory / "out"),
        max_steps=1,
        per_device_train_batch_size=2,
        max_length=64,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def test_options_that_a_kind_does_not_have_are_refused(written: WrittenRun, tmp_path: Path) -> None:
    def tried(to: str, place: object, *options: str) -> Any:
        address = written.settings.bootstrap_servers
        return dora("export", written.run, str(place), "--to", to, "-b", address, *options)

    refused(tried("parquet", tmp_path, "--form", "chat"), 2, "--form does not go with --to parquet")
    refused(
        tried("sft", tmp_path, "--min-margin", "1"), 2, "--min-margin does not go with --to sft"
    )
    refused(tried("dpo", tmp_path, "--form", "tokens"), 2, "--to dpo has no --form tokens")
    refused(tried("iceberg", "s3://bucket/x"), 2, "s3://bucket/x is not", "--to delta")
    result = tried("delta", tmp_path, "--property", "hunter2")
    assert result.exit_code == 2 and "KEY=VALUE" in result.output and "hunter2" not in result.output
    nowhere = ("--set", f"policy.tokenizer={tmp_path}/none")
    refused(tried("sft", tmp_path / "sft", *nowhere), 1, "no such directory")
    synthetic = ("--set", "task.kind=synthetic", "--set", "rollout.engine=emulated")
    assert not (tmp_path / "sft").exists()
    refused(tried("dpo", tmp_path / "dpo", *synthetic), 2, "token ids without a text")


def test_the_python_of_the_pages_runs_as_it_stands_there(
    written: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    places = {"iceberg": "lake", "delta": "table", "sft": "sft", "dpo": "dpo"}
    for to, place in places.items():
        exported(written, to, tmp_path / place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    blocks = [block for page in ("lakes.md", "datasets.md") for block in python_of(page)]
    assert len(blocks) == 6
    for block in blocks:
        exec(block.replace("dora.demo", f"dora.{written.run}"), names)
    said = capsys.readouterr().out
    assert "verifier timed out" in said and "surprise" in said
    assert said.count("{'") == 2  # where versions came from
    ids = written_run.response(0, 1)[:-1]
    best = "".join(chr(ord("a") + token - 2) for token in ids)
    assert f"abc {best} 1.0" in said


def python_of(page: str) -> list[str]:
    """The blocks of Python of a page of the documentation."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
