"""Writes the rights of each role in docs/security.md from `dora.bus.access`.

`--check` writes nothing and ends with 1 if the page is out of date.
"""

import sys
from pathlib import Path

from publication import filled, publish

from dora.bus.access import ROLES, rights_rows

PAGE = Path(__file__).with_name("security.md")
SOURCE = "dora/bus/access.py"


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
    sys.exit(publish(PAGE, filled(PAGE, SOURCE, table())))
