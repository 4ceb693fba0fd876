"""What a run's prompts, their tokens and their scores depend on, as fingerprints.

A configuration names a data file, a tokenizer and functions; what they hold may change while their
names stay. `fingerprints` says what they hold now. The trainer records it in the ledger's first
entry, and every process compares before it takes part: samples of one group must come from one
prompt, and rewards from one verifier.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from dora.config import Config
from dora.core.identity import changed_inputs
from dora.errors import RunError, TaskError
from dora.weights.models import TOKENIZER_FILES, eos_token_ids, model_file

_BLOCK = 1 << 20


def fingerprints(config: Config) -> dict[str, str]:
    """What each input of the run holds now, by the key that names it; nothing for a run without
    texts (`task.kind = "synthetic"`).

    - `task.path`: the content of the data file;
    - `task.render`, `task.verifier`: the source of the function's module and of the modules beside
      the configuration file that it imports, or the installed package's version;
    - `policy.tokenizer`: the tokenizer's files, its chat template included;
    - `policy.model`: the tokens that end a response by the model's own account;
    - `reasoning-gym`, `math-verify`: the versions of libraries that make prompts or scores.

    Raises TaskError for a file that cannot be read.
    """
    task = config.task
    if task.kind == "synthetic":
        return {}
    found: dict[str, str] = {}
    if task.path is not None and task.kind == "jsonl":
        found["task.path"] = _of_files([config.home / task.path])
    for key, reference in (("task.render", task.render), ("task.verifier", task.verifier)):
        if reference is not None:
            found[key] = _of_module(reference.partition(":")[0], config.home.resolve(), key)
    tokenizer = config.policy.tokenizer or config.policy.model
    files = [model_file(tokenizer, name) for name in TOKENIZER_FILES]
    found["policy.tokenizer"] = _of_files([file for file in files if file is not None])
    ends = sorted(eos_token_ids(config.policy.model))
    found["policy.model"] = f"ends with {', '.join(map(str, ends)) or 'none of its own'}"
    if task.kind == "reasoning-gym":
        found["reasoning-gym"] = _version("reasoning-gym")
    if task.verifier == "dora.producers.tasks.verifiers:math":
        found["math-verify"] = _version("math-verify")
    return found


def check_inputs(run: str, recorded: Mapping[str, str], config: Config) -> None:
    """RunError, naming each, if an input holds something else than recorded and is not one of
    `run.accept_changed`. What an older dora did not record is not compared."""
    if not recorded:
        return
    given = fingerprints(config)
    changed = [
        name for name in changed_inputs(recorded, given) if name not in config.run.accept_changed
    ]
    if changed:
        told = "; ".join(
            f"{name}: recorded {recorded.get(name, 'none')}, now {given.get(name, 'none')}"
            for name in changed
        )
        flags = " ".join(f"--accept-changed {name}" for name in changed)
        raise RunError(
            f"what run {run} makes its prompts and scores of has changed: {told}",
            hint="Put it back as it was. To go on with what is there now, which the ledger will "
            f"record, start every process of the run with {flags}.",
        )


def _of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0".encode("utf-8", "surrogateescape"))
        try:
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    return f"sha256:{digest.hexdigest()[:32]}"


def _of_module(name: str, home: Path, key: str) -> str:
    beside = _beside(name, home)
    if beside:
        return _of_files(sorted(beside))
    top = name.partition(".")[0]
    distributions = packages_distributions().get(top, ())
    if top != "dora" and distributions:
        return f"{distributions[0]} {_version(distributions[0])}"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise TaskError(
            f"{key}: no module {name} in {home} and none is installed",
            hint="Modules are looked for beside the configuration file, then on sys.path.",
        )
    return _of_files([Path(spec.origin)])


def _beside(name: str, home: Path) -> set[Path]:
    """The files of a module beside the configuration file, and of those there that it imports."""
    found: set[Path] = set()
    waiting = [name]
    while waiting:
        for path in _places(waiting.pop(), home):
            if path not in found:
                found.add(path)
                waiting += _imported(path, home)
    return found


def _places(name: str, home: Path) -> Iterator[Path]:
    """The module's file and its packages' `__init__` files below `home`."""
    place = home
    for part in name.split("."):
        place = place / part
        for file in (place / "__init__.py", place.with_name(f"{part}.py")):
            if file.is_file():
                yield file


def _imported(path: Path, home: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the process that imports it reports it
    package = path.parent.relative_to(home).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
