"""The reasoning-gym library, loaded no further than one task needs it.

This module imports neither dora's configuration nor the rest of the library, so that verifier
processes start in tenths of a second.
"""

import difflib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import TaskError

LIBRARY = "reasoning_gym"


_NAME = re.compile(r"""^DATASET_NAME\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def load_dataset(name: str, parameters: dict[str, Any]) -> Any:
    """The data set of a reasoning-gym task: `dataset[index]` and `score_answer(answer, entry)`.

    Raises TaskError for an unknown name (with the nearest ones) and for parameters that the task
    does not have or does not accept.
    """
    factory = _load_factory(name)
    if name not in factory.DATASETS:
        raise _unknown(name)
    config_class = factory.DATASETS[name][1]
    known = sorted(config_class.__dataclass_fields__)
    for parameter in parameters:
        if parameter not in known:
            raise TaskError(
                f"task.parameters.{parameter}: {name} has no such parameter",
                hint=f"It has: {', '.join(known)}.",
            )
    try:
        return factory.create_dataset(name, **parameters)
    except Exception as exception:
        given = ", ".join(f"{key} = {value!r}" for key, value in sorted(parameters.items()))
        raise TaskError(
            f"reasoning-gym does not accept the parameters of {name}: "
            f"{type(exception).__name__}: {exception}",
            hint=f"Given were {given}.",
        ) from exception


def _root() -> Path:
    spec = importlib.util.find_spec(LIBRARY)
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(
            'task.kind = "reasoning-gym" needs the library reasoning-gym',
            hint="Install it: pip install reasoning-gym",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _declared(file: Path) -> str | None:
    found = _NAME.search(file.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else None


def _find_file(root: Path, name: str) -> Path | None:
    """The file that declares the task, by its name if possible, else by looking into all files."""
    if re.fullmatch(r"\w+", name):
        for file in sorted(root.glob(f"*/**/{name}.py")):
            if _declared(file) == name:
                return file
    return next((file for file in sorted(root.glob("*/**/*.py")) if _declared(file) == name), None)


def _unknown(name: str) -> TaskError:
    names = sorted({n for file in _root().glob("*/**/*.py") if (n := _declared(file))})
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
    return TaskError(
        f'task.name = "{name}": reasoning-gym has no such task',
        hint=f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(names)}.",
    )


def _load_factory(name: str) -> ModuleType:
    """The library's factory with the task registered.

    The library imports all of its tasks at once, with matplotlib and more: seconds of CPU in every
    process. One task's own module is enough, so its packages stand in as empty ones while it is
    imported. Where a task needs more than that, the whole library is imported after all.
    """
    if LIBRARY in sys.modules:
        return importlib.import_module(f"{LIBRARY}.factory")
    root = _root()
    file = _find_file(root, name)
    if file is None and name != "composite":
        raise _unknown(name)
    if file is not None:
        try:
            return _load_alone(root, file)
        except ImportError:
            for module in [m for m in sys.modules if m.partition(".")[0] == LIBRARY]:
                del sys.modules[module]
    importlib.import_module(LIBRARY)
    return importlib.import_module(f"{LIBRARY}.factory")


def _load_alone(root: Path, file: Path) -> ModuleType:
    parts = file.relative_to(root).with_suffix("").parts
    stand_ins = {LIBRARY: root, f"{LIBRARY}.{parts[0]}": root / parts[0]}
    for package, folder in stand_ins.items():
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    try:
        importlib.import_module(".".join((LIBRARY, *parts)))
        return importlib.import_module(f"{LIBRARY}.factory")
    finally:
        # Only the empty packages go: a later import of the library gets the real ones.
        for package in stand_ins:
            sys.modules.pop(package, None)
