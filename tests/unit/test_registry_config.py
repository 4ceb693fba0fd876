"""How a schema registry is configured: file, environment, options, and what never leaves them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dora.bus.schema_registry import SchemaRegistry
from dora.bus.settings import cluster_settings
from dora.cli.options import ConfigSource, registry_arguments
from dora.config import Config
from dora.config.kafka import RegistrySection
from dora.config.loading import KafkaOverrides, load_config, load_kafka_section, to_toml
from dora.errors import ConfigError
from tests.configurations import MINIMAL

SECTION = """
[kafka]
bootstrap_servers = "broker:9092"
[kafka.registry]
url = "https://registry:8081"
[kafka.registry.properties]
basic.auth.user.info = "ann:hush"
ssl.ca.location = "/ca.pem"
"""


def load(
    directory: Path, text: str, *sets: str, env: Mapping[str, str] = {}, url: str | None = None
) -> Config:
    path = directory / "run.toml"
    path.write_text(MINIMAL + text)
    overrides = KafkaOverrides(registry=url)
    return load_config(path, sets=sets, environment=env, kafka=overrides)


def test_properties_have_dots_wherever_they_are_given(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SECTION,
        "kafka.registry.properties.ssl.key.location=/key.pem",
        env={"DORA_KAFKA__REGISTRY__PROPERTIES__SSL_CERTIFICATE_LOCATION": "/cert.pem"},
    )
    assert config.kafka.registry is not None
    found = {k: v.get_secret_value() for k, v in config.kafka.registry.properties.items()}
    assert found == {
        "basic.auth.user.info": "ann:hush",
        "ssl.ca.location": "/ca.pem",
        "ssl.certificate.location": "/cert.pem",
        "ssl.key.location": "/key.pem",
    }


def test_the_option_beats_set_environment_and_file(tmp_path: Path) -> None:
    environment = {"DORA_KAFKA__REGISTRY__URL": "http://env"}
    steps: list[tuple[str, Config]] = [
        ("https://registry:8081", load(tmp_path, SECTION)),
        ("http://env", load(tmp_path, SECTION, env=environment)),
        ("http://set", load(tmp_path, "", "kafka.registry.url=http://set", env=environment)),
        ("http://option", load(tmp_path, SECTION, url="http://option", env=environment)),
    ]
    for url, config in steps:
        assert config.kafka.registry is not None and config.kafka.registry.url == url
    assert load(tmp_path, "").kafka.registry is None


def test_commands_without_a_file_take_it_from_the_environment() -> None:
    environment = {"DORA_KAFKA__REGISTRY__URL": "http://env"}
    section = load_kafka_section(environment=environment, kafka=KafkaOverrides("b:1"))
    assert section.registry is not None and registry_arguments(section) == [
        "--registry",
        "http://env",
    ]
    registry = cluster_settings(section).registry
    assert registry is not None and registry.url == "http://env"
    plain = load_kafka_section(environment={}, kafka=KafkaOverrides("b:1"))
    assert cluster_settings(plain).registry is None and registry_arguments(plain) == []


def test_children_get_secrets_through_the_environment(tmp_path: Path) -> None:
    secret = "kafka.registry.properties.ssl.key.password=hush2"
    config = load(tmp_path, SECTION, secret)
    source = ConfigSource(tmp_path / "run.toml", (secret, "trainer.steps=4"), tmp_path)
    arguments = source.arguments(config)
    assert "hush" not in " ".join(arguments)
    assert arguments[-2:] == ["--registry", "https://registry:8081"]
    environment = source.environment(config)
    assert environment["DORA_KAFKA__REGISTRY__PROPERTIES__SSL_KEY_PASSWORD"] == "hush2"
    again = load(tmp_path, "", env=environment, url="https://registry:8081")
    assert again.kafka.registry == config.kafka.registry


def test_what_is_recorded_or_written_does_not_say_how_it_is_reached(tmp_path: Path) -> None:
    config = load(tmp_path, SECTION)
    assert "registry" not in config.recorded()["kafka"]
    assert "registry" not in json.dumps(config.identity()) and "registry" not in to_toml(config)
    assert "hush" not in repr(config) + config.model_dump_json() + repr(
        cluster_settings(config.kafka)
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://ann:hush@registry", "must not hold credentials"),
        ("https://ok,https://ann@registry", "must not hold credentials"),
        ("registry:8081", "must be http://HOST:PORT"),
        ("ftp://registry", "must be http://HOST:PORT"),
        ("http://", "must be http://HOST:PORT"),
        ("http://registry:port", "is no URL"),
        ("", "must be http://HOST:PORT"),
    ],
)
def test_an_address_that_is_none_is_refused_without_being_repeated(
    tmp_path: Path, url: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", url=url)
    assert said in str(caught.value) and "hush" not in str(caught.value)


def test_wrong_properties_are_named_without_their_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, '[kafka.registry]\nurl = "http://r"\nproperties = "hush"\n')
    assert "kafka.registry.properties" in str(caught.value) and "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"kafka\.registry\.url: this key is missing"):
        load(tmp_path, "", "kafka.registry.register_schemas=false")
    with pytest.raises(ConfigError, match=r"did you mean kafka\.registry\.url"):
        load(tmp_path, '[kafka.registry]\nulr = "http://r"\nurl = "http://r"\n')


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    section = RegistrySection(url="http://registry")
    registry = SchemaRegistry(section, connect_timeout=1.0, request_timeout=1.0)
    with pytest.raises(ConfigError, match="package that is not installed") as caught:
        registry.prepare()
    assert caught.value.hint == "pip install 'dora-rl[registry]'"
