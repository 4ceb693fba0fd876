"""Writes the rights of each role in docs/security.md from `dora.bus.access`.

`--check` writes nothing and ends with 1 if the page is out of date.
"""

import sys
from pathlib import Path

from dora.bus.access import ROLES, rights_rows

PAGE = Path(__file__).with_name("security.md")
BEGIN = "<!-- made by `make docs` from dora/bus/access.py -->"
END = "<!-- end of what is made -->"


def main() -> int:
    """Write or check the page; the exit code."""
    old = PAGE.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if old == text:
            return 0
        print(f"{PAGE} is out of date: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


def table() -> str:
    """One row for each operation and kind of resource of a role."""
    lines = ["| role | operation | resource | names | what for |", "|---|---|---|---|---|"]
    for role in ROLES.values():
        for number, (operation, resource, names, why) in enumerate(rights_rows(role.name)):
            who = f"**{role.name}**: {role.who}" if number == 0 else ""
            shown = "all eight topics" if names == "*" else f"`{names.replace(', ', '`, `')}`"
            lines.append(f"| {who} | {operation} | {resource} | {shown} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
