"""Data sets for fine-tuning: of each group its best response, or its best and its worst.

A version's file follows from the version's rows, the tokenizer and the `Choice`, which is recorded
in the file; a directory never mixes two choices.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dora.consumers.export.directories import DirectoryTarget
from dora.consumers.export.rows import SOURCE_KEY, Source
from dora.consumers.export.targets import Report
from dora.core.preferences import Candidate, Choice, Chosen
from dora.errors import UsageError
from dora.schemas.records import RunStarted

CHOICE_KEY = "dora.choice"
"""Under this name files keep the `Choice` that made them."""
IGNORED = -100
"""Label of a token that the loss leaves out, as in torch.nn.CrossEntropyLoss."""

Messages = Sequence[dict[str, str]]


class Texts(Protocol):
    """The texts of tokens, by the run's tokenizer and its task."""

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Their text, without what the tokenizer puts before every text by itself."""

    def response(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""

    def tokens(self, text: str) -> Sequence[int]:
        """The tokens of a whole text, as those who tokenise it again get them."""

    def messages(self, ordinal: int, prompt: Sequence[int]) -> Messages:
        """The conversation that the prompt was made of; TaskError if the task has another now."""


_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TOKENS = pa.list_(pa.int32())


def schema_of(choice: Choice) -> pa.Schema:
    """The columns of the examples: those that a trainer reads, and where they come from."""
    text = _MESSAGES if choice.form == "chat" else pa.string()
    if choice.form == "tokens":
        columns = [("input_ids", _TOKENS), ("labels", _TOKENS)]
    elif choice.kind == "sft":
        columns = [("prompt", text), ("completion", text)]
    else:
        columns = [("prompt", text), ("chosen", text), ("rejected", text)]
    columns += [
        ("run", pa.string()), ("policy_version", pa.int32()), ("group_id", pa.string()),
    ]  # fmt: skip
    names = ("chosen", "rejected") if choice.kind == "dpo" else ("",)
    for name in names:
        prefix = f"{name}_" if name else ""
        columns += [(f"{prefix}trajectory_id", pa.string()), (f"{prefix}reward", pa.float64())]
    return pa.schema(columns)


class PreferenceTarget(DirectoryTarget):
    """`version=N/train.parquet`, which `datasets.load_dataset(DIR)` reads as one data set.

    Raises as `DirectoryTarget` does, and UsageError if the directory was made by another choice.
    """

    file_name = "train.parquet"

    def __init__(
        self,
        directory: Path,
        run: RunStarted,
        report: Report,
        *,
        choice: Choice,
        texts: Texts | None,
    ) -> None:
        self._choice = choice
        self._optional_texts = texts  # None with the form `tokens`, which needs none
        self._schema = schema_of(choice)
        super().__init__(directory, run, report)
        self.details["examples"] = 0  # beside how many groups gave none for which reason

    def write_file(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """The version's examples in the order of their prompts."""
        chosen = choose(batches, self._choice)
        rows = [self._row(source, group, picked) for group, picked in chosen.examples(self.details)]
        metadata = {SOURCE_KEY: source.to_json(), CHOICE_KEY: json.dumps(asdict(self._choice))}
        schema = self._schema.with_metadata(metadata)
        with pq.ParquetWriter(draft, schema, compression="zstd") as writer:
            if rows:  # `datasets` fails at an empty row group
                writer.write_table(pa.Table.from_pylist(rows, schema))
        self.details["examples"] += len(rows)

    def source_of(self, file: Path) -> Source:
        """From the footer; ValueError if there is none, UsageError if it was another choice."""
        metadata = pq.read_metadata(file).metadata or {}
        text, made = (metadata.get(key.encode()) for key in (SOURCE_KEY, CHOICE_KEY))
        if text is None or made is None:
            raise ValueError("its metadata names no data set of dora")
        if json.loads(made) != asdict(self._choice):
            before, now = json.loads(made), asdict(self._choice)
            other = ", ".join(
                f"{key} = {before.get(key)}" for key in now if before.get(key) != now[key]
            )
            raise UsageError(
                f"{self.directory} holds a data set that was chosen otherwise: {other}",
                hint="Name another directory, or export with the same options.",
            )
        return Source.from_json(text)

    def _row(self, source: Source, group: str, picked: Sequence[Candidate]) -> dict[str, Any]:
        best = picked[0]
        row: dict[str, Any] = {
            "run": source.run, "policy_version": source.version, "group_id": group,
        }  # fmt: skip
        names = ("chosen", "rejected") if self._choice.kind == "dpo" else ("",)
        for name, each in zip(names, picked, strict=True):
            prefix = f"{name}_" if name else ""
            row[f"{prefix}trajectory_id"] = each.trajectory_id
            row[f"{prefix}reward"] = each.reward
            if self._choice.form != "tokens":
                row[name or "completion"] = self._completion(each)
        if self._choice.form == "tokens":
            row["input_ids"] = best.prompt + best.response
            labels = zip(best.response, best.mask, strict=True)
            row["labels"] = [IGNORED] * len(best.prompt) + [
                token if generated else IGNORED for token, generated in labels
            ]
        elif self._choice.form == "chat":
            row["prompt"] = self._texts.messages(best.ordinal, best.prompt)
        else:
            row["prompt"] = self._texts.prompt(best.prompt)
        return row

    @property
    def _texts(self) -> Texts:
        assert self._optional_texts is not None
        return self._optional_texts

    def _completion(self, candidate: Candidate) -> Any:
        tokens = candidate.content
        text = self._texts.response(tokens)
        if self._choice.form == "chat":
            return [{"role": "assistant", "content": text}]
        again = list(self._texts.tokens(self._texts.prompt(candidate.prompt) + text))
        if again[-len(candidate.prompt) - len(tokens) :] != candidate.prompt + tokens:
            self.details["tokenised_otherwise"] += 1
        return text


_FIELDS = (
    "purpose",
    "group_id",
    "ordinal",
    "reward",
    "trajectory_id",
    "sample",
    "finish_reason",
    "sampling",
)
_TOKEN_FIELDS = ("prompt_token_ids", "response_token_ids", "response_mask")


def choose(batches: Iterator[pa.RecordBatch], choice: Choice) -> Chosen:
    """Go through the rows of a version; of each group at most two responses stay in memory."""
    chosen = Chosen(choice)
    for batch in batches:
        columns = [batch.column(name) for name in _TOKEN_FIELDS]
        for index, row in enumerate(batch.select(_FIELDS).to_pylist()):
            chosen.take(row, *(column[index].as_py() for column in columns))
    return chosen
