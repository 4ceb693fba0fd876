"""Prompts of a task made from JSON lines and Parquet, and files that are refused."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dora.config import Config
from dora.errors import UsageError
from dora.producers.tasks import import_files
from dora.producers.tasks.import_files import find_files
from dora.producers.tasks.import_prompts import Columns, Prompts, prompts_of
from dora.producers.tasks.kinds import JsonlTask
from tests.exported_rows import group, rows_of
from tests.small_run import VOCABULARY, dora, refused, small_model

__all__ = ["small_model"]


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def chat(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)


def lines(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def imported(*files: Path, columns: Columns | None = None, **options: Any) -> Prompts:
    return prompts_of(find_files(files), columns or Columns(), **options)


def pairs(made: Prompts) -> list[tuple[Any, Any]]:
    return [(item["prompt"], item["answer"]) for item in made.items]


def test_a_prompt_stands_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    one = lines(
        tmp_path / "one.jsonl",
        {"prompt": "sun", "answer": "nus"},
        {"prompt": "moon", "answer": "noom"},
        {"prompt": "sun", "answer": "nus"},
    )
    two = tmp_path / "two.parquet"
    pq.write_table(pa.table({"answer": ["yks", "N"], "prompt": ["sky", "moon"], "x": [1, 2]}), two)
    made = imported(one, two)
    assert pairs(made) == [("sun", "nus"), ("moon", "noom"), ("sky", "yks")]
    assert (made.rows, made.repeated, made.conflicting) == (5, 2, 1)
    assert pairs(imported(two, one))[0] == ("sky", "yks")


def test_the_best_answer_of_a_prompt_is_taken(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "scored.jsonl",
        {"question": "q", "completion": "bad", "reward": 0.0},
        {"question": "other", "completion": "none"},
        {"question": "third", "completion": "unknown", "reward": float("nan")},
        {"question": "q", "completion": "good", "reward": 1.0},
        {"question": "q", "completion": "as good", "reward": 1},
        {"question": "held out", "completion": "x", "reward": 1, "purpose": "eval"},
    )
    third = {"question": "third", "completion": "known", "reward": -1.0}
    more = lines(tmp_path / "more.jsonl", third)
    assert pairs(imported(file, more)) == [("q", "good"), ("other", "none"), ("third", "known")]
    made = imported(file, least=0.5)
    assert pairs(made) == [("q", "good")] and made.unsuited == 4


def test_conversations_end_before_the_answer(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    file = lines(tmp_path / "chat.jsonl", {"messages": [user, said]})
    made = imported(file)
    assert pairs(made) == [([user], "ho")] and made.conversations
    pairs_file = lines(tmp_path / "pair.jsonl", {"prompt": [user], "completion": [said]})
    assert pairs(imported(pairs_file)) == [([user], "ho")]


@pytest.mark.parametrize("answers", ["answer", "ground_truth", "solution"])
def test_a_question_with_its_answer_beside_it_is_taken_whole(tmp_path: Path, answers: str) -> None:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    file = lines(tmp_path / "rlvr.jsonl", {"messages": asked, answers: "2", "dataset": "gsm8k"})
    assert pairs(imported(file)) == [(asked, "2")]
    replied = [*asked, {"role": "assistant", "content": "two"}]
    file = lines(tmp_path / "replied.jsonl", {"messages": replied, answers: "2"})
    assert pairs(imported(file)) == [(asked, "2")]


def test_a_list_of_accepted_answers_stays_a_list(tmp_path: Path) -> None:
    file = lines(tmp_path / "qa.jsonl", {"prompt": "capital?", "answer": ["Paris", "paris"]})
    assert pairs(imported(file)) == [("capital?", ["Paris", "paris"])]


def test_columns_may_be_named_and_kept(tmp_path: Path) -> None:
    file = lines(tmp_path / "x.jsonl", {"q": "1+1", "a": 2, "level": 3, "prompt": "no"})
    made = imported(file, columns=Columns("q", "a", ("level",)))
    assert made.items == [{"prompt": "1+1", "answer": 2, "level": 3}]
    with pytest.raises(UsageError, match="--keep prompt: the data set has prompt of its own"):
        imported(file, columns=Columns("q", "a", ("prompt",)))
    dated = tmp_path / "dated.parquet"
    at = datetime(2026, 1, 1, tzinfo=UTC)
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"], "at": [at]}), dated)
    assert pairs(imported(dated)) == [("a", "b")]
    with pytest.raises(UsageError, match=r"row 1: cannot be written as JSON: .* datetime"):
        imported(dated, columns=Columns(keep=("at",)))


def test_exported_trajectories_become_prompts_with_their_best_responses(tmp_path: Path) -> None:
    for version in (10, 9):
        folder = tmp_path / f"version={version}"
        folder.mkdir()
        batch = rows_of(group(version, version, [0.0, 1.0]))
        table = pa.Table.from_batches([batch]).drop_columns(["version"])
        pq.write_table(table, folder / "trajectories.parquet")
    (tmp_path / "version=9" / "_source.json").write_text("{}")

    def decode(token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    files = find_files([tmp_path])
    assert [file.parent.name for file in files] == ["version=9", "version=10"]
    made = prompts_of(files, Columns(), decode=decode)
    assert pairs(made) == [("7 8", "nus\nsun")] and made.repeated == 3
    with pytest.raises(UsageError, match="prompts as token ids"):
        prompts_of(files, Columns())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": 5, "answer": "b"}\n', 'line 2: "prompt" is'),
        (b'{"prompt": "a"}\n', "no column that is known as the answer"),
        (b'{"prompt": "a", "answer": "b"}\n{"answer": "b"}\n', 'line 2: "prompt" is missing'),
        (b'{"prompt": " ", "answer": "b"}\n', 'line 1: "prompt" is empty'),
        (b'{"prompt": "a", "answer": {}}\n', '"answer" is an object, which is no answer'),
        (b'{"prompt": "a", "answer": []}\n', '"answer" is a list, which is no answer'),
        (b'{"prompt": "a", "answer": "b", "reward": "1"}\n', '"reward" is a string, not a number'),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}\n', "neither a string nor a list of"),
        (b'{"messages": [{"role": "user", "content": "x"}]}\n', "does not end with the assistant"),
        (b'{"prompt": "\xff", "answer": "b"}\n', "line 1: not UTF-8"),
        (b'{"prompt": "a"\n', "line 1: not JSON"),
        (b'["prompt"]\n', "line 1: holds list, not an object"),
        (b"[" * 100_000 + b"\n", "line 1: nested too deeply"),
        (b'{"prompt": "\\ud800", "answer": "b"}\n', "line 1: cannot be written as JSON"),
        (b'{}\n{"prompt": "a", "answer": "b"}\n', "no column that is known as the prompt"),
        (b"", "no prompt in 0 rows (they are empty)"),
        (b'{"prompt": "' + b"a" * 200 + b'", "answer": "b"}\n', "line 1: longer than"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(import_files, "LINE_BYTES", 150 if b"aaa" in content else 2**20)
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        imported(file)
    assert message in caught.value.message and str(file) in caught.value.message


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match="not a Parquet file"):
        imported(broken)
    with pytest.raises(UsageError, match="no such file"):
        imported(tmp_path / "none.jsonl")
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(UsageError, match=r"not a \.parquet, \.jsonl"):
        imported(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no"):
        imported(tmp_path / "empty")
    good = lines(tmp_path / "good.jsonl", {"prompt": "a", "answer": "b"})
    with pytest.raises(UsageError, match='no column "c"') as caught:
        imported(good, columns=Columns(answer="c"))
    assert caught.value.hint == "It has prompt, answer."


def test_what_is_imported_is_a_task(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "words.jsonl",
        *({"word": word, "backwards": word[::-1]} for word in ("sun", "moon", "sun")),
    )
    out = tmp_path / "task.jsonl"
    command = ("import", str(file), "--out", str(out))
    named = ("--prompt-field", "word", "--answer-field", "backwards")
    result = dora(*command, *named, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["prompts"], summary["rows"], summary["written"]) == (2, 3, True)
    again = dora(*command, *named)
    assert "2 prompts from 3 rows (it was there already)" in again.stdout
    refused(dora(*command, "--prompt-field", "word", "--answer-field", "word"), 2,
            f"{out} exists and holds something else")  # fmt: skip
    config = Config.model_validate(
        {
            "run": {"name": "words"},
            "policy": {"model": "none"},
            "task": {
                "kind": "jsonl", "path": str(out), "verifier": "scoring:verify",
                "held_out_fraction": 0.0, "shuffle": False,
            },
            "window": {"max_staleness": 1, "groups_per_step": 2, "group_size": 2},
            "trainer": {"steps": 1},
        }
    )  # fmt: skip
    task = JsonlTask(config, Letters())
    assert task.lines("train") == 2
    assert task.prompt(1, "train").item == {"prompt": "moon", "answer": "noom"}


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, small_model: Path) -> None:
    out = tmp_path / "task.jsonl"
    options = ("--tokenizer", str(small_model), "--out", str(out))
    good = {"prompt_token_ids": [2, 3, 4], "answer": "x"}
    for token in (-1, VOCABULARY, 10**12):
        bad = good | {"prompt_token_ids": [2, token]}
        file = lines(tmp_path / "tokens.jsonl", good, bad)
        what = f'{file}, line 2: "prompt_token_ids": {token} is no token of {small_model} (0 to 39)'
        refused(dora("import", str(file), *options), 2, what)
    assert dora("import", str(lines(file, good)), *options).exit_code == 0
    assert json.loads(out.read_text()) == {"prompt": "abc", "answer": "x"}


def test_what_is_wanted_must_be_said(tmp_path: Path) -> None:
    file = str(lines(tmp_path / "x.jsonl", {"prompt": "a", "answer": "b"}))
    refused(dora("import", file), 2, "give --out FILE for prompts, or --serve CONFIG")
    both = ("--serve", str(tmp_path / "run.toml"), "--keep", "x")
    refused(dora("import", file, *both), 2, "--serve takes trajectories as they are")
    refused(dora("import", file, "--out", "/proc/x/task.jsonl"), 2, "cannot write /proc/x")
