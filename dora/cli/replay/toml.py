"""A configuration as a TOML file.

Reading the file gives the configuration back, without how Kafka is reached (it may be secret) and
without the directory that relative paths start from.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from dora.config import Config


def to_toml(config: Config) -> str:
    """What `config` sets, defaults left out."""
    data = config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={"home": True, "kafka": {"bootstrap_servers", "properties", "registry"}},
    )
    return "\n".join(_tables(data, ())).lstrip("\n") + "\n"


def _tables(data: Mapping[str, Any], above: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    plain = {k: v for k, v in data.items() if not isinstance(v, Mapping) and v is not None}
    if plain and above:
        lines += ["", f"[{'.'.join(map(_key, above))}]"]
    lines += [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, value in data.items():
        if isinstance(value, Mapping):
            lines += _tables(value, (*above, name))
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{" + inside + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if isinstance(value, str):
        return _text(value)
    return repr(value) if isinstance(value, float) else json.dumps(value)  # inf, nan


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
