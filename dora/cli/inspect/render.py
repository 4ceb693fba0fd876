"""How `dora inspect` looks to people.

What a model wrote is shown and never obeyed: its control characters are spelled out, and
nothing of it is taken as markup. Colour adds to what is printed and carries nothing that could not
be printed as well.
"""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dora.cli.console import print_table, table_width, visible
from dora.consumers.inspect.rows import GroupRow, Row
from dora.consumers.inspect.view import Token, TrajectoryView, text_of

PROBABILITIES = (
    (0.9, "", "90 % and more"),
    (0.5, "black on #d9f0a3", "50 %"),
    (0.1, "black on #fee391", "10 %"),
    (0.01, "black on #fe9929", "1 %"),
    (0.0, "white on #a63603", "less"),
)
"""Probability of a token from which on it has a style, and what the legend says."""
_ROWS_TEXT = 48
_LEAST_TEXT = 16
_BORDER = 3
_FIGURES = ("version", "stale", "reward", "length", "attempts", "logprob", "mismatch")


def style_of(logprob: float) -> str:
    """The style of a token of this log-probability (nats)."""
    for least, style, _ in PROBABILITIES:
        if logprob >= (float("-inf") if least == 0 else math.log(least)):
            return style
    raise AssertionError(logprob)


def number(value: float | None, digits: int = 3) -> str:
    """A figure for people; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}g}"


def coloured(tokens: Sequence[Token], *, newlines: bool = True) -> Text:
    """The tokens' text, each in the colour of its probability; ids where there is no text."""
    shown = Text()
    for index, token in enumerate(tokens):
        style = "dim" if token.logprob is None else style_of(token.logprob)
        if token.text is None:
            shown.append(" " if index else "")
            shown.append(str(token.id), style)
        else:
            shown.append(visible(token.text, newlines=newlines), style)
    return shown


def legend() -> Text:
    """What the colours mean."""
    shown = Text("probability of each token when it was drawn: ", "dim")
    for _, style, label in PROBABILITIES:
        shown.append(f" {label} ", style or "default").append(" ")
    return shown


def show_rows(
    rows: Sequence[Row] | Sequence[GroupRow], console: Console, *, recomputed: bool
) -> None:
    """A table of trajectories or of groups."""
    groups = bool(rows) and isinstance(rows[0], GroupRow)
    names = ["group" if groups else "trajectory", "version", "trained by", "stale", "reward"]
    names += ["spread", "finished"] if groups else []
    names += ["length", "finish", "attempts", "worker", "logprob"]
    names += ["mismatch"] if recomputed else []
    table = _rows_table(rows, names, 0, recomputed=recomputed)
    room = console.width - table_width(table, console) - _BORDER
    if not groups and room >= _LEAST_TEXT:
        table = _rows_table(rows, [*names, "text"], min(room, _ROWS_TEXT), recomputed=recomputed)
    print_table(table, console)


def _rows_table(
    rows: Sequence[Row] | Sequence[GroupRow], names: Sequence[str], text: int, *, recomputed: bool
) -> Table:
    """The rows with these columns; the last is the response's beginning, `text` characters wide."""
    table = Table()
    for name in names:
        figure = name in _FIGURES
        table.add_column(name, justify="right" if figure else "left", no_wrap=True)
    for row in rows:
        cells = _cells(row, recomputed=recomputed)
        if text and isinstance(row, Row):
            cells.append(visible(row.text or "", newlines=False)[:text])
        table.add_row(*map(_literal, cells))
    return table


def _cells(row: Row | GroupRow, *, recomputed: bool) -> list[str | Text]:
    cells: list[str | Text] = [
        row.id,
        str(row.version),
        _literal(str(row.fate), "yellow" if row.fate.state == "set-aside" else ""),
        "-" if row.staleness is None else str(row.staleness),
        number(row.reward),
    ]
    if isinstance(row, GroupRow):
        cells += [f"{number(row.reward_min)} .. {number(row.reward_max)}"]
        cells += [f"{row.finished}/{row.size}", f"{row.length:.4g}"]
    else:
        cells += [str(row.length)]
    cells += [row.finish, str(row.attempts), row.worker, number(row.logprob)]
    return [*cells, number(row.mismatch, 2)] if recomputed else cells


def show_view(view: TrajectoryView, console: Console, *, logprobs: bool) -> None:
    """One trajectory, everything that there is about it."""
    _show_facts(view, console)
    _heading(console, f"prompt, {len(view.prompt)} tokens")
    _indented(console, _written(view.prompt))
    show_response(view, console)
    _show_attempts(view, console)
    _show_chunks(view, console)
    _show_rest(view, console, logprobs=logprobs)


def show_response(view: TrajectoryView, console: Console) -> None:
    """The response with its colours and their legend."""
    _heading(console, f"response, {view.generated} tokens")
    _indented(console, _written(view.response))
    if view.recorded_text and text_of(view.tokens) is None:
        _heading(console, "recorded text")
        _indented(console, Text(visible(view.recorded_text)))
    if any(token.logprob is not None for token in view.response):
        in_colour = console.is_terminal and not console.no_color
        plain = Text("log-probabilities per token: --logprobs prints them", "dim")
        console.print(legend() if in_colour else plain)


def show_group(views: Sequence[TrajectoryView], console: Console, *, logprobs: bool) -> None:
    """A group: its prompt once, then each response with what it earned."""
    first = views[0]
    rewards = [view.reward for view in views if view.reward is not None]
    finished = sum(view.finished for view in views)
    console.print(Text(f"group {first.group} of run {first.run}", "bold"))
    facts: list[tuple[str, str]] = [
        ("version", str(first.version)),
        ("trained by", _fate(first)),
        ("finished", f"{finished} of {len(views)}"),
    ]
    if rewards:
        mean = sum(rewards) / len(rewards)
        facts.append(("reward", f"mean {mean:.4g}, {min(rewards):g} to {max(rewards):g}"))
    _grid(facts, console)
    prompt = next((view.prompt for view in views if view.prompt), ())
    _heading(console, f"prompt, {len(prompt)} tokens")
    _indented(console, _written(prompt))
    for view in views:
        console.print()
        console.print(Text(f"trajectory {view.id}", "bold"))
        _grid(_earned(view), console)
        show_response(view, console)
        if len(view.attempts) > 1 or not view.finished:
            _show_attempts(view, console)
        _show_rest(view, console, logprobs=logprobs)


def _show_facts(view: TrajectoryView, console: Console) -> None:
    console.print(Text(f"trajectory {view.id} of run {view.run}", "bold"))
    facts = [("version", str(view.version)), ("trained by", _fate(view)), *_earned(view)]
    if view.finished_ms is not None:
        facts.append(
            ("time", f"generated in {view.generated_ms} ms, scored at {view.finished_ms} ms")
        )
    if view.sampling:
        sampling = view.sampling
        seed = "" if sampling["seed"] is None else f", seed {sampling['seed']}"
        facts.append(
            (
                "sampling",
                f"temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}, top_k "
                f"{sampling['top_k']}, at most {sampling['max_new_tokens']} tokens{seed}",
            )
        )
    if view.engine is not None:
        facts.append(("engine", f"{view.engine} in {view.worker}"))
    if view.partition is not None:
        facts.append(("record", f"trajectories partition {view.partition}, offset {view.offset}"))
    _grid(facts, console)


def _earned(view: TrajectoryView) -> list[tuple[str, str]]:
    """Reward, advantage and how it was generated, as names and values."""
    facts = []
    if view.finished:
        reward = "none" if view.reward is None else f"{view.reward:g}"
        if view.reward_parts:
            parts = ", ".join(f"{name} {value:g}" for name, value in view.reward_parts.items())
            reward += f" ({parts})"
        facts.append(("reward", reward))
    if view.error:
        facts.append(("error", view.error))
    if view.advantage is not None:
        facts.append(("advantage", f"{view.advantage:+.4g}"))
    if view.finish is not None:
        facts.append(("finish", f"{view.finish} after {view.generated} tokens"))
    if view.logprob is not None:
        facts.append(
            ("surprise", f"{-view.logprob:.4g} nats a token (mean -log p, engine's record)")
        )
    if view.mismatch is not None:
        found = view.mismatch
        facts.append(
            (
                "mismatch",
                f"engine against trainer {found.mean:.2g} nats a token, at most "
                f"{found.largest:.2g} at token {found.at}",
            )
        )
        facts.append(
            (
                "entropy",
                f"{found.entropy_mean:.4g} nats a token, at most {found.entropy_largest:.4g} "
                "(trainer, exact)",
            )
        )
    return facts


def _fate(view: TrajectoryView) -> str:
    stale = view.fate.staleness
    return str(view.fate) + ("" if stale is None else f" (staleness {stale})")


def _show_attempts(view: TrajectoryView, console: Console) -> None:
    if not view.attempts:
        return
    right = ("from", "until", "tokens", "resumed")
    rows = [
        (
            str(each.attempt),
            each.worker,
            f"{each.from_ms} ms",
            f"{each.until_ms} ms",
            str(each.tokens),
            str(each.resumed_tokens),
            _literal(each.end, "green" if each.counts else "yellow"),
        )
        for each in view.attempts
    ]
    _section(console, "attempts", ("attempt", "worker", *right, "end"), rows, right)


def _show_chunks(view: TrajectoryView, console: Console) -> None:
    if not view.chunks:
        return
    counted = next((each.attempt for each in view.attempts if each.counts), None)
    made = [token for token in view.response if token.generated]
    rows = []
    for chunk in view.chunks:
        resumed = f" ({chunk.resumed_tokens} resumed)" if chunk.resumed_tokens else ""
        own = made[chunk.position : chunk.position + chunk.tokens]
        in_colour = bool(own) and chunk.attempt == counted
        rows.append(
            (
                f"{chunk.at_ms} ms",
                f"{chunk.attempt}.{chunk.sequence}",
                chunk.worker,
                f"+{chunk.tokens}{resumed}",
                coloured(own, newlines=False) if in_colour else _literal(chunk.text or "", "dim"),
            )
        )
    names = ("at", "attempt", "worker", "tokens", "text")
    _section(console, "chunk by chunk", names, rows, ("at", "tokens"))


def _show_rest(view: TrajectoryView, console: Console, *, logprobs: bool) -> None:
    if logprobs:
        _show_numbers(view, console)
    for note in view.notes:
        console.print(Text.assemble(("note", "yellow"), ": ", visible(note)))


def _show_numbers(view: TrajectoryView, console: Console) -> None:
    recomputed = view.mismatch is not None
    figures = ["engine", *(["trainer", "difference", "entropy"] if recomputed else [])]
    rows = []
    for index, token in enumerate(token for token in view.response if token.generated):
        text = "" if token.text is None else repr(token.text)
        cells = [str(index), str(token.id), text, f"{token.logprob:.4f}"]
        if recomputed:
            cells += [f"{token.trainer_logprob:.4f}", f"{token.difference:+.1e}"]
            cells += [f"{token.entropy:.4f}"]
        rows.append(cells)
    names = ("token", "id", "text", *figures)
    _section(console, "token by token (nats)", names, rows, ("token", "id", *figures))


def _section(
    console: Console,
    heading: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    right: Sequence[str],
) -> None:
    """A table with its heading; the columns in `right` are aligned there."""
    _heading(console, heading)
    table = Table(box=None)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*map(_literal, row))
    console.print(Padding(table, (0, 0, 0, 1), expand=False))


def _literal(cell: str | Text, style: str = "") -> Text:
    """What is printed as it stands, on one line and without markup; a Text is ready already."""
    return cell if isinstance(cell, Text) else Text(visible(cell, newlines=False), style)


def _written(tokens: Sequence[Token]) -> Text:
    if tokens:
        return coloured(tokens)
    return Text("(not in the log)", "dim")


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold cyan"))


def _indented(console: Console, text: Text) -> None:
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, 2), expand=False))
        return
    for line in text.split("\n", allow_blank=True):
        console.print(Text("  ").append_text(line), soft_wrap=True)


def _grid(facts: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(f"  {name}", "dim"), _literal(value))
    console.print(table)
