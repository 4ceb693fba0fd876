"""Writes the rights of each role in docs/security.md from `dora.bus.access`.

`--check` writes nothing and ends with 1 if the page is out of date.
"""

import sys
from pathlib import Path

from publication import filled, publish

from dora.bus.access import ROLES

PAGE = Path(__file__).with_name("security.md")
SOURCE = "dora/bus/access.py"


def table() -> str:
    """One row for each operation and kind of resource of a role."""
    lines = ["| role | operation | resource | names | what for |", "|---|---|---|---|---|"]
    for role in ROLES.values():
        who = f"**{role.name}**: {role.who}"
        for need in role.needs:
            names = ", ".join(f"`{name}`" for name in need.names)
            shown = "all eight topics" if need.of_all_topics else names
            lines.append(f"| {who} | {need.operation} | {need.resource} | {shown} | {need.why} |")
            who = ""
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(publish(PAGE, filled(PAGE, SOURCE, table())))
