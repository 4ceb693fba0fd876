"""Imports never point upwards, and the rules stay pure."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dora

ROOT = Path(dora.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
# What every package may use: the configuration, errors, small helpers, and "" for dora's version.
SHARED = {"config", "errors", "faults", "closeable", "atomic_write", "json_lines", ""}
RULES = {"schemas", "core", *SHARED}
LOG = {"log", "telemetry", "bus", "weights", *RULES}

# Which parts of dora each part may import, itself included.
ALLOWED = {
    "schemas": {"schemas"},
    "core": {"core", "schemas.records"},
    "config": {"config", "errors", "schemas", "core"},
    "simulation": {"simulation", "core", "schemas.records"},
    "bus": {"bus", *RULES},
    "broker": {"broker", "bus", *RULES},
    "weights": {"weights", *RULES},
    "telemetry": {"telemetry", "bus", *RULES},
    "log": LOG,
    "producers": {"producers", "simulation", *LOG},
    "consumers": {"consumers", *LOG},
    "bench": {"bench", "simulation", "consumers", *LOG},
    "cli": {"cli", "bench", "broker", "simulation", "producers", "consumers", *LOG},
    "closeable": set(),
    "atomic_write": set(),
    "errors": {"errors"},
    "faults": {"faults", "errors"},
    "json_lines": set(),
    "__init__": set(),
    "__main__": {"cli"},
}


def part(path: Path) -> str:
    """First part of a module's path below the package: `core`, `config`, ..."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path, source: str | None = None) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, inside functions and conditions too."""
    package = ("dora", *path.relative_to(ROOT).parent.parts)
    text = path.read_text(encoding="utf-8") if source is None else source
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            # `from dora.bus import reader` may name a module as well as a value.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def inside(name: str, allowed: set[str]) -> bool:
    """Whether `name`, relative to the package, lies in one of the allowed parts."""
    parts = name.split(".")
    if parts[0].startswith("__"):
        return "" in allowed
    return any(parts[: len(each.split("."))] == each.split(".") for each in allowed if each)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_never_point_upwards(path: Path) -> None:
    allowed = ALLOWED[part(path)]
    wrong = [
        f"line {line}: {name}"
        for line, name in imported(path)
        if name.split(".")[0] == "dora"
        and name != "dora"
        and not inside(name.removeprefix("dora."), allowed)
    ]
    assert not wrong, f"{path.relative_to(ROOT)} may import {sorted(allowed)} only, not {wrong}"


def test_core_and_simulation_import_the_standard_library_records_and_core_only() -> None:
    wrong = [
        f"{path.name} line {line}: {name}"
        for path in MODULES
        if part(path) in {"core", "simulation"}
        for line, name in imported(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "dora"}
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["time", "datetime", "random", "secrets", "uuid", "socket", "os", "io", "pathlib"]
)
def test_core_and_simulation_have_no_clock_no_randomness_and_no_input(module: str) -> None:
    wrong = [
        f"{path.name} line {line}: {name}"
        for path in MODULES
        if part(path) in {"core", "simulation"}
        for line, name in imported(path)
        if name.split(".")[0] == module
    ]
    assert not wrong


def test_only_the_bus_imports_kafka_clients() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} line {line}: {name}"
        for path in MODULES
        if part(path) != "bus"
        for line, name in imported(path)
        if name.split(".")[0] == "confluent_kafka"
    ]
    assert not wrong


def test_the_check_sees_imports_in_functions_and_relative_ones() -> None:
    source = "def f():\n    from dora.bus import reader\n    import torch\nfrom . import ring\n"
    names = {name for _, name in imported(ROOT / "core" / "sample.py", source)}
    assert names == {"dora.bus.reader", "torch", "dora.core.ring"}
    assert not inside("bus.reader", ALLOWED["core"])
    assert inside("core.ring", ALLOWED["core"])
