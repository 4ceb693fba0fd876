"""`dora rescore` and `dora tail --text` on a small run with real texts, over a real Kafka."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from dora.bus import ClusterSettings, cluster_settings
from dora.cli.tail import text as tail_text
from dora.config import KafkaSection
from dora.consumers.monitor.monitor import RunMonitor
from tests.brokers import Cluster
from tests.small_run import dora, make_model, refused
from tests.spoken_run import STEPS, TAKEN_OVER, UNFINISHED, UNSCORED, SpokenRun
from tests.written_run import WrittenRun

NEW = """
import os, time

from scoring import verify as old

def lenient(response, item):
    return {"reward": 1.0 if response.startswith(item["answer"]) else 0.0, "length": len(response)}

def opposite(response, item):
    return 1.0 - old(response, item)

def awkward(response, item):
    if len(item["answer"]) == 4 and response.endswith("x"):
        raise ValueError("no x please")
    if item["answer"] == "nus":
        return float("nan")
    if item["answer"] == "yks" and not response.endswith("x"):
        time.sleep(600)
    return 1

def broken(response, item):
    return item["solution"]
"""


@pytest.fixture(scope="module")
def spoken(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpokenRun]:
    settings: ClusterSettings = cluster_settings(
        KafkaSection(bootstrap_servers=kafka.bootstrap_servers)
    )
    directory = tmp_path_factory.mktemp("spoken")
    model = make_model(tmp_path_factory.mktemp("spoken-model"))
    here = tmp_path_factory.mktemp("here")
    (here / "new_verifier.py").write_text(NEW)
    before, path = Path.cwd(), list(sys.path)
    os.chdir(here)
    try:
        yield SpokenRun(settings, f"spoken-{os.getpid()}", directory, model)
    finally:
        os.chdir(before)
        sys.path[:] = path


def ask(run: SpokenRun, *options: str) -> dict[str, object]:
    result = run.small.look("rescore", "--json", "--jobs", "1", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def tail(run: SpokenRun, *options: str) -> Result:
    return run.small.look("tail", "--text", "--exit", *options)


def test_the_recorded_verifier_comes_to_the_same_rewards(spoken: SpokenRun) -> None:
    result = ask(spoken)
    assert (result["trajectories"], result["unchanged"]) == (11, 10)
    # what live scoring could not score has a reward now
    assert (result["newly_scored"], result["failures"]) == (1, [])
    assert result["unfinished"] == 1 and result["gone"] == []
    assert result["verifier"] == result["recorded_verifier"] == "scoring:verify"
    text = spoken.small.look("rescore", "--jobs", "1", "--steps", "1")
    assert "nothing changes: every reward is the same" in text.stdout
    assert "4 trajectories scored again with scoring:verify" in text.stdout


def test_another_verifier_changes_rewards_signal_and_success(
    spoken: SpokenRun, tmp_path: Path
) -> None:
    out = tmp_path / "new.jsonl"
    result = ask(spoken, "--verifier", "new_verifier:lenient", "--out", str(out))
    assert (result["up"], result["down"], result["to_success"]) == (4, 0, 4)
    groups = result["groups"]
    assert isinstance(groups, dict)
    assert (groups["compared"], groups["incomplete"]) == (5, 1)
    assert (groups["signal_before"], groups["signal_lost"], groups["failed_before"]) == (4, 4, 1)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 11
    one = next(line for line in lines if line["trajectory"] == "g0/1")
    assert (one["old"], one["new"], one["version"]) == (0.0, 1.0, 0)
    assert one["parts"] == {"length": len(spoken.response(0, 1))}


def test_a_verifier_beside_the_user_may_use_the_one_beside_the_configuration(
    spoken: SpokenRun,
) -> None:
    result = spoken.small.look(
        "rescore", "--verifier", "new_verifier:opposite", "--jobs", "1", "--version", "0"
    )
    assert result.exit_code == 0, result.output
    for part in ("2 up, 2 down", "4 turn their sign", "largest changes", "g0/0 (version 0): 1 → 0",
                 spoken.prompt(0).text, spoken.response(0, 0)):  # fmt: skip
        assert part in result.stdout


def test_failures_of_a_verifier_are_counted_with_their_reasons(spoken: SpokenRun) -> None:
    result = ask(
        spoken, "--verifier", "new_verifier:awkward", "--set", "task.verifier_timeout_seconds=2"
    )
    found = {f["code"]: f["reason"] for f in result["failures"]}  # type: ignore[attr-defined]
    assert "no x please (new_verifier.py:" in found["verifier_raised"]
    assert "nan, not a finite number" in found["verifier_bad_value"]
    assert "longer than 2 s" in found["verifier_timeout"]
    assert result["newly_failed"] == sum(f["count"] for f in result["failures"])  # type: ignore[attr-defined]


def test_a_limit_scores_whole_groups(spoken: SpokenRun) -> None:
    result = ask(spoken, "--limit", "5")
    assert result["trajectories"] == 4
    assert result["groups"]["compared"] == 2  # type: ignore[index]


def test_what_cannot_be_rescored_is_refused_with_the_reason(
    spoken: SpokenRun, tmp_path: Path
) -> None:
    def rescore(*options: str) -> Result:
        return spoken.small.look("rescore", "--jobs", "1", *options)

    refused(rescore("--verifier", "nowhere:verify"), 1, "no module nowhere", "looked for in")
    refused(rescore("--verifier", "new_verifier:absent"), 1, 'has no "absent"', "lenient")
    refused(rescore("--verifier", "no hook"), 2, "module:function")
    refused(
        rescore("--verifier", "new_verifier:broken"),
        1, "none of 11 trajectories could be scored", "11 times", "KeyError: 'solution'",
    )  # fmt: skip
    refused(rescore("--version", "7"), 1, "nothing with version 7", "versions 0 to 2")
    refused(rescore("--steps", "1:9"), 1, f"has no step 9: it has steps 1 to {STEPS}")
    refused(rescore("--steps", "2:1"), 2, "the first step comes after the last")
    refused(rescore("--set", "task.path=gone.jsonl"), 1, "gone.jsonl cannot be opened")
    changed = tmp_path / "changed.jsonl"
    changed.write_text(spoken.small.data.read_text().replace("sun", "sum"))
    refused(
        rescore("--set", f"task.path={changed}", "--set", "task.shuffle=false"),
        1, "now gives another prompt at ordinal", "scores against it would mean nothing",
    )  # fmt: skip
    refused(rescore("--out", str(tmp_path / "no" / "out")), 2, "cannot be written")


def test_what_retention_deleted_is_named_and_the_rest_is_scored(
    spoken: SpokenRun, settings: ClusterSettings, run_name: str, tmp_path: Path
) -> None:
    run = SpokenRun(settings, run_name, tmp_path, spoken.small.model)
    log = WrittenRun(settings, run.topics)
    log.delete(run.topics.trajectories, 0, 2)
    result = ask(run)
    assert (result["trajectories"], result["gone"]) == (9, ["g0/0", "g0/1"])
    assert "0 to 1 were deleted by retention" in result["notes"][0]  # type: ignore[index]
    shown = run.small.look("rescore", "--jobs", "1").stdout
    assert "2 trajectories that were trained are not in the log any more: g0/0, g0/1" in shown
    log.delete(run.topics.trajectories, 0, 4)
    refused(
        run.small.look("rescore", "--version", "0"),
        1, "4 that were trained are not in the log any more", "0 to 3 were deleted by retention",
    )  # fmt: skip


def test_text_comes_piece_by_piece_and_a_taken_over_prefix_once(spoken: SpokenRun) -> None:
    lines = [
        json.loads(line) for line in tail(spoken, "--json", "-o", "beginning").stdout.splitlines()
    ]
    texts: dict[str, str] = {}
    for line in lines:
        before = texts.get(line["trajectory"], "")
        # a token is a character here, but for the one that ends the response
        assert line["rewound"] or line["last"] or line["position"] == len(before)
        texts[line["trajectory"]] = before[: line["position"]] + line["text"]
    for ordinal in range(6):
        for sample in (0, 1):
            identity = f"g{ordinal}/{sample}"
            whole = spoken.response(ordinal, sample)
            assert texts[identity] == (whole[:2] if identity == UNFINISHED else whole)
    ends = {line["trajectory"]: line for line in lines if line["last"]}
    assert len(ends) == 11 and ends["g0/0"]["reward"] == 1.0
    assert ends[UNSCORED]["reward"] is None and "too slow" in ends[UNSCORED]["error"]
    assert [line["rewound"] for line in lines if line["trajectory"] == TAKEN_OVER].count(True) == 1
    assert ends[TAKEN_OVER]["attempt"] == 1


def test_one_trajectory_is_followed_from_its_beginning_to_its_end(spoken: SpokenRun) -> None:
    result = spoken.small.look("tail", "--text", "--trajectory", TAKEN_OVER)
    assert result.exit_code == 0, result.output
    text = spoken.response(1, 0)
    assert result.stdout.splitlines()[0] == f"{TAKEN_OVER}  v0  {text[:2]}"
    assert f"{TAKEN_OVER}#1  v0  [from token 2 on again] {text[2:4]}" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"[stop, reward 1, {len(text) + 1} tokens]")


def test_a_version_and_a_limit_choose_what_is_told(spoken: SpokenRun) -> None:
    result = tail(spoken, "-o", "beginning", "--version", "1", "--limit", "2", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["version"] for line in lines} == {1}
    assert sum(line["last"] for line in lines) == 2


def test_bad_requests_for_text_are_refused(spoken: SpokenRun) -> None:
    refused(tail(spoken, "--trajectory", "g99/0"), 1, "has no trajectory g99/0", "g5/0")
    refused(tail(spoken, "-t", "chunks"), 2, "leave --topic out")
    refused(tail(spoken, "-o", "-5"), 2, "-o beginning")
    refused(spoken.small.look("tail", "--rows", "2"), 2, "are for --text")


def test_without_the_tokenizer_tokens_are_numbers_and_it_is_said_once(spoken: SpokenRun) -> None:
    hidden = spoken.small.model.with_name("hidden")
    spoken.small.model.rename(hidden)
    try:
        result = tail(spoken, "-o", "beginning", "--version", "0")
    finally:
        hidden.rename(spoken.small.model)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tokens are shown as numbers") == 1
    first = result.stdout.splitlines()[0]
    assert first.split("v0  ")[1].replace(" ", "").isdecimal()


def test_a_terminal_shows_several_trajectories_with_their_rewards(
    spoken: SpokenRun, monkeypatch: pytest.MonkeyPatch
) -> None:

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24, color_system=None)
    monkeypatch.setattr(tail_text, "Console", lambda **options: console)
    result = dora(
        "tail", spoken.name, "-b", spoken.small.address, "--text", "--exit", "-o", "beginning"
    )
    assert result.exit_code == 0, result.output
    shown = stream.getvalue()
    for part in (f"{spoken.name}: 11 finished", "stop, reward 1", "v0", spoken.response(0, 1)):
        assert part in shown


def test_the_dashboard_goes_on_until_it_is_interrupted(
    spoken: SpokenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora.cli import status

    rounds: list[float] = []

    def follow(monitor: RunMonitor, interval: float) -> None:
        rounds.append(interval)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24, color_system=None)
    monkeypatch.setattr(status, "_follow", follow)
    monkeypatch.setattr(status, "Console", lambda: console)
    result = spoken.small.look("status", "--watch", "--interval", "7")
    assert (result.exit_code, rounds) == (130, [7.0, 7.0, 7.0])
    shown = stream.getvalue()
    for part in (spoken.name, "window:", "set aside", "\x1b[?1049h", "\x1b[?1049l"):
        assert part in shown
    assert shown.rindex("window:") > shown.rindex("\x1b[?1049l"), "the last picture stays"


def test_the_dashboard_as_a_picture_and_as_lines(
    spoken: SpokenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora.cli import status

    picture = tmp_path / "dashboard.svg"
    result = spoken.small.look("status", "--svg", str(picture), "--size", "90x24")
    assert result.exit_code == 0, result.output
    assert spoken.name in picture.read_text()
    refused(spoken.small.look("status", "--svg", str(picture), "--watch"), 2, "one picture")
    refused(
        spoken.small.look("status", "--svg", str(tmp_path / "no" / "x")), 2, "cannot be written"
    )

    def interrupt(monitor: RunMonitor, interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "_follow", interrupt)
    lines = spoken.small.look("status", "--watch")
    assert lines.exit_code == 130
    assert f"step {STEPS}" in lines.stdout and "\x1b" not in lines.stdout
