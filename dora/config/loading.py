"""Reading a configuration: TOML file, then environment, then the command line; and writing one.

A configuration is checked as a whole: every problem is listed with its key, where it was set and
what was expected. Values under `kafka.properties` and `kafka.registry.properties` may be secrets
and never appear in a message.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from dora.config import Config
from dora.config.kafka import KafkaSection
from dora.errors import ConfigError

ENVIRONMENT_PREFIX = "DORA_"

Keys = tuple[str, ...]
_PROPERTIES: tuple[Keys, ...] = (("kafka", "properties"), ("kafka", "registry", "properties"))
"""Tables of properties that are passed through: their names have dots, their values may be
secrets."""
M = TypeVar("M", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text in quotes",
    "path_type": "a path in quotes",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "a list",
}


@dataclass(frozen=True, slots=True)
class KafkaOverrides:
    """What `-b`, `-X`, `--kafka-config` and `--registry` say; stronger than file, environment and
    `--set`.

    `properties` may hold secrets and is left out of `repr`.
    """

    bootstrap_servers: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: tuple[Path, ...] = ()
    registry: str | None = None
    """URL of the schema registry."""

    def merged(self) -> dict[str, Any]:
        """The overrides as keys of the section `kafka`; ConfigError if a file cannot be read."""
        properties: dict[str, str] = {}
        for path in self.files:
            properties.update(read_properties(path))
        properties.update(self.properties)
        # Client property files name the cluster themselves; dora's own key must know it.
        address = self.bootstrap_servers or properties.get("bootstrap.servers")
        properties.pop("bootstrap.servers", None)
        section: dict[str, Any] = {"properties": properties} if properties else {}
        if address:
            section["bootstrap_servers"] = address
        return section


def read_properties(path: Path) -> dict[str, str]:
    """librdkafka properties (`key=value` lines, `#` comments); ConfigError names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the Kafka properties file {path}: {error}") from error
    properties = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, separator, value = line.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"{path}, line {number}: not of the form key=value")
        properties[key.strip()] = value.strip()
    return properties


def load_config(
    path: Path,
    *,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    kafka: KafkaOverrides = KafkaOverrides(),
) -> Config:
    """The configuration in `path`, with `DORA_<SECTION>__<KEY>` variables, `--set` and Kafka
    options applied in this order. ConfigError lists everything that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"no configuration file {path}", hint="See examples/ for complete ones."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    draft = _Draft(data, _line_origins(text, path))
    if "home" in data:
        raise ConfigError(f"{path}: home is not a key: it is the directory of the file itself")
    draft.apply_environment(environment)
    for assignment in sets:
        draft.apply_set(assignment)
    draft.apply_kafka(kafka)
    draft.data["home"] = path.absolute().parent
    return draft.validate(Config, str(path))


def load_kafka_section(
    *, environment: Mapping[str, str] = os.environ, kafka: KafkaOverrides = KafkaOverrides()
) -> KafkaSection:
    """The section `kafka` alone, from `DORA_KAFKA__*` and the Kafka options, for commands that
    have a run's name but no configuration file."""
    draft = _Draft({}, {})
    draft.apply_environment(
        {k: v for k, v in environment.items() if k.startswith(f"{ENVIRONMENT_PREFIX}KAFKA__")}
    )
    draft.apply_kafka(kafka)
    section = draft.data.get("kafka", {})
    return draft.validate(KafkaSection, "Kafka options", section, ("kafka",))


def apply_sets(config: Config, sets: Sequence[str]) -> Config:
    """`config` with `section.key=value` assignments; ConfigError lists everything that is wrong."""
    draft = _Draft(config.model_dump(), {})
    for assignment in sets:
        draft.apply_set(assignment)
    return draft.validate(Config, "the configuration with --set")


def to_toml(config: Config) -> str:
    """What `config` sets, as TOML that `load_config` reads; defaults are left out.

    How Kafka is reached is not written (it may be secret), nor is `home`.
    """
    data = config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={"home": True, "kafka": {"bootstrap_servers", "properties", "registry"}},
    )
    if "loss" in data["trainer"]:  # the defaults there depend on the kind and the preset
        data["trainer"]["loss"] = config.trainer.loss.model_dump(mode="json")
    return tomli_w.dumps({name: section for name, section in _set(data).items() if section})


def _set(value: Any) -> Any:
    """`value` without the keys that are None, which TOML cannot express."""
    if isinstance(value, Mapping):
        return {name: _set(each) for name, each in value.items() if each is not None}
    return [_set(each) for each in value] if isinstance(value, list) else value


def _as_text(value: object) -> str:
    """What TOML has and JSON has not: dates, and the paths that dora itself sets."""
    if isinstance(value, date | time | PurePath):
        return str(value)
    raise TypeError(f"a configuration holds a {type(value).__name__}")


class _Draft:
    """A configuration that is being put together, and where each of its values was set."""

    def __init__(self, data: dict[str, Any], origins: dict[Keys, str]) -> None:
        self.data = data
        self._origins = origins
        self._raw: dict[Keys, str] = {}
        self._flatten_properties()

    def _flatten_properties(self) -> None:
        # TOML reads `security.protocol = ...` as nested tables; names of properties have dots.
        for *path, name in _PROPERTIES:
            section: Any = self.data
            for key in path:
                section = section.get(key) if isinstance(section, dict) else None
            if isinstance(section, dict) and isinstance(section.get(name), dict):
                section[name] = dict(_flat(section[name]))

    def apply_environment(self, environment: Mapping[str, str]) -> None:
        """Apply `DORA_<SECTION>__<KEY>[__<KEY>]`; names of Kafka properties take `_` for `.`."""
        for name in sorted(environment):
            if not name.startswith(ENVIRONMENT_PREFIX) or "__" not in name:
                continue
            keys = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            table = _table_of_properties(keys)
            if table and len(keys) > table:
                keys = (*keys[:table], ".".join(keys[table:]).replace("_", "."))
            if not all(keys):
                raise ConfigError(f"environment variable {name} names no key")
            self._put(keys, environment[name], f"environment variable {name}")

    def apply_set(self, text: str) -> None:
        """Apply one `section.key=value`."""
        name, separator, value = text.partition("=")
        keys = tuple(part.strip() for part in name.split("."))
        if not separator or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set {name}: not of the form section.key=value")
        table = _table_of_properties(keys)
        if table and len(keys) > table:
            keys = (*keys[:table], ".".join(keys[table:]))
        self._put(keys, value.strip(), "--set")

    def apply_kafka(self, kafka: KafkaOverrides) -> None:
        """Apply the Kafka options."""
        section = kafka.merged()
        for key, value in section.pop("properties", {}).items():
            self._put(("kafka", "properties", key), value, "-X or --kafka-config", literal=False)
        for key, value in section.items():
            self._put(("kafka", key), value, "--bootstrap-server", literal=False)
        if kafka.registry is not None:
            self._put(("kafka", "registry", "url"), kafka.registry, "--registry", literal=False)

    def _put(self, keys: Keys, text: str, origin: str, *, literal: bool = True) -> None:
        is_property = _table_of_properties(keys) == len(keys) - 1
        table = self.data
        for depth, key in enumerate(keys[:-1], start=1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{'.'.join(keys)} ({origin}): {'.'.join(keys[:depth])} is not a table"
                )
        table[keys[-1]] = _literal(text) if literal and not is_property else text
        self._raw[keys] = text
        self._origins[keys] = origin

    def validate(
        self,
        model: type[M],
        title: str,
        data: dict[str, Any] | None = None,
        prefix: Keys = (),
    ) -> M:
        """The checked model; ConfigError with all problems."""
        data = self.data if data is None else data
        try:
            # As JSON, types are strict: "2e-4" is no number, 1.0 and true no whole ones; but
            # texts become paths and lists tuples.
            return model.model_validate_json(json.dumps(data, default=_as_text), strict=True)
        except ValidationError as error:
            if self._restore_texts(error, data, prefix):
                return self.validate(model, title, data, prefix)
            problems = [self._problem(detail, prefix) for detail in error.errors()]
        if len(problems) == 1:
            raise ConfigError(f"{title}: {problems[0]}")
        raise ConfigError(
            f"{title}: {len(problems)} problems\n" + "\n".join(f"  - {line}" for line in problems)
        )

    def _restore_texts(self, error: ValidationError, data: dict[str, Any], prefix: Keys) -> bool:
        """Undo the reading as TOML literal where a text is wanted (`--set run.name=7`)."""
        changed = False
        for detail in error.errors():
            keys = tuple(str(part) for part in detail["loc"])
            raw = self._raw.get(prefix + keys)
            if detail["type"] in ("string_type", "path_type") and raw is not None:
                table = data
                for key in keys[:-1]:
                    table = table[key]
                changed |= table[keys[-1]] != raw
                table[keys[-1]] = raw
        return changed

    def _problem(self, detail: Any, prefix: Keys) -> str:
        keys = prefix + tuple(str(part) for part in detail["loc"])
        name = ".".join(keys)
        place = self._place(keys)
        kind = detail["type"]
        if kind == "value_error":
            # The validators' own messages name their keys.
            return str(detail["ctx"]["error"])
        if kind == "missing":
            what = "section" if len(keys) == 1 else "key"
            return f"{name}: this {what} is missing. {_documentation(keys)}".rstrip()
        if kind == "extra_forbidden":
            what = "section" if len(keys) == 1 else "key"
            return f"{name}{place}: unknown {what}{_suggestion(keys)}"
        expected = _EXPECTED.get(kind)
        if kind == "string_pattern_mismatch":
            expected = "another form"
        elif kind == "literal_error":
            expected = f"one of {detail['ctx']['expected'].replace(' or ', ', ')}"
        elif expected is None:
            expected = "a value " + detail["msg"].removeprefix("Input should be ")
        given = "" if _table_of_properties(keys) else f"{_shown(detail['input'])} given, "
        return f"{name}{place}: {given}{expected} expected. {_documentation(keys)}".rstrip()

    def _place(self, keys: Keys) -> str:
        for length in range(len(keys), 0, -1):
            origin = self._origins.get(keys[:length])
            if origin is not None:
                return f" ({origin})"
        inside = (text for path, text in self._origins.items() if path[: len(keys)] == keys)
        return next((f" ({text})" for text in inside), "")


def _table_of_properties(keys: Keys) -> int:
    """How many of the keys name a table of properties that they are in; 0 if they are in none."""
    return next((len(path) for path in _PROPERTIES if keys[: len(path)] == path), 0)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield f"{prefix}{key}", str(value).lower()
        else:
            yield f"{prefix}{key}", str(value) if isinstance(value, int | float) else value


def _literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none (`--set trainer.loss.kind=gspo`)."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields(model: type[BaseModel], prefix: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Every key of a model with its documentation, sections before their keys."""
    for name, info in model.model_fields.items():
        if prefix == () and name == "home":
            continue
        yield (*prefix, name), " ".join((info.description or "").split())
        section = info.annotation
        for part in (section, *get_args(section)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields(part, (*prefix, name))


def _documentation(keys: Keys) -> str:
    return dict(_fields(Config)).get(keys, "")


def _suggestion(keys: Keys) -> str:
    known = [path for path, _ in _fields(Config)]
    siblings = [path[-1] for path in known if path[:-1] == keys[:-1]]
    near = difflib.get_close_matches(keys[-1], siblings, n=1)
    if near:
        return f"; did you mean {'.'.join((*keys[:-1], near[0]))}?"
    elsewhere = [".".join(path) for path in known if path[-1] == keys[-1]]
    if not elsewhere:
        near = difflib.get_close_matches(keys[-1], [path[-1] for path in known], n=1, cutoff=0.8)
        elsewhere = [".".join(path) for path in known if near and path[-1] == near[0]]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


_HEADER = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")
_ASSIGNMENT = re.compile(r"\s*([\w.\"'-]+)\s*=")


def _line_origins(text: str, path: Path) -> dict[Keys, str]:
    """Lines at which keys are set, for messages only: tomllib does not keep them."""
    origins: dict[Keys, str] = {}
    section: Keys = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, assignment = _HEADER.match(line), _ASSIGNMENT.match(line)
        match = header or assignment
        if match is None:
            continue
        keys = tuple(part.strip("\"'") for part in match.group(1).split("."))
        if header:
            section = keys
        else:
            keys = section + keys
        origins.setdefault(keys, f"{path.name}, line {number}")
    return origins
