"""Functions named in a configuration: where they are looked for, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora.errors import PolicyError, TaskError
from dora.producers.tasks.hooks import load_hook


def write(home: Path, name: str, text: str) -> None:
    (home / f"{name}.py").write_text(text)


def test_a_module_beside_the_configuration_file_is_found(tmp_path: Path) -> None:
    write(tmp_path, "hook_beside", "def twice(x):\n    return 2 * x\n")
    assert load_hook("hook_beside:twice", tmp_path, "task.render")(21) == 42


def test_an_installed_module_is_found(tmp_path: Path) -> None:
    hook = load_hook("dora.producers.tasks.verifiers:exact", tmp_path, "task.verifier")
    assert hook(" Yes ", {"answer": "yes"}) == 1.0


def test_a_hook_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "hook_neighbour", "VALUE = 7\n")
    write(
        tmp_path,
        "hook_user",
        "import hook_neighbour\ndef value():\n    return hook_neighbour.VALUE\n",
    )
    assert load_hook("hook_user:value", tmp_path, "task.render")() == 7


def test_loading_a_hook_shadows_no_installed_module(tmp_path: Path) -> None:
    write(tmp_path, "hook_plain", "def f():\n    return 1\n")
    load_hook("hook_plain:f", tmp_path, "task.render")
    assert sys.path[0] != str(tmp_path)


def test_a_missing_module_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r'task\.render = "no_such_hook:f": no module no_such_hook'):
        load_hook("no_such_hook:f", tmp_path, "task.render")


def test_a_module_that_needs_a_missing_one_says_which(tmp_path: Path) -> None:
    write(tmp_path, "hook_needs", "import surely_not_installed\n")
    with pytest.raises(TaskError, match="it needs the module surely_not_installed"):
        load_hook("hook_needs:f", tmp_path, "task.render")


def test_a_module_that_fails_when_imported_is_refused_with_its_error(tmp_path: Path) -> None:
    write(tmp_path, "hook_fails", "1 / 0\n")
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        load_hook("hook_fails:f", tmp_path, "task.render")


def test_a_missing_function_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    write(tmp_path, "hook_other", "def existing():\n    return 1\n")
    with pytest.raises(TaskError, match='has no "absent"') as caught:
        load_hook("hook_other:absent", tmp_path, "task.render")
    assert "existing" in str(caught.value)


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "hook_value", "number = 3\n")
    with pytest.raises(TaskError, match="of type int, not a function"):
        load_hook("hook_value:number", tmp_path, "task.render")


def test_a_name_that_is_already_taken_by_another_module_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "json", "def f():\n    return 1\n")
    with pytest.raises(TaskError, match="already loaded"):
        load_hook("json:f", tmp_path, "task.render")


def test_the_error_class_is_the_callers(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        load_hook("no_such_hook:f", tmp_path, "policy.prepare", error=PolicyError)


def test_what_verifier_processes_import_is_light(tmp_path: Path) -> None:
    """A verifier process starts anew after each hang, so heavy imports would be paid each time."""
    program = (
        "import sys, dora.producers.tasks.judge as judge\n"
        "recipe = judge.VerifierRecipe('.', gym_name='spell_backward')\n"
        "assert recipe.load()('tac', {'answer': 'tac'}) == 1\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pydantic', 'numpy', 'matplotlib',"
        " 'confluent_kafka', 'deepspeed'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr
