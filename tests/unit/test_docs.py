"""README and docs/: modules, files and links that they name exist; what is made is current."""

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import dora

ROOT = Path(dora.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("dora", "docs", "tests", "examples", "benchmarks")
PACKAGES = "|".join(path.name for path in (ROOT / "dora").iterdir() if path.is_dir())

LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
"""The file that a link leads to, beside the page."""
SOURCE_FILE = re.compile(r"`([\w/*]+\.py)`")
"""The end of a path, such as `core/window.py`; `*` stands for any characters."""
FOLDER = re.compile(r"\bdora/[a-z_/]+/")
MODULE = re.compile(rf"`(dora\.(?:{PACKAGES})[\w.]*)[:`(]")
"""A module, or what it defines, such as `dora.schemas.codec.decode(record)`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in LINK.findall(text) if not (page.parent / name).exists()] == []
    assert [name for name in FOLDER.findall(text) if not (ROOT / name).is_dir()] == []
    assert [name for name in SOURCE_FILE.findall(text) if not is_source_file(name)] == []
    assert [name for name in MODULE.findall(text) if not is_importable(name)] == []


def is_source_file(name: str) -> bool:
    first = name.split("/")[0]
    if first in FOLDERS:
        return any(ROOT.glob(name))
    return any(any((ROOT / folder).glob(f"**/{name}")) for folder in FOLDERS)


def is_importable(name: str) -> bool:
    try:
        if find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass  # what is before the last dot is no package
    module, _, attribute = name.rpartition(".")
    return find_spec(module) is not None and hasattr(import_module(module), attribute)


def test_what_is_made_from_the_code_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
