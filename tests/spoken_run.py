"""A small run whose trajectories have real texts and rewards, written record by record."""

import json
from dataclasses import replace
from pathlib import Path

from dora.bus import ClusterSettings, LogWriter, RunTopics, TopicAdmin, topic_plan
from dora.core import ring
from dora.producers.tasks.base import Prompt, create_task
from dora.producers.tasks.tokenization import Tokenizer, load_tokenizer
from dora.schemas.records import (
    Admission,
    Chunk,
    Policy,
    RunStarted,
    SlotOffset,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)
from tests import factories
from tests.factories import SAMPLING
from tests.small_run import SmallRun

K, B, G = 1, 2, 2
RING = K + 2
STEPS = 2
TAKEN_OVER, UNFINISHED, UNSCORED = "g1/0", "g5/1", "g2/1"
CHUNK_TOKENS = 2
DEADLINE = 30.0
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
        self._ends: dict[tuple[str, int], int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._tokenizer: Tokenizer = load_tokenizer(self.config.policy)
        self._task = create_task(self.config, self._tokenizer)
        with LogWriter(settings, client_id="test") as writer:
            self._writer = writer
            self._write()
            writer.flush(DEADLINE)

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of a group."""
        return self._task.prompt(ordinal, "train")

    def response(self, ordinal: int, sample: int) -> str:
        """What was generated for it."""
        return str(self.prompt(ordinal).item["answer"]) + "x" * sample

    def _write(self) -> None:
        config = self.config
        started = RunStarted(
            self.name, "id", "0.1.0", json.dumps(config.identity()), K, B, G, RING, 1, "cluster",
            {}, 0, json.dumps(config.recorded()),
        )  # fmt: skip
        self._send(self.topics.steps, started)
        groups = [factories.admission(o, o // B, self.name) for o in range(B * (STEPS + 1))]
        for version in range(STEPS + 1):
            self._send(self.topics.policies, self._policy(version))
            mine = [g for g in groups if g.policy_version == version]
            for group in mine:
                self._send(self.topics.dispatch, group)
                for sample in range(G):
                    self._generate(group, sample)
            if version < STEPS:
                trained = [g for g in mine if g.group_id != UNSCORED.partition("/")[0]]
                step = factories.step(version, version, trained, self._places)
                self._send(self.topics.steps, step)

    def _policy(self, version: int) -> Policy:
        part = ring.slot(version, RING)
        slots = [
            SlotOffset(topic, part, self._ends.get((topic, part), 0))
            for topic in (self.topics.chunks, self.topics.trajectories)
        ]
        return factories.policy(version, self.name, tuple(slots))

    def _generate(self, group: Admission, sample: int) -> None:
        part = ring.slot(group.policy_version, RING)
        identity = ring.trajectory_id(group.group_id, sample)
        text = self.response(group.ordinal, sample)
        tokens = [*self._tokenizer.encode(text), 1]
        ends = [*range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS), len(tokens)]
        if identity == TAKEN_OVER:
            # the lost worker wrote one chunk more than the next one went on from
            self._send(self.topics.chunks, self._chunk(group, sample, 0, 0, 0, tokens[:2]), part)
            self._send(self.topics.chunks, self._chunk(group, sample, 0, 1, 2, [3, 3]), part)
        attempt, begin = int(identity == TAKEN_OVER), 0
        for sequence, end in enumerate(ends[:1] if identity == UNFINISHED else ends):
            chunk = self._chunk(group, sample, attempt, sequence, begin, tokens[begin:end])
            chunk = replace(
                chunk,
                last=end == len(tokens),
                resumed_tokens=CHUNK_TOKENS if attempt and not sequence else 0,
            )
            self._send(self.topics.chunks, chunk, part)
            begin = end
        if identity == UNFINISHED:
            return
        prompt = self.prompt(group.ordinal).token_ids
        failed = identity == UNSCORED
        record: Trajectory = replace(
            factories.trajectory(group, sample, reward=None if failed else float(sample == 0)),
            attempt=attempt,
            chunks=len(ends),
            token_ids=pack_tokens([*prompt, *tokens]),
            mask=bytes(len(prompt)) + b"\1" * len(tokens),
            logprobs=pack_logprobs([0.0] * (len(prompt) + len(tokens))),
            version_runs=(VersionRun(group.policy_version, len(tokens)),),
            finish_reason="stop",
            text=text,
            error="verifier_timeout: too slow" if failed else None,
        )
        self._places[identity] = (part, self._send(self.topics.trajectories, record, part))

    def _chunk(
        self, group: Admission, sample: int, attempt: int, sequence: int, begin: int,
        tokens: list[int],
    ) -> Chunk:  # fmt: skip
        return Chunk(
            self.name, ring.trajectory_id(group.group_id, sample), group.group_id, sample, attempt,
            sequence, group.policy_version, group.ordinal, "train", begin, pack_tokens(tokens),
            pack_logprobs([-1.0] * len(tokens)), False, f"w{attempt}", SAMPLING, 100 * sequence,
        )  # fmt: skip

    def _send(self, topic: str, record: object, part: int = 0) -> int:
        offset = self._ends.get((topic, part), 0)
        self._ends[topic, part] = offset + 1
        key = getattr(record, "trajectory_id", None) or str(getattr(record, "version", "")) or None
        self._writer.send(topic, record, key=key, partition=part)  # type: ignore[arg-type]
        return offset
