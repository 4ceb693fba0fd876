"""What `dora inspect` needs of a run: its log, its policy's tokenizer, and what the trainer's model
says.

Whatever cannot be had is told, in a note or an error, and does not keep the rest from
being shown.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dora.bus.reader import LogReader
from dora.bus.settings import cluster_settings
from dora.config import Config, KafkaSection
from dora.consumers.inspect.rows import Fates, Row, generated_logprobs
from dora.consumers.inspect.sources import Sources, advantages_of, view_of
from dora.consumers.inspect.view import Scores, TrajectoryView, mismatch_of, with_scores
from dora.core.ring import parse_trajectory_id, trajectory_id
from dora.core.transcripts import Decode
from dora.errors import DoraError, RunError
from dora.log.recorded_config import recorded_config
from dora.log.run_log import RunLog
from dora.log.trained_records import fetch_trajectories
from dora.schemas.records import Trajectory

if TYPE_CHECKING:
    from dora.consumers.inspect.recomputation import Recomputation

AT_ONCE = 256
"""Trajectories that are held in memory together while they are scored."""
TOLD = 5
"""Foreign records that are named; further ones are counted."""


class Inspection:
    """One look at a run; `timeout` (seconds) bounds the reading of its log, and that of each batch
    of trajectories that are scored.

    `config_file` and `sets` are for `recorded_config`. Raises as `RunLog` does.
    """

    def __init__(
        self,
        run: str,
        kafka: KafkaSection,
        *,
        config_file: Path | None = None,
        sets: Sequence[str] = (),
        timeout: float = 300.0,
    ) -> None:
        self._kafka = kafka
        self._config_file = config_file
        self._sets = tuple(sets)
        self._timeout = timeout
        self._settings = cluster_settings(kafka)
        self.log = RunLog(self._settings, run, deadline=timeout)
        self.notes: list[str] = []
        """What to know about all that is shown."""

    def trajectory(self, identity: str, *, recompute: bool) -> TrajectoryView:
        """The view of one trajectory; RunError, naming the nearest ids, if there is none such."""
        self.log.version_of(identity)
        return self._views(parse_trajectory_id(identity)[0], [identity], recompute)[0]

    def group(self, group_id: str, *, recompute: bool) -> list[TrajectoryView]:
        """The views of a group's trajectories, unfinished ones included; RunError, naming the
        nearest ids, if there is no such group."""
        size = self.log.admission_of(group_id).group_size
        identities = [trajectory_id(group_id, sample) for sample in range(size)]
        return self._views(group_id, identities, recompute)

    def mismatches(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their mismatch, in their order."""
        found: dict[str, float] = {}
        by_version = sorted(rows, key=lambda row: row.version)
        topic = self.log.topics.trajectories
        with LogReader(self._settings, client_id=f"{self.log.run}.inspect") as reader:
            for begin in range(0, len(by_version), AT_ONCE):
                batch = by_version[begin : begin + AT_ONCE]
                places = [(row.partition, row.offset) for row in batch]
                held = fetch_trajectories(reader, topic, places, self._timeout)
                records = [held[place] for place in places]
                for record, scores in zip(records, self._scores(records), strict=True):
                    if record.generated_tokens:
                        gaps = mismatch_of(scores, generated_logprobs(record))
                        found[record.trajectory_id] = gaps.mean
        return [replace(row, mismatch=found.get(row.id)) for row in rows]

    def warnings(self) -> list[str]:
        """Foreign records and deleted ones met so far, and the other notes."""
        log = self.log
        texts = [f"foreign record: {text}" for text in log.unreadable[:TOLD]]
        if len(log.unreadable) > TOLD:
            texts.append(f"{len(log.unreadable) - TOLD} further foreign records")
        return [*texts, *log.missing, *self.notes]

    def _views(
        self, group_id: str, identities: Sequence[str], recompute: bool
    ) -> list[TrajectoryView]:
        log = self.log
        admission = log.admissions[group_id]
        fate = Fates(log).of(admission)
        group = log.group(group_id)
        chunks = list(log.chunks(identities))
        commands = list(log.commands(identities))
        advantages, reason = advantages_of(log.started, admission, group)
        if reason is not None and admission.purpose == "train":
            self.note(f"no advantage: {reason}")
        decode = self._tokenizer()
        views = []
        for identity in identities:
            sample = parse_trajectory_id(identity)[1]
            sources = Sources(
                admission,
                fate,
                group.get(sample),
                [each for each in chunks if each.record.trajectory_id == identity],
                [each for each in commands if each.record.trajectory_id == identity],
            )
            notes = self._absent(identity, sources)
            view = view_of(
                log.run,
                identity,
                sources,
                decode=decode,
                advantage=advantages.get(sample),
                notes=notes,
            )
            views.append(view)
        if recompute:
            views = self._scored(views, {s: placed.record for s, placed in group.items()})
        return views

    def _absent(self, identity: str, sources: Sources) -> list[str]:
        """What of a trajectory is not there; RunError if nothing of it is left."""
        if sources.record is not None:
            return [] if sources.chunks or not sources.record.record.chunks else [
                "its chunks are not in the log any more"
            ]  # fmt: skip
        decided = sources.fate.state in ("trained", "set-aside")
        if not decided and not self.log.missing:
            return ["not finished yet: what is shown is what its newest attempt has so far"]
        gone = f"trajectory {identity} ({sources.fate}) has no finished record in the log"
        if not sources.chunks:
            raise RunError(
                f"{gone} any more, nor a chunk",
                hint="; ".join(self.log.missing) or f"`dora audit {self.log.run}` says more.",
            )
        return [f"{gone} any more: what is shown is what its newest attempt wrote in chunks"]

    def _scored(
        self, views: Sequence[TrajectoryView], records: dict[int, Trajectory]
    ) -> list[TrajectoryView]:
        known = [view for view in views if view.finished and view.generated]
        if not known:
            self.note("nothing to recompute: no trajectory is finished with a token")
            return list(views)
        scores = self._scores([records[view.sample] for view in known])
        by_id = {view.id: score for view, score in zip(known, scores, strict=True)}
        return [with_scores(view, by_id[view.id]) if view.id in by_id else view for view in views]

    def _scores(self, records: Sequence[Trajectory]) -> list[Scores]:
        scores = self._recomputation.scores(records)
        for text in self._recomputation.notes:
            self.note(text)
        return scores

    @cached_property
    def _recomputation(self) -> "Recomputation":
        config = self._config
        from dora.consumers.inspect.recomputation import Recomputation  # torch, which takes seconds

        return Recomputation(self.log, config, self._settings, _say)

    @cached_property
    def _config(self) -> Config:
        return recorded_config(self.log.started, self._kafka, self._config_file, self._sets)

    def _tokenizer(self) -> Decode | None:
        """Text of token ids, or None with a note that says why."""
        try:
            if self._config.task.kind == "synthetic":
                self.note("prompts and responses of this run are token ids without a text")
                return None
            from dora.producers.tasks.tokenization import load_tokenizer

            tokenizer = load_tokenizer(self._config.policy, self._config.task.template_date)
        except DoraError as error:
            hint = f" {error.hint}" if error.hint else ""
            self.note(
                f"without the policy's tokenizer, token ids and recorded text are shown: "
                f"{error.message}{hint}"
            )
            return None
        return partial(tokenizer.decode, special_tokens=True)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def _say(text: str) -> None:
    click.echo(text, err=True)
