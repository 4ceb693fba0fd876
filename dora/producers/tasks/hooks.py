"""Functions that a configuration names as `module:function`.

A module beside the configuration file wins over an installed one, in the process of the worker as
in those of the verifier. Errors name the setting.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import DoraError, TaskError


def load_hook(
    reference: str, home: Path, setting: str, *, error: type[DoraError] = TaskError
) -> Callable[..., Any]:
    """The function that `reference` (`module:function`) names.

    `home` is the directory of the configuration file, `setting` the key that holds the reference.
    Raises `error` when there is no such module, it cannot be imported, or holds no such function.
    """
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name:
        raise error(f'{setting} = "{reference}": expected "module:function"')
    module = _load_module(module_name, home.resolve(), f'{setting} = "{reference}"', error)
    if not hasattr(module, function_name):
        public = sorted(
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module_name
        )
        raise error(
            f'{setting} = "{reference}": {_place(module)} has no "{function_name}"',
            hint=f"It defines: {', '.join(public)}." if public else None,
        )
    function = getattr(module, function_name)
    if not callable(function):
        raise error(
            f'{setting} = "{reference}": "{function_name}" in {_place(module)} is of type '
            f"{type(function).__name__}, not a function"
        )
    return function  # type: ignore[no-any-return]


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or f"module {module.__name__}"


def _load_module(name: str, home: Path, what: str, error: type[DoraError]) -> ModuleType:
    top = name.partition(".")[0]
    beside = (home / f"{top}.py").is_file() or (home / top / "__init__.py").is_file()
    loaded = sys.modules.get(top)
    if beside and loaded is not None and not _belongs_to(loaded, home):
        raise error(
            f"{what}: {home} holds a module {top}, but {_place(loaded)} of the same name is "
            "already loaded",
            hint="Give your module another name.",
        )
    path = str(home)
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exception:
        missing = exception.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise error(
                f"{what}: no module {missing} in {home} and none is installed",
                hint="Modules are looked for beside the configuration file, then on sys.path.",
            ) from exception
        raise error(
            f"{what}: importing {name} failed: it needs the module {missing}, which is not "
            "installed"
        ) from exception
    except Exception as exception:
        raise error(
            f"{what}: importing {name} failed: {type(exception).__name__}: {exception}"
        ) from exception
    finally:
        sys.path.remove(path)
        # Later imports of its neighbours still work, without shadowing anything installed.
        if path not in sys.path:
            sys.path.append(path)


def _belongs_to(module: ModuleType, home: Path) -> bool:
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", []))
    return any(Path(place).resolve().is_relative_to(home) for place in places)
