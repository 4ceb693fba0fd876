"""A small run whose trajectories have real texts and rewards, written record by record."""

import json
from pathlib import Path

from dora.bus import ClusterSettings, RunTopics, TopicAdmin, topic_plan
from dora.core import ring
from dora.producers.tasks.base import Prompt
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import Tokenizer, load_tokenizer
from dora.schemas.records import (
    Admission,
    Policy,
)
from tests import factories
from tests.factories import RING, B, G
from tests.log_writer import RunLogWriter
from tests.small_run import SmallRun

STEPS = 2
TAKEN_OVER, UNFINISHED, UNSCORED = "g1/0", "g5/1", "g2/1"
CHUNK_TOKENS = 2
VERIFIER = """
def verify(response, item):
    return float(response == item["answer"])
"""


class SpokenRun:
    """Six groups of two: sample 0 is right, sample 1 has an `x` too much. The verifier failed for
    one trajectory, one was taken over, and one is still generated."""

    def __init__(self, settings: ClusterSettings, name: str, directory: Path, model: Path) -> None:
        self.small = SmallRun(name, directory, model, settings.bootstrap_servers)
        self.small.replace('engine = "emulated"', 'engine = "vllm"')
        (directory / "scoring.py").write_text(VERIFIER)
        self.name, self.topics = name, RunTopics(name)
        self.config = self.small.config()
        with TopicAdmin(settings) as admin:
            admin.create(topic_plan(self.config))
        self._tokenizer: Tokenizer = load_tokenizer(self.config.policy)
        self._task = create_task(self.config, self._tokenizer)
        with RunLogWriter(settings, name) as writer:
            self._writer = writer
            self._write()

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of a group."""
        return self._task.prompt(ordinal, "train")

    def response(self, ordinal: int, sample: int) -> str:
        """What was generated for it."""
        return str(self.prompt(ordinal).item["answer"]) + "x" * sample

    def _write(self) -> None:
        config = self.config
        texts = {name: json.dumps(made) for name, made in (
            ("identity", config.identity()), ("config", config.recorded()),
        )}  # fmt: skip
        self._writer.send(factories.run_started(self.name, **texts))
        groups = [factories.admission(o, o // B, self.name) for o in range(B * (STEPS + 1))]
        for version in range(STEPS + 1):
            self._writer.send(self._policy(version))
            mine = [g for g in groups if g.policy_version == version]
            for group in mine:
                self._writer.send(group)
                for sample in range(G):
                    self._generate(group, sample)
            if version < STEPS:
                trained = [g for g in mine if g.group_id != UNSCORED.partition("/")[0]]
                self._writer.send(factories.step(version, version, trained, self._writer.places))

    def _policy(self, version: int) -> Policy:
        part = ring.slot(version, RING)
        places = [(topic, part) for topic in (self.topics.chunks, self.topics.trajectories)]
        return factories.policy(version, self.name, self._writer.slots(places))

    def _generate(self, group: Admission, sample: int) -> None:
        identity = ring.trajectory_id(group.group_id, sample)
        tokens = [*self._tokenizer.encode(self.response(group.ordinal, sample)), 1]
        ends = [*range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS), len(tokens)]
        if identity == TAKEN_OVER:
            # the lost worker wrote one chunk more than the next one went on from
            self._writer.send(
                factories.chunk_of(group, sample, 0, 0, tokens[:2]),
                factories.chunk_of(group, sample, 1, 2, [3, 3], created_ms=100),
            )
        failed, attempt = identity == UNSCORED, int(identity == TAKEN_OVER)
        record = factories.trajectory(
            group,
            sample,
            prompt=self.prompt(group.ordinal).token_ids,
            tokens=tokens,
            logprob=0.0,
            reward=None if failed else float(sample == 0),
            attempt=attempt,
            chunks=len(ends),
            finish_reason="stop",
            text=self.response(group.ordinal, sample),
            error="verifier_timeout: too slow" if failed else None,
        )
        begin = 0
        for sequence, end in enumerate(ends[:1] if identity == UNFINISHED else ends):
            chunk = factories.chunk_of(
                group,
                sample,
                sequence,
                begin,
                tokens[begin:end],
                attempt=attempt,
                created_ms=100 * sequence,
                last=end == len(tokens),
                resumed_tokens=CHUNK_TOKENS if attempt and not sequence else 0,
            )
            self._writer.send(chunk)
            begin = end
        if identity != UNFINISHED:
            self._writer.send(record)
