"""The command line without a cluster: help, exit codes, messages, arguments for children."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dora.cli.main import COMMANDS, LazyGroup, cli
from dora.cli.options import ConfigSource, config_argument, config_source, kafka_options
from dora.cli.train import rank_devices
from dora.config import Config, KafkaSection
from dora.config.loading import load_config
from dora.errors import FencedError, RunError, UsageError
from tests.configurations import MINIMAL


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def group_of(command: click.Command) -> LazyGroup:
    group = LazyGroup("test", entries={})
    group.add_command(command)
    group.get_command = lambda ctx, name: group.commands.get(name)  # type: ignore[method-assign]
    return group


@click.command("show")
@config_argument
def show(config: Config) -> None:
    """Show."""
    click.echo(f"{config.kafka.bootstrap_servers} {config_source().arguments(config)[1:]}")


@click.command("look")
@click.argument("run")
@kafka_options
def look(run: str, kafka: KafkaSection) -> None:
    """Look."""
    click.echo(f"{run} {kafka.bootstrap_servers} {sorted(kafka.properties)}")


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from dora.cli.main import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pydantic', 'confluent_kafka', 'rich'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert all(name in done.stdout for name, entry in COMMANDS.items() if not entry.hidden)
    assert "prepare" not in done.stdout


@pytest.mark.parametrize("name", ["run", "status", "tail", "doctor", "prepare"])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["explode"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no.toml"], "error: no configuration file no.toml"),
        (["run", "run.toml", "--set", "window.max_stalenes=1"], "did you mean"),
        (["run", "run.toml", "--set", "window"], "section.key=value"),
        (["run", "run.toml", "-X", "secret-without-key"], "KEY=VALUE"),
        (["run", "run.toml", "--kafka-config", "no.properties"], "no.properties"),
        (["status", "demo", "--broker-dir", "nowhere"], "no local broker runs in nowhere"),
        (["tail", "demo", "-o", "middle"], "beginning, end, -N, OFFSET or s@WHEN"),
        (["tail", "demo", "-t", "everything"], "chunks"),
    ],
)
def test_bad_input_ends_with_code_2_and_says_why(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(config_file.parent)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "secret-without-key" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code"), [(RunError("no", hint="do this"), 1), (FencedError("no"), 4)]
)
def test_an_error_is_shown_with_its_hint_and_exit_code(error: RunError, code: int) -> None:
    @click.command("fail")
    def fail() -> None:
        raise error

    result = CliRunner().invoke(group_of(fail), ["fail"])
    assert result.exit_code == code
    assert "error: no\n" in result.output
    assert ("  do this\n" in result.output) == (error.hint is not None)


def test_an_interruption_ends_with_code_130() -> None:
    @click.command("wait")
    def wait() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(group_of(wait), ["wait"]).exit_code == 130


def test_a_command_gets_the_cluster_and_what_makes_a_child_load_the_same(config_file: Path) -> None:
    arguments = ["show", str(config_file), "-b", "kafka:9092", "--set", "run.seed=3"]
    result = CliRunner().invoke(group_of(show), [*arguments, "-X", "sasl.password=hunter2"])
    assert result.exit_code == 0
    expected = ["--set", "run.seed=3", "--bootstrap-server", "kafka:9092"]
    assert result.output == f"kafka:9092 {expected}\n"


def test_without_a_cluster_or_a_local_broker_a_command_is_refused(
    config_file: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        group_of(show), ["show", str(config_file), "--broker-dir", str(tmp_path / "broker")]
    )
    assert result.exit_code == 2
    assert "dora broker start" in result.output


def test_children_get_secrets_through_the_environment_only(config_file: Path) -> None:
    sets = ("kafka.properties.sasl.password=hunter2", "run.seed=3")
    config = load_config(config_file, sets=sets, environment={})
    source = ConfigSource(config_file, sets, Path("broker"))
    assert "hunter2" not in " ".join(source.arguments(config))
    child = load_config(
        Path(source.arguments(config)[0]),
        sets=("run.seed=3",),
        environment=source.environment(config),
    )
    assert child == config


def test_a_run_command_takes_the_cluster_from_option_or_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DORA_KAFKA__BOOTSTRAP_SERVERS", "env:9092")
    result = CliRunner().invoke(group_of(look), ["look", "demo", "-X", "client.rack=a"])
    assert result.output == "demo env:9092 ['client.rack']\n"
    result = CliRunner().invoke(group_of(look), ["look", "demo", "-b", "option:9092"])
    assert result.output == "demo option:9092 []\n"


@pytest.mark.parametrize("command", ["run", "status", "topics create", "export", "tail", "train"])
def test_help_shows_the_options_about_kafka_in_a_group_of_their_own(command: str) -> None:
    text = CliRunner().invoke(cli, [*command.split(), "--help"]).output
    own, kafka = text.split("\nKafka:\n")
    for option in ("--bootstrap-server", "-X KEY=VALUE", "--kafka-config", "--registry"):
        assert option in kafka and option not in own.split("\nOptions:\n")[1]
    assert "--help" in own


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
        ("4,5", ["4", "5"]),
        ("7, 3, 1", ["7", "3"]),
        ("GPU-8f1c,MIG-22ab", ["GPU-8f1c", "MIG-22ab"]),
    ],
)
def test_ranks_take_the_devices_that_are_visible(visible: str | None, devices: list[str]) -> None:
    assert rank_devices(2, visible) == devices


@pytest.mark.parametrize("visible", ["4", "4,4", "4,5,4"])
def test_too_few_devices_or_one_named_twice_are_refused(visible: str) -> None:
    with pytest.raises(UsageError, match=r"trainer\.ranks = 2 .* CUDA_VISIBLE_DEVICES = 4"):
        rank_devices(2, visible)
