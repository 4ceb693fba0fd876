"""The parts of the live picture of a run that both of its layouts show."""

from rich.text import Text

from dora.consumers.monitor.snapshot import Snapshot, late_share
from dora.consumers.monitor.waits import slow_verifier
from dora.log.presence import ProcessView
from dora.simulation.device import emulation_warning

# Seconds without a chunk after which a wait is shown.
_WAITS_AFTER = 5.0


_COLOURS = {
    "running": "green",
    "ready": "green",
    "training": "green",
    "complete": "green",
    "done": "green",
    "starting": "yellow",
    "loading": "yellow",
    "waiting": "yellow",
    "restarting": "yellow",
    "stopped": "dim",
    "not started": "dim",
    "quiet": "yellow",
    "silent": "red",
    "stalled": "red",
    "failed": "bold red",
}


def waiting_lines(snapshot: Snapshot) -> list[str]:
    """What a run that goes on waits for, where it has been waiting for a while; a stalled run says
    so among its reasons."""
    waits = [wait for wait in snapshot.waits if (wait.seconds_without_chunk or 0.0) >= _WAITS_AFTER]
    lines = [wait.text for wait in waits] if snapshot.health == "running" else []
    more = snapshot.waiting_for - len(snapshot.waits)
    if more > 0 and (lines or snapshot.health == "stalled"):
        lines.append(f"and {more} more {'trajectory' if more == 1 else 'trajectories'}")
    return lines


def trouble_lines(snapshot: Snapshot) -> list[Text]:
    """Why the run does not go on, what it waits for, what fails most, and whether its numbers can
    be trusted."""
    lines = [Text(f"  {reason}", style="red") for reason in snapshot.reasons]
    lines += [Text(f"  {line}", style="yellow") for line in waiting_lines(snapshot)]
    slow = slow_verifier(snapshot.processes)
    for line in (*([slow] if slow else []), *reason_lines(snapshot)):
        lines.append(Text(f"  {line}", style="yellow"))
    warning = emulation_warning(late_share(snapshot.processes))
    if warning is not None:
        lines.append(Text(f"  {warning}", style="yellow"))
    return lines


def reason_lines(snapshot: Snapshot) -> list[str]:
    """The commonest reasons of set-aside groups and of dead letters, with their counts."""
    reasons = (
        ("groups set aside", snapshot.set_aside_reason),
        ("dead letters", snapshot.dead_letter_reason),
    )
    return [f"{what}, {reason.text}" for what, reason in reasons if reason is not None]


def headline(snapshot: Snapshot) -> Text:
    """Name, health and age of the run, which stands still once it is over."""
    text = Text.assemble((snapshot.run, "bold"), "  ", state_text(snapshot.health))
    if snapshot.started_ms is not None:
        end = snapshot.time_ms
        if snapshot.health in ("complete", "stopped") and snapshot.last_ms:
            end = snapshot.last_ms
        text.append(f"  {duration((end - snapshot.started_ms) / 1000)}")
    return text


def time_to_go(snapshot: Snapshot) -> str:
    """How long the steps that are left take at the pace of the last ones; empty if unknown."""
    left, recent = (snapshot.steps_target or 0) - snapshot.step, snapshot.steps[-6:]
    if len(recent) < 2 or left <= 0:
        return ""
    pace = (recent[-1].created_ms - recent[0].created_ms) / (len(recent) - 1) / 1000
    return f"{duration(pace * left)} to go"


def figures(snapshot: Snapshot) -> dict[str, str]:
    """What is said of a run in numbers; a dash stands for what is not known yet."""
    metrics = snapshot.metrics
    idle, mismatch = snapshot.trainer_idle_share, metrics.get("logprob_mismatch_mean")
    done = [point for point in snapshot.evaluations if point.scored]
    held_out = f"{done[0].success_rate:.3f}" if done else "-"
    if len(done) > 1:
        held_out += f" → {done[-1].success_rate:.3f} (v{done[-1].version})"
    ignored = snapshot.duplicates + snapshot.late + snapshot.foreign + snapshot.unreadable
    return {
        "held-out": f"held-out success {held_out}",
        "generated": f"generated {snapshot.tokens_generated_per_second:,.0f} tok/s",
        "trained": f"trained {snapshot.tokens_trained_per_second:,.0f} tok/s",
        "amount": f"{snapshot.trajectories:,} trajectories, {snapshot.tokens:,} tokens"
        + ("" if snapshot.whole_history else " (of the window)"),
        "stale": f"stale {metrics.get('staleness_mean', 0.0):.2f}, max {snapshot.staleness_max} "
        f"of {snapshot.max_staleness}",
        "idle": "trainer idle " + ("-" if idle is None else f"{idle:.0%}"),
        "mismatch": "log-prob mismatch " + ("-" if mismatch is None else f"{mismatch:.1e}"),
        "truncated": f"truncated {metrics.get('truncated_fraction', 0.0):.1%}",
        "unscored": f"unscored {metrics.get('unscored_fraction', 0.0):.1%}",
        "aside": f"set aside {snapshot.groups_set_aside} groups",
        "dead": f"dead letters {snapshot.dead_letters}",
        "ignored": f"ignored {ignored} records",
    }


def shown_state(process: ProcessView) -> str:
    """The state that a process told of, unless it should have spoken since."""
    if process.silent and not process.ended:
        return "silent"
    return "quiet" if process.quiet else process.state


def state_text(state: str) -> Text:
    """A state or health in its colour."""
    return Text(state, style=_COLOURS.get(state, ""))


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def window_title(snapshot: Snapshot) -> str:
    """How much of the window is in use."""
    return f"window: {snapshot.groups_outstanding} of {snapshot.groups_capacity} groups outstanding"


def problem_lines(snapshot: Snapshot, most: int) -> list[Text]:
    """The first contradictions found in the log."""
    return [Text(f"  {problem}", style="red") for problem in snapshot.problems[:most]]
