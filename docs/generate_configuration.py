"""Writes docs/configuration.md from the docstrings of the configuration's models.

`--check` writes nothing and ends with 1 if the page is out of date.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from publication import publish
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dora.config import Config

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

Made from the docstrings in `dora/config*.py` by `make docs`;
change it there.

A run is described by one TOML file. Its values can be overridden, each of these by the next:

1. environment variables: `DORA_<SECTION>__<KEY>`, such as `DORA_TRAINER__STEPS=40` or
   `DORA_TRAINER__LOSS__KIND=gspo`; in names of Kafka properties `_` stands for `.`
   (`DORA_KAFKA__PROPERTIES__SASL_PASSWORD`);
2. `--set section.key=value`, as often as you like; the value is read as TOML, or else as text;
3. `-b HOST:PORT`, `--kafka-config FILE` and `-X key=value` for the section `kafka`.

Unknown keys, wrong types and impossible combinations are refused, all of them at once, with exit
code 2. Values of `kafka.properties` never appear in messages. Paths are relative to the working
directory, those of data sets and hooks to the configuration file.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_sections(Config, ())]).rstrip() + "\n"


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    """A model's table, then those of the sections in it."""
    inner = {
        name: section
        for name, info in model.model_fields.items()
        for section in (info.annotation, *get_args(info.annotation))
        if isinstance(section, type) and issubclass(section, BaseModel)
    }
    if path:
        yield f"## `[{'.'.join(path)}]`\n\n{_one_line(model.__doc__)}\n"
        rows = [
            f"| `{name}` | {_type(info.annotation, info)} | {_default(info)} "
            f"| {_one_line(info.description)} |"
            for name, info in model.model_fields.items()
            if name not in inner
        ]
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows, ""])
    for name, section in inner.items():
        yield from _sections(section, (*path, name))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _type(annotation: Any, info: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Path or annotation is str or annotation is SecretStr:
        name = {Path: "path", str: "text", SecretStr: "secret"}[annotation]
        return "`module:function`" if _is_hook(info) else name
    if origin in (Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return " or ".join(_type(part, info) for part in parts)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list of " + _type(arguments[0])
    if origin is dict:
        values = "any" if arguments[1] is Any else _type(arguments[1])
        return f"table of {values}"
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0], info)
    names = {int: "whole number", float: "number", bool: "`true` or `false`", Any: "any"}
    return names[annotation] + _bounds(info)


def _is_hook(info: FieldInfo | None) -> bool:
    return info is not None and "pattern='^[A-Za-z_]" in repr((info.metadata, info.annotation))


def _bounds(info: FieldInfo | None) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    if info is None:
        return ""
    metadata = list(info.metadata)
    for part in get_args(info.annotation):
        for entry in getattr(part, "__metadata__", ()):
            metadata += getattr(entry, "metadata", [entry])
    found = [
        f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in signs.items()
        if getattr(entry, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "**required**"
    value = info.default
    if value is None or value == {} or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.exit(publish(PAGE, page()))
