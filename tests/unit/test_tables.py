"""Tables keep every heading and figure, however narrow the place."""

from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from dora.cli.bench.tables import show_modes
from dora.cli.console import print_table
from dora.cli.inspect.render import number, show_rows
from dora.consumers.inspect.rows import Fate, Row

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


@pytest.mark.parametrize("width", [60, 80, 120, 200, None])
def test_a_listing_of_trajectories_keeps_every_figure(width: int | None) -> None:
    row = Row(
        id="g311/4", group="g311", sample=4, purpose="train", version=1234, ordinal=311,
        fate=Fate("trained", 1236, 2), reward=-0.12345, length=4096, finish="stop", attempts=2,
        worker="rollout-17", logprob=-0.4321, mismatch=3.7e-7, engine="vllm", error=None,
        text="0c1a2t=" * 20, partition=0, offset=7,
    )  # fmt: skip
    file = StringIO()
    console = Console(file=file, force_terminal=width is not None, width=width, color_system=None)
    show_rows([row], console, recomputed=True)
    for figure in ("g311/4", "1234", "4096", "rollout-17", number(-0.12345), number(-0.4321)):
        assert figure in file.getvalue()
    assert "…" not in file.getvalue()
    assert ("0c1a2t=" in file.getvalue()) == (width == 200)


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
