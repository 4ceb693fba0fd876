"""Reading configurations: what is refused is refused with its key, place and expectation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dora.config.loading import (
    KafkaOverrides,
    load_config,
    load_kafka_section,
    read_properties,
    to_toml,
)
from dora.errors import ConfigError
from tests.configurations import MINIMAL

ROOT = Path(__file__).parents[2]
SHIPPED = [*ROOT.glob("examples/*.toml"), *ROOT.glob("ops/**/*.toml")]

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return _write


def refusal(path: Path, **options: object) -> str:
    options.setdefault("environment", {})
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_minimal_file_is_enough_and_home_is_its_directory(write: Write, tmp_path: Path) -> None:
    config = load_config(write(MINIMAL), environment={})
    assert config.run.name == "demo"
    assert config.window.max_staleness == 1
    assert config.home == tmp_path


def test_environment_beats_the_file_and_set_beats_the_environment(write: Write) -> None:
    path = write(MINIMAL)
    environment = {"DORA_TRAINER__STEPS": "5", "DORA_TRAINER__LOSS__KIND": "gspo", "DORA_X": "?"}
    config = load_config(path, environment=environment)
    assert (config.trainer.steps, config.trainer.loss.kind) == (5, "gspo")
    config = load_config(path, environment=environment, sets=["trainer.steps=7"])
    assert config.trainer.steps == 7


def test_set_reads_toml_values_and_falls_back_to_text(write: Write) -> None:
    config = load_config(
        write(MINIMAL),
        environment={},
        sets=[
            "run.name=7",
            "rollout.stop_token_ids=[1, 2]",
            "rollout.seeded=false",
            "trainer.optimizer.learning_rate=3e-4",
            "task.parameters={max_word_len = 4}",
            'policy.tokenizer="a=b"',
        ],
    )
    assert config.run.name == "7"
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.rollout.seeded is False
    assert config.trainer.optimizer.learning_rate == 3e-4
    assert config.task.parameters == {"max_word_len": 4}
    assert config.policy.tokenizer == "a=b"


def test_kafka_options_beat_everything_else(write: Write, tmp_path: Path) -> None:
    properties = tmp_path / "client.properties"
    properties.write_text(
        "# cluster\nbootstrap.servers=file:9092\nsasl.password = from=file\nsecurity.protocol=SSL\n"
    )
    config = load_config(
        write(MINIMAL + '[kafka]\nbootstrap_servers = "toml:9092"\n'),
        environment={"DORA_KAFKA__PROPERTIES__SSL_CA_LOCATION": "/ca.pem"},
        sets=["kafka.properties.security.protocol=PLAINTEXT"],
        kafka=KafkaOverrides(None, {"client.rack": "r1"}, (properties,)),
    )
    assert config.kafka.bootstrap_servers == "file:9092"
    values = {k: v.get_secret_value() for k, v in config.kafka.properties.items()}
    assert values == {
        "ssl.ca.location": "/ca.pem",
        "security.protocol": "SSL",
        "sasl.password": "from=file",
        "client.rack": "r1",
    }
    config = load_config(
        write(MINIMAL), environment={}, kafka=KafkaOverrides("option:9092", {}, (properties,))
    )
    assert config.kafka.bootstrap_servers == "option:9092"


def test_properties_may_be_dotted_tables_with_numbers_and_booleans(write: Write) -> None:
    text = (
        "[kafka.properties]\nsecurity.protocol = 'SSL'\n'socket.timeout.ms' = 5000\n"
        "enable.ssl.certificate.verification = false\n"
    )
    config = load_config(write(MINIMAL + text), environment={})
    values = {k: v.get_secret_value() for k, v in config.kafka.properties.items()}
    assert values == {
        "security.protocol": "SSL",
        "socket.timeout.ms": "5000",
        "enable.ssl.certificate.verification": "false",
    }


def test_a_run_command_reads_the_kafka_section_alone() -> None:
    section = load_kafka_section(
        environment={"DORA_KAFKA__BOOTSTRAP_SERVERS": "env:9092", "DORA_RUN__NAME": "ignored"},
        kafka=KafkaOverrides(None, {"client.rack": "r1"}),
    )
    assert section.bootstrap_servers == "env:9092"
    assert list(section.properties) == ["client.rack"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "no.toml") in refusal(tmp_path / "no.toml")


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path)


def test_a_syntax_error_is_named_with_line_and_column(write: Write) -> None:
    assert "no valid TOML" in refusal(write("[run]\na = \n"))
    assert "line 2, column 5" in refusal(write("[run]\na = \n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[window]\nmax_stalenes = 2\n", ["window.max_stalenes", "line 12", "max_staleness?"]),
        ("[trainer.loss]\nlearning_rate = 1\n", ["did you mean trainer.optimizer.learning_rate?"]),
        ("[windw]\nx = 1\n", ["windw", "unknown section", "did you mean window?"]),
        ("[rollout]\ntemperature = 0.005\n", ["rollout.temperature", "or equal to 0.01"]),
        (
            "[trainer.loss]\npreset = 'ppo'\n",
            ["trainer.loss.preset", "'ppo' given", "one of 'dapo'"],
        ),
        ("[rollout]\ntop_p = 3\n", ["rollout.top_p", "3 given", "less than or equal to 1"]),
        ("[rollout]\ncapacity = 'many'\n", ["rollout.capacity", "'many' given", "a whole number"]),
        ("[rollout]\ncapacity = 1.5\n", ["1.5 given", "a whole number"]),
        ("[rollout]\nworkers = 1.0\n", ["rollout.workers", "1.0 given", "a whole number"]),
        ("[rollout]\nmax_new_tokens = true\n", ["true given", "a whole number expected"]),
        ("[rollout]\nenforce_eager = 'yes'\n", ["'yes' given", "true or false expected"]),
        ("[rollout]\ntop_p = '0.5'\n", ["'0.5' given", "a number expected"]),
        ("[rollout]\nengine = 'tpu'\n", ["'tpu' given", "one of 'vllm', 'emulated'"]),
        ("rollout = 3\n", ["rollout", "3 given", "a table expected"]),
        ("home = '/'\n", ["home is not a key"]),
    ],
)
def test_a_wrong_key_or_value_is_explained(write: Write, text: str, expected: list[str]) -> None:
    text = text + MINIMAL if not text.startswith("[") else MINIMAL + text
    message = refusal(write(text))
    assert all(part in message for part in expected), message
    assert "pydantic" not in message


def test_a_missing_key_is_explained_with_its_documentation(write: Write) -> None:
    message = refusal(write(MINIMAL.replace("steps = 3", "")))
    assert "trainer.steps: this key is missing. Committed steps" in message


def test_all_problems_are_listed_at_once_each_with_its_place(write: Write) -> None:
    message = refusal(
        write(MINIMAL + "[rollout]\ntop_p = 3\n"),
        environment={"DORA_ROLLOUT__TOP_K": "x", "DORA_NO__KEY": "1"},
        sets=["run.max_restarts=-1"],
    )
    assert "4 problems" in message
    assert "(run.toml, line 12)" in message
    assert "(environment variable DORA_ROLLOUT__TOP_K)" in message
    assert "no (environment variable DORA_NO__KEY): unknown section" in message
    assert "run.max_restarts (--set): -1 given" in message


def test_a_group_of_one_sample_is_refused_where_it_would_teach_nothing(write: Write) -> None:
    one = MINIMAL + "[window]\ngroup_size = 1\n"
    with pytest.raises(ConfigError, match=r"window\.group_size = 1 teaches nothing"):
        load_config(write(one), environment={})
    load_config(
        write(one), environment={}, sets=["trainer.engine=emulated", "rollout.engine=emulated"]
    )


def test_an_impossible_combination_is_refused_in_plain_words(write: Write) -> None:
    message = refusal(write(MINIMAL), sets=["trainer.updates_per_step=3"])
    assert message.endswith(
        "window.groups_per_step (32) must be divisible by trainer.updates_per_step (3)"
    )


@pytest.mark.parametrize("text", ["trainer.steps", "steps=3", "=3", ".steps=3", "trainer..steps=3"])
def test_a_malformed_set_is_refused(write: Write, text: str) -> None:
    assert "section.key=value" in refusal(write(MINIMAL), sets=[text])


def test_a_set_below_a_plain_value_is_refused(write: Write) -> None:
    assert "run.name is not a table" in refusal(write(MINIMAL), sets=["run.name.first=x"])


def test_secrets_are_never_repeated(write: Write, tmp_path: Path) -> None:
    properties = tmp_path / "client.properties"
    properties.write_text("security.protocol=SSL\nhunter2\n")
    with pytest.raises(ConfigError) as caught:
        read_properties(properties)
    assert "line 2" in str(caught.value) and "hunter2" not in str(caught.value)
    message = refusal(write(MINIMAL + "[kafka.properties]\n'sasl.password' = ['hunter2']\n"))
    assert "kafka.properties.sasl.password" in message and "hunter2" not in message
    overrides = KafkaOverrides(None, {"sasl.password": "hunter2"})
    config = load_config(write(MINIMAL), environment={}, kafka=overrides)
    assert "hunter2" not in repr(config) + repr(overrides)


def test_a_written_loss_has_the_values_that_differ_from_those_of_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{MINIMAL}\nloss = {{ kind = "gspo", clip_low = 0.2, clip_high = 0.2 }}\n')
    config = load_config(file, environment={})
    file.write_text(to_toml(config))
    assert load_config(file, environment={}) == config


def test_a_key_of_deepspeed_that_dora_has_is_refused_while_the_file_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"{MINIMAL}\n[trainer.deepspeed]\nbf16 = {{ enabled = true }}\n")
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed\.bf16: set policy\.dtype instead"):
        load_config(file, environment={})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_configuration_that_is_shipped_is_accepted(path: Path) -> None:
    assert load_config(path, environment={}).run.name
