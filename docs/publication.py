"""How the generators of this directory write what they make.

With `--check` nothing is written, and the exit code is 1 if a file is out of date.
"""

import sys
from pathlib import Path

END = "<!-- end of what is made -->"


def publish(path: Path, text: str) -> int:
    """Write the file, or check it; the exit code."""
    if "--check" in sys.argv[1:]:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return 0
        print(f"{path} is out of date: run `make docs`", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


def filled(path: Path, source: str, text: str) -> str:
    """The page at `path` with `text` in the place of what was made from `source` before."""
    begin = f"<!-- made by `make docs` from {source} -->"
    before, rest = path.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n\n{text}\n{END}{rest.split(END)[1]}"
