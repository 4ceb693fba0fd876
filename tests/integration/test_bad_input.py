"""Bad configuration, model, data and cluster: message and exit code of the real command line."""

import shutil
import time
from pathlib import Path

import pytest

from dora.bus import ClusterSettings, LogWriter, TopicAdmin, topic_plan
from dora.cli.main import COMMANDS
from dora.schemas.records import RunStarted
from tests.small_run import CONFIG, SmallRun, dora, make_model, refused

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "max_staleness",
            "max_stalenes",
            ["window.max_stalenes (run.toml, line", "did you mean window.max_staleness?"],
        ),
        ("[window]", "[windw]", ["windw (run.toml, line", "did you mean window?"]),
        ("steps = 2", 'steps = "two"', ["trainer.steps (run.toml, line", "a whole number"]),
        ("steps = 2", "steps = 0", ["trainer.steps", "0 given", "greater than or equal to 1"]),
        ('"emulated"', '"sglang"', ["rollout.engine", "one of 'vllm', 'emulated'"]),
        (
            "max_staleness = 1",
            "max_staleness = -1",
            ["window.max_staleness", "-1 given", "greater than or equal to 0"],
        ),
        ("[task]", "[kafka]\nlanes = 0\n[task]", ["kafka.lanes", "0 given"]),
        (
            "[trainer]",
            "[trainer]\nupdates_per_step = 3",
            ["window.groups_per_step (2) must be divisible by trainer.updates_per_step (3)"],
        ),
        ("capacity = 8", "capacity = 1", ["rollout.capacity (1) must hold one group"]),
        (
            "heartbeat_timeout_seconds = 5",
            "heartbeat_timeout_seconds = 0.3",
            ["rollout.heartbeat_timeout_seconds must be at least 3 times"],
        ),
        (
            "capacity = 8",
            "capacity = 8\nmax_model_len = 4",
            ["rollout.max_model_len (4) is shorter than", "(16)"],
        ),
        (
            "max_new_tokens = 8",
            "max_new_tokens = 1000000",
            ["kafka.max_message_bytes (8388608) is too small for trajectories of 1000008 tokens"],
        ),
        ('verifier = "scoring:verify"', "", ["task.verifier is needed"]),
        ('verifier = "scoring:verify"', 'verifier = "scoring"', ["task.verifier", "'scoring'"]),
        ("[window]", "[window", ["run.toml is no valid TOML", "at line 15"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_configuration_is_refused_with_its_key_and_line(
    tmp_path: Path, old: str, new: str, parts: list[str]
) -> None:
    path = tmp_path / "run.toml"
    text = CONFIG.format(run="demo", directory=tmp_path, model=tmp_path)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    started = time.monotonic()
    for command in ("run", "train"):
        refused(dora(command, str(path), "-b", NOWHERE), 2, *parts)
    assert time.monotonic() - started < 5, "refused before anything is asked of the cluster"


@pytest.mark.parametrize("name", ["Demo", "my run", "a/b", "../up", "", "_x", "x" * 101, "läufe"])
def test_a_run_name_with_illegal_characters_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(run=name, directory=tmp_path, model=tmp_path))
    refused(
        dora("run", str(path), "-b", NOWHERE),
        2,
        "run.name (run.toml, line 2)",
        "lower-case letters",
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--set", "trainer.stepz=3"), ["trainer.stepz (--set)", "did you mean trainer.steps?"]),
        (("--set", "steps"), ["--set steps: not of the form section.key=value"]),
        (("-X", "no.such.property=1"), ['No such configuration property: "no.such.property"']),
        (("-X", "enable.idempotence=false"), ["must not set enable.idempotence"]),
        (("--kafka-config", "missing.properties"), ["missing.properties"]),
    ],
)
def test_a_wrong_option_is_refused(
    small: SmallRun, options: tuple[str, ...], parts: list[str]
) -> None:
    refused(small.dora("train", *options), 2, *parts)


def test_an_environment_variable_that_names_no_key_is_refused(small: SmallRun) -> None:
    result = small.dora("train", env={"DORA_TRAINER__STEPZ": "3"})
    refused(result, 2, "environment variable DORA_TRAINER__STEPZ", "did you mean trainer.steps?")


def test_a_missing_model_directory_is_named_with_what_may_stand_there(
    small: SmallRun, settings: ClusterSettings, tmp_path: Path
) -> None:
    gone = f"policy.model={tmp_path / 'gone'}"
    small.make_topics(settings)
    refused(
        small.dora("train", "--set", gone), 1, "there is no directory", "gone", "policy.prepare"
    )
    refused(small.dora("rollout", "--set", gone), 1, "gone", "no such directory")
    checked = small.dora("run", "--dry-run", "--set", gone)
    assert checked.exit_code == 1
    assert "there is no directory" in " ".join(checked.stdout.split())


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    small: SmallRun, settings: ClusterSettings, tmp_path: Path
) -> None:
    larger = make_model(tmp_path / "larger", words=VOCABULARY_TOO_LARGE)
    small.make_topics(settings)
    refused(
        small.dora("rollout", "--set", f"policy.tokenizer={larger}"),
        1,
        f"token ids up to {VOCABULARY_TOO_LARGE - 1}",
        "a vocabulary of 40",
        "do not belong together",
    )


VOCABULARY_TOO_LARGE = 64


def test_a_model_without_safetensors_is_refused_with_how_to_convert_it(
    small: SmallRun, settings: ClusterSettings, tmp_path: Path
) -> None:
    pickled = shutil.copytree(small.model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    small.make_topics(settings)
    refused(
        small.dora("train", "--set", f"policy.model={pickled}"),
        1,
        f"policy.model: {pickled} has no *.safetensors files",
        "save_pretrained",
    )


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ('{"prompt": "sun", "answer": "nus"}\n{"prompt": "mo\n', "words.jsonl, line 2: not JSON"),
        (
            '{"prompt": "sun", "answer": "nus"}\n\n[1]\n',
            "words.jsonl, line 3: holds list, not an object",
        ),
        ('{"prompt": "sun"}\n', 'words.jsonl, line 1: has no field "answer"'),
        (
            '{"prompt": "abcdefghijkl", "answer": ""}\n',
            "words.jsonl, line 1: the prompt has 12 tokens, task.max_prompt_tokens allows 8",
        ),
        ("", "words.jsonl holds no prompts"),
        ("\n\n", "words.jsonl holds no prompts"),
    ],
)
def test_a_broken_data_set_is_refused_with_file_and_line(
    small: SmallRun, settings: ClusterSettings, lines: str, part: str
) -> None:
    small.data.write_text(lines)
    small.make_topics(settings)
    refused(small.dora("rollout"), 1, part)


def test_a_data_set_that_is_not_there_is_refused(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.data.unlink()
    small.make_topics(settings)
    refused(small.dora("rollout"), 1, "words.jsonl cannot be opened", "beside the configuration")


@pytest.mark.parametrize(
    ("code", "verifier", "parts"),
    [
        (None, "scorers:verify", ["no module scorers in", "beside the configuration file"]),
        ("import no_such_library\n", "broken:verify", ["needs the module no_such_library"]),
        ("def verify(:\n", "broken:verify", ["importing broken failed: SyntaxError"]),
        ("def verfy(r, i): ...\n", "broken:verify", ['has no "verify"', "It defines: verfy"]),
        ("verify = 1\n", "broken:verify", ["is of type int, not a function"]),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_refused_before_anything_is_generated(
    small: SmallRun,
    settings: ClusterSettings,
    code: str | None,
    verifier: str,
    parts: list[str],
) -> None:
    if code is not None:
        (small.directory / "broken.py").write_text(code)
    checked = small.dora("run", "--dry-run", "--set", f"task.verifier={verifier}")
    assert checked.exit_code == 1
    small.make_topics(settings)
    refused(small.dora("rollout", "--set", f"task.verifier={verifier}"), 1, verifier, *parts)


def test_a_verifier_that_always_fails_is_refused_by_a_dry_run_and_by_each_worker(
    small: SmallRun, settings: ClusterSettings
) -> None:
    (small.directory / "broken.py").write_text("def verify(r, i):\n    return i['gone']\n")
    sets = ("--set", "task.verifier=broken:verify", "--set", "rollout.engine=vllm")
    said = ["gives no score to the reference answer", "words.jsonl, line", "KeyError: 'gone'"]
    checked = small.dora("run", "--dry-run", *sets)
    assert checked.exit_code == 1
    table = " ".join(checked.output.split())
    assert said[0] in table and said[2] in table, table
    small.make_topics(settings)
    refused(small.dora("rollout", *sets), 1, "broken:verify", *said)


QUICK = {"DORA_KAFKA__CONNECT_TIMEOUT_SECONDS": "0.5"}


@pytest.mark.parametrize("command", ["run", "train", "coordinator", "rollout"])
def test_an_unreachable_broker_is_named_by_every_part_of_a_run(
    small: SmallRun, command: str
) -> None:
    result = dora(command, str(small.path), "-b", NOWHERE, env=QUICK)
    refused(result, 1, f"Kafka at {NOWHERE} did not answer while connecting for 0.5 s", "broker")


@pytest.mark.parametrize("command", ["status", "tail", "audit", "topics describe", "topics delete"])
def test_an_unreachable_broker_is_named_by_every_command_that_reads(command: str) -> None:
    assert command.split()[0] in COMMANDS
    result = dora(*command.split(), "demo", "-b", NOWHERE, env=QUICK)
    refused(result, 1, f"Kafka at {NOWHERE} did not answer while connecting for 0.5 s", "broker")


def test_an_unreachable_broker_is_given_up_after_ten_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    refused(dora("status", "demo", "-b", NOWHERE), 1, f"Kafka at {NOWHERE} did not answer")
    assert time.monotonic() - started < 11.5


def test_a_missing_topic_is_named(small: SmallRun, settings: ClusterSettings) -> None:
    with TopicAdmin(settings) as admin:
        plan = topic_plan(small.config())
        admin.create([spec for spec in plan if not spec.name.endswith(".policies")])
    for command in ("train", "coordinator", "rollout"):
        refused(
            small.dora(command), 1, f"{small.name}.policies is missing", "create CONFIG --exist-ok"
        )


def test_a_run_without_topics_is_refused_by_its_parts(small: SmallRun) -> None:
    refused(small.dora("coordinator"), 1, f"{small.name}.steps is missing")
    refused(small.look("audit"), 1, f"has no run {small.name}")


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (
            "window.max_staleness=3",  # the ring is too small for it
            ["trajectories has 3 partitions, the configuration needs 5", "window.max_staleness"],
        ),
        ("kafka.lanes=4", ["chunks has 3 partitions, the configuration needs 12"]),
        ("kafka.dispatch_partitions=5", ["dispatch has 9 partitions", "needs 5"]),
        ("kafka.max_message_bytes=9000000", ["max.message.bytes=8388608", "needs 9000000"]),
    ],
)
def test_topics_of_another_shape_are_refused_with_both_numbers(
    small: SmallRun, settings: ClusterSettings, sets: str, parts: list[str]
) -> None:
    small.make_topics(settings)
    for command in ("train", "coordinator", "rollout"):
        refused(small.dora(command, "--set", sets), 1, *parts)


def test_a_run_that_exists_with_another_configuration_is_refused_with_the_differences(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    with LogWriter(settings, client_id="test") as writer:
        writer.send(small.topics.steps, started(small, settings), key=small.name, partition=0)
    sets = ("--set", "trainer.loss.clip_low=0.1", "--set", "window.groups_per_step=4")
    for command in ("train", "coordinator", "rollout"):
        result = small.dora(command, *sets)
        refused(
            result,
            1,
            f"run {small.name} was started with another configuration: "
            "window.groups_per_step: recorded 2, given 4",
            f"dora topics delete {small.name} --yes",
        )
        assert "clip_low" not in result.stderr, "it may change"


def test_a_run_on_topics_that_were_made_anew_is_refused(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    record = started(small, settings)
    record.topic_ids[small.topics.chunks] = "of-the-topic-that-was-deleted"
    with LogWriter(settings, client_id="test") as writer:
        writer.send(small.topics.steps, record, key=small.name, partition=0)
    for command in ("train", "coordinator", "rollout", "run"):
        refused(small.dora(command), 1, f"{small.topics.chunks}: deleted and created anew")


def test_a_run_whose_log_was_copied_to_another_cluster_is_refused(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    record = started(small, settings)
    here = record.cluster_id
    object.__setattr__(record, "cluster_id", "where-it-began")
    with LogWriter(settings, client_id="test") as writer:
        writer.send(small.topics.steps, record, key=small.name, partition=0)
    for command in ("train", "coordinator", "rollout", "run"):
        refused(
            small.dora(command),
            1,
            f"run {small.name} was started on Kafka cluster where-it-began, this is {here}",
            "offsets of another one mean nothing",
        )


def started(small: SmallRun, settings: ClusterSettings) -> RunStarted:
    """The first record of the run's ledger, as its trainer writes it."""
    import json

    config = small.config()
    with TopicAdmin(settings) as admin:
        return RunStarted(
            small.name, "id", "0.1.0", json.dumps(config.identity()), config.window.max_staleness,
            config.window.groups_per_step, config.window.group_size, config.window.ring,
            config.kafka.lanes, admin.cluster_id(), admin.topic_ids(small.name), 0,
        )  # fmt: skip
