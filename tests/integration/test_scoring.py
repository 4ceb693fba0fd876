"""The verifier pool: whatever a verifier does, each response comes back once, rightly blamed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora.config import TaskSection
from dora.errors import TaskError
from dora.producers.worker.scoring import Scored, Scorer
from tests.waiting import until

DEADLINE = 90.0

VERIFIERS = """
import os, signal, sys, time

def judge(response, item):
    if response == "raise":
        raise KeyError("no such field")
    if response == "exit":
        sys.exit(3)
    if response == "hang":
        while True:
            pass
    if response == "die":
        os._exit(7)
    if response == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "none":
        return None
    if response == "parts":
        return {"reward": 0.75, "form": 1, "content": 0.5}
    if response == "no total":
        return {"form": 1.0}
    if response == "infinite part":
        return {"reward": 1.0, "form": float("inf")}
    if response == "pid":
        return os.getpid()
    return float(response == item["answer"])
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "verifier_under_test.py").write_text(VERIFIERS)
    return tmp_path


def section(**settings: Any) -> TaskSection:
    return TaskSection(
        **{
            "kind": "jsonl",
            "path": Path("unused"),
            "verifier": "verifier_under_test:judge",
            "verifier_timeout_seconds": 1.5,
            **settings,
        }
    )


@pytest.fixture
def scorer(home: Path) -> Iterator[Scorer]:
    with Scorer(section(), home) as scorer:
        scorer.wait_ready(DEADLINE)
        yield scorer


def collect(scorer: Scorer, count: int) -> list[Scored]:
    scored: list[Scored] = []

    def complete() -> bool:
        scored.extend(scorer.poll())
        return len(scored) >= count

    until(complete, f"{count} scores", DEADLINE)
    assert len(scored) == count
    return scored


def submit(scorer: Scorer, *responses: str) -> None:
    for number, response in enumerate(responses):
        scorer.submit(f"{number} {response}", response, {"answer": "right"})


def test_rewards_come_back_under_their_keys(scorer: Scorer) -> None:
    submit(scorer, "right", "wrong", "parts")
    assert scorer.pending == 3
    found = {scored.key: scored for scored in collect(scorer, 3)}
    assert found["0 right"] == Scored("0 right", 1.0)
    assert found["1 wrong"] == Scored("1 wrong", 0.0)
    assert found["2 parts"] == Scored("2 parts", 0.75, {"form": 1.0, "content": 0.5})
    assert scorer.pending == 0


@pytest.mark.parametrize(
    ("response", "code", "reason"),
    [
        ("raise", "verifier_raised", "KeyError: 'no such field' (verifier_under_test.py:6)"),
        ("exit", "verifier_raised", "SystemExit: 3"),
        ("hang", "verifier_timeout", "took longer than 1.5 s"),
        ("die", "verifier_died", "exit code 7"),
        ("killed", "verifier_died", "signal 9"),
        ("nan", "verifier_bad_value", "returned nan"),
        ("text", "verifier_bad_value", "returned 'good'"),
        ("none", "verifier_bad_value", "returned None"),
        ("no total", "verifier_bad_value", 'without "reward"'),
        ("infinite part", "verifier_bad_value", "'form': inf"),
    ],
)
def test_a_failing_verifier_is_named_and_the_pool_goes_on(
    scorer: Scorer, response: str, code: str, reason: str
) -> None:
    submit(scorer, "right", "right", response, "right", "wrong", "right")
    found = {scored.key: scored for scored in collect(scorer, 6)}
    failed = found.pop(f"2 {response}")
    assert (failed.reward, failed.error_code) == (None, code)
    assert reason in (failed.error or "")
    assert {key: scored.reward for key, scored in found.items()} == {
        "0 right": 1.0,
        "1 right": 1.0,
        "3 right": 1.0,
        "4 wrong": 0.0,
        "5 right": 1.0,
    }


def test_an_idle_process_that_is_killed_is_replaced(scorer: Scorer) -> None:
    submit(scorer, "pid")
    pid = int(collect(scorer, 1)[0].reward or 0)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid), "the end of the process", DEADLINE)
    submit(scorer, "right", "pid")
    rewards = {scored.key: scored.reward for scored in collect(scorer, 2)}
    assert rewards["0 right"] == 1.0
    assert rewards["1 pid"] != pid


def test_many_responses_over_several_processes_come_back_once_each(home: Path) -> None:
    with Scorer(section(verifier_processes=2), home) as scorer:
        submit(scorer, *(["right", "wrong", "raise"] * 300))
        scored = collect(scorer, 900)
    assert len({one.key for one in scored}) == 900
    assert sum(one.reward or 0 for one in scored) == 300
    assert sum(one.error_code == "verifier_raised" for one in scored) == 300


def test_the_default_is_the_scorer_of_reasoning_gym(tmp_path: Path) -> None:
    settings = TaskSection(kind="reasoning-gym", name="spell_backward")
    with Scorer(settings, tmp_path) as scorer:
        for response in ("tac", "<answer>tac</answer> I think", "tax"):
            scorer.submit(response, response, {"answer": "tac"})
        rewards = {scored.key: scored.reward for scored in collect(scorer, 3)}
    assert rewards["tac"] == rewards["<answer>tac</answer> I think"] == 1.0
    assert 0 < (rewards["tax"] or 0) < 1


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("So the result is $\\frac{1}{2}$.", "0.5", 1.0),
        ("It is \\boxed{(x-5)(x-4)}", "(x-4)(x-5)", 1.0),
        ("We get 8\\sqrt{2}, that is $8\\sqrt{2}$", "8\\sqrt{2}", 1.0),
        ("The answer is 12.", "13", 0.0),
        ("I do not know.", "13", 0.0),
    ],
)
def test_math_verify_judges_by_value(response: str, answer: str, reward: float) -> None:
    from dora.producers.tasks.verifiers import math

    assert math(response, {"answer": answer}) == reward


def test_a_verifier_that_cannot_be_loaded_is_reported(home: Path) -> None:
    with (
        Scorer(section(verifier="verifier_under_test:absent"), home) as scorer,
        pytest.raises(TaskError, match='has no "absent"'),
    ):
        scorer.wait_ready(DEADLINE)


def test_verifier_processes_end_when_their_parent_is_killed(home: Path) -> None:
    """Even while a verifier is busy: the kernel ends them."""
    program = home / "parent.py"
    program.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from dora.config import TaskSection\n"
        "from dora.producers.worker.scoring import Scorer\n"
        "if __name__ == '__main__':\n"
        "    task = TaskSection(kind='jsonl', path='x', verifier='verifier_under_test:judge',\n"
        "                       verifier_timeout_seconds=600)\n"
        "    scorer = Scorer(task, Path(__file__).parent)\n"
        "    scorer.wait_ready()\n"
        "    scorer.submit('0', 'hang', {})\n"
        "    print('busy', flush=True)\n"
        "    time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"busy\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        parent.kill()
        parent.wait(DEADLINE)
        until(lambda: not any(map(alive, children)), "the end of the verifier processes", DEADLINE)
    finally:
        parent.kill()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
