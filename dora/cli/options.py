"""Options that commands share.

A command that takes a configuration or a run's name gets it checked, with the cluster's
address resolved, or the user gets a message and exit code 2; nothing was started by then.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import click

from dora.config import Config, KafkaSection
from dora.config.loading import KafkaOverrides, load_config, load_kafka_section
from dora.errors import UsageError

BROKER_DIRECTORY = Path(".dora/broker")

Function = Callable[..., Any]

MissingConfig = Callable[[Mapping[str, Any], tuple[str, ...], KafkaOverrides, Path], Path]

SECRET_SETS = ("kafka.properties", "kafka.registry.properties")
"""What `--set` may hold secrets for: not repeated where others see it."""

_SOURCE = "dora.cli.options.source"


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """How the configuration of the running command was given, to give it to other processes."""

    path: Path
    sets: tuple[str, ...]
    broker_directory: Path

    def arguments(self, config: Config) -> list[str]:
        """Command-line arguments that make another process load `config`.

        Kafka properties may be secrets: they travel in `environment`, not where `ps` shows them.
        """
        arguments = [str(self.path.absolute())]
        for text in self.sets:
            if not text.strip().startswith(SECRET_SETS):
                arguments += ["--set", text]
        if config.kafka.bootstrap_servers:
            arguments += ["--bootstrap-server", config.kafka.bootstrap_servers]
        return arguments + registry_arguments(config.kafka)

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Environment variables that go with `arguments`."""
        tables = {"DORA_KAFKA__PROPERTIES__": config.kafka.properties}
        if config.kafka.registry is not None:
            tables["DORA_KAFKA__REGISTRY__PROPERTIES__"] = config.kafka.registry.properties
        return {
            prefix + name.replace(".", "_").upper(): value.get_secret_value()
            for prefix, properties in tables.items()
            for name, value in properties.items()
        }


class KafkaOption(click.Option):
    """An option that says how Kafka is reached."""


class Command(click.Command):
    """A command whose help shows the options about Kafka apart from its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections `Options` and `Kafka`."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Kafka": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kafka = isinstance(parameter, KafkaOption)
                sections["Kafka" if kafka else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def config_source() -> ConfigSource:
    """The source of the configuration of the command that is running."""
    source = click.get_current_context().meta[_SOURCE]
    assert isinstance(source, ConfigSource)
    return source


@overload
def config_argument(command: Function, /) -> Function: ...
@overload
def config_argument(
    *, broker: bool = True, missing: MissingConfig | None = None
) -> Callable[[Function], Function]: ...


def config_argument(
    command: Function | None = None,
    /,
    *,
    broker: bool = True,
    missing: MissingConfig | None = None,
) -> Function | Callable[[Function], Function]:
    """Argument CONFIG with `--set`, `-b`, `-X`, `--kafka-config` and `--registry`; the command gets
    `config`.

    With `broker` (the default) `config.kafka.bootstrap_servers` is set: to what was given, or to
    the local broker if it runs; otherwise the command is refused. With `missing` CONFIG may be left
    out: it gives the file, from the command's other parameters, `sets` and how Kafka is reached.
    Use as `@config_argument` or `@config_argument(broker=False)`, below `@click.command`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(
            *args: Any,
            config_path: Path | None,
            sets: tuple[str, ...],
            bootstrap_servers: str | None,
            properties: Mapping[str, str],
            kafka_config: tuple[Path, ...],
            registry_url: str | None,
            broker_directory: Path,
            accepted: tuple[str, ...],
            **kwargs: Any,
        ) -> Any:
            overrides = KafkaOverrides(bootstrap_servers, properties, kafka_config, registry_url)
            if accepted:
                sets = (*sets, f"run.accept_changed={json.dumps(accepted)}")
            if config_path is None:
                assert missing is not None, "click demands it otherwise"
                config_path = missing(kwargs, sets, overrides, broker_directory)
            config = load_config(config_path, sets=sets, kafka=overrides)
            if broker and config.kafka.bootstrap_servers is None:
                config = with_broker(config, local_broker(broker_directory))
            source = ConfigSource(config_path, sets, broker_directory)
            click.get_current_context().meta[_SOURCE] = source
            return function(*args, config=config, **kwargs)

        override = sets_option("Override a key of the configuration; may be repeated.")
        decorated = override(_accept_option(_kafka_parameters(wrapper)))
        return click.argument(
            "config_path",
            metavar="CONFIG" if missing is None else "[CONFIG]",
            type=click.Path(path_type=Path, dir_okay=False),
            required=missing is None,
        )(decorated)

    return decorate if command is None else decorate(command)


def _accept_option(command: Function) -> Function:
    return click.option(
        "--accept-changed",
        "accepted",
        multiple=True,
        metavar="INPUT",
        help="Go on although this input of the run (task.path, task.verifier, policy.tokenizer) "
        "holds something else than recorded; may be repeated.",
    )(command)


def kafka_options(command: Function) -> Function:
    """`-b`, `-X`, `--kafka-config`, `--registry` and `--broker-dir` for commands that take a run's
    name.

    The command gets `kafka`, a `KafkaSection` whose `bootstrap_servers` is set: from `-b`, from
    `DORA_KAFKA__BOOTSTRAP_SERVERS`, or the local broker's; refused when there is none. A RUN that
    ends in `.toml` is a configuration file: the run is the one that it names, on its cluster.
    """

    @functools.wraps(command)
    def wrapper(
        *args: Any,
        bootstrap_servers: str | None,
        properties: Mapping[str, str],
        kafka_config: tuple[Path, ...],
        registry_url: str | None,
        broker_directory: Path,
        **kwargs: Any,
    ) -> Any:
        overrides = KafkaOverrides(bootstrap_servers, properties, kafka_config, registry_url)
        run = kwargs.get("run")
        if isinstance(run, str) and run.endswith(".toml"):
            config = load_config(Path(run), kafka=overrides)
            kwargs["run"], section = config.run.name, config.kafka
        else:
            section = load_kafka_section(kafka=overrides)
        if section.bootstrap_servers is None:
            address = local_broker(broker_directory)
            section = section.model_copy(update={"bootstrap_servers": address})
        return command(*args, kafka=section, **kwargs)

    return _kafka_parameters(wrapper)


def cluster_options(command: Function) -> Function:
    """`-b`, `-X`, `--kafka-config`, `--registry` and `--broker-dir` for commands that load
    configurations themselves and start a local broker where no cluster is given.

    The command gets `overrides`, for `load_config`, and `broker_directory`.
    """

    @functools.wraps(command)
    def wrapper(
        *args: Any,
        bootstrap_servers: str | None,
        properties: Mapping[str, str],
        kafka_config: tuple[Path, ...],
        registry_url: str | None,
        **kwargs: Any,
    ) -> Any:
        overrides = KafkaOverrides(bootstrap_servers, properties, kafka_config, registry_url)
        return command(*args, overrides=overrides, **kwargs)

    return _kafka_parameters(wrapper)


def from_option(command: Function) -> Function:
    """`--from RUN@STEP`; the command gets `origin`, a text."""
    return click.option(
        "--from",
        "origin",
        metavar="RUN@STEP",
        help="Begin a new run with the weights and the optimizer of this step of another run.",
    )(command)


def json_option(command: Function) -> Function:
    """`--json`; the command gets `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def timeout_option(seconds: float) -> Callable[[Function], Function]:
    """`--timeout` for reading a run's log, by default `seconds`; the command gets `timeout`."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        default=seconds,
        show_default=True,
        metavar="SECONDS",
        help="Give up when reading one topic of the log takes longer.",
    )


def wait_option(command: Function) -> Function:
    """`--wait` for commands that feed a trainer; the command gets `wait`, in seconds."""
    return click.option(
        "--wait",
        type=click.FloatRange(min=1),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="With --serve: give up when no trainer is seen for so long.",
    )(command)


def config_file_option(command: Function) -> Function:
    """`--config` for commands that take a run's name; the command gets `config_file`."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="The run's configuration, if its ledger does not have it.",
    )(command)


def sets_option(text: str) -> Callable[[Function], Function]:
    """`--set`, with the help `text`; the command gets `sets`."""
    return click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help=text)


def registry_arguments(kafka: KafkaSection) -> list[str]:
    """Command-line arguments that give another command the schema registry."""
    return [] if kafka.registry is None else ["--registry", kafka.registry.url]


def with_broker(config: Config, address: str) -> Config:
    """The same configuration with the cluster's address filled in."""
    kafka: KafkaSection = config.kafka.model_copy(update={"bootstrap_servers": address})
    return config.model_copy(update={"kafka": kafka})


def local_broker(directory: Path) -> str:
    """Address of the local broker in `directory`; UsageError if none runs there."""
    from dora.broker.local import running_broker

    broker = running_broker(directory)
    if broker is None:
        raise UsageError(
            f"no Kafka cluster given, and no local broker runs in {directory}",
            hint="Start one with `dora broker start`, or name a cluster with "
            "-b HOST:PORT or DORA_KAFKA__BOOTSTRAP_SERVERS.",
        )
    return str(broker.bootstrap_servers)


def print_line(text: str) -> None:
    """One line on standard output, at once: others may follow it through a pipe."""
    click.echo(text)
    sys.stdout.flush()


def _kafka_parameters(command: Function) -> Function:
    options = (
        click.option(
            "-b",
            "--bootstrap-server",
            "bootstrap_servers",
            metavar="HOST:PORT",
            help="Kafka cluster; by default the configuration's, or the local broker.",
            cls=KafkaOption,
        ),
        click.option(
            "-X",
            "properties",
            multiple=True,
            metavar="KEY=VALUE",
            callback=key_values,
            help="Any librdkafka property (TLS, SASL, OAuth); may be repeated.",
            cls=KafkaOption,
        ),
        click.option(
            "--kafka-config",
            "kafka_config",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="File with librdkafka properties, key=value a line.",
            cls=KafkaOption,
        ),
        click.option(
            "--registry",
            "registry_url",
            metavar="URL",
            help="Schema registry (Confluent's API) that names the records' schemas.",
            cls=KafkaOption,
        ),
        click.option(
            "--broker-dir",
            "broker_directory",
            type=click.Path(path_type=Path),
            default=BROKER_DIRECTORY,
            show_default=True,
            envvar="DORA_BROKER_DIR",
            show_envvar=True,
            metavar="DIR",
            help="Directory of the local broker, used when no cluster is given.",
            cls=KafkaOption,
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def key_values(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Callback of an option that is given as KEY=VALUE, and may be repeated."""
    properties = {}
    for text in values:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            # The text may be a secret: it is not repeated.
            raise click.BadParameter("not of the form KEY=VALUE", context, parameter)
        properties[key.strip()] = value
    return properties
