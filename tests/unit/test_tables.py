"""Tables keep every heading and figure, however narrow the place."""

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from dora.cli.bench.tables import show_modes
from dora.cli.console import print_table

HEADS = ("schedule", "rollout", "training", "of ideal", "trainer idle", "staleness", "moves")
ROWS = (("dora K=3", "1,184", "864", "0.943217", "11.18 %", "1.94 / 3", "123,456,789"),
        ("sync", "2,048", "2,048", "0.520001", "61.02 %", "0.00 / 0", "0"))  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_no_heading_and_no_figure_is_cut_at_any_width(width: int | None) -> None:
    table = Table(title="32 devices")
    for head in HEADS:
        table.add_column(head, justify="right")
    for row in ROWS:
        table.add_row(*row)
    file = StringIO()
    console = Console(file=file, force_terminal=width is not None, width=width, color_system=None)
    print_table(table, console)
    text = file.getvalue()
    for part in (*HEADS, *(cell for row in ROWS for cell in row)):
        assert part in text
    assert "…" not in text and "32 devices" in text
    lines = text.splitlines()
    if width is None:
        assert any(all(cell in line for cell in ROWS[0]) for line in lines), "a row is one line"
    else:
        assert max(map(len, lines)) <= width


def test_a_benchmark_through_a_pipe_keeps_its_figures() -> None:
    mean = {
        "steps_per_second": 0.123, "trajectories_per_second": 1234.5, "trainer_idle_share": 0.11,
        "rollout_only_share": 0.22, "success_first": 0.333, "success_last": 0.444,
    }  # fmt: skip
    summary = mean | {
        "runs": 3,
        "spread": {name: (value / 2, value * 2) for name, value in mean.items()},
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "violations": 0,
    }
    file = StringIO()
    show_modes({"dora K=3": summary}, Console(file=file, width=40))
    for figure in ("1234.5 (617.2-2469.0)", "0.444 (0.222-0.888)", "1.50 / 3"):
        assert figure in file.getvalue()
