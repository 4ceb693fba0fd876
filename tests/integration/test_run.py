"""`dora run` as a user starts it: separate processes, real Kafka, real trainer, real vLLM."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.small_run import make_model

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 280.0

QUICK = '''
"""The demo's policy after a few seconds of warm start."""
import spell_backward


def prepare(directory, config):
    spell_backward.prepare_policy(directory, config, spell_backward.WarmStart(steps=30, batch=8))
'''


@dataclass
class Workspace:
    """A directory with a configuration, as a user has it."""

    directory: Path
    bootstrap: str
    run: str

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "dora", *arguments]

    def start(self, **settings: object) -> subprocess.Popen[str]:
        sets = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        return subprocess.Popen(
            self.command("run", "quick.toml", "--plain", "-b", self.bootstrap, *sets),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"the run did not end in {DEADLINE} s:\n{output}\n{self.logs()}")
        return output

    def logs(self) -> str:
        files = sorted((self.directory / "runs" / self.run / "logs").glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text()[-3000:]}" for f in files)

    def ask(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            self.command(*arguments, self.run, "--json", "-b", self.bootstrap),
            cwd=self.directory, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "runs" / self.run / "summary.json").read_text())

    def check_audit(self) -> dict[str, Any]:
        audit = self.ask("audit")
        assert set(audit["violations"]) == {
            "lost", "duplicated", "mixed_version", "mixed_prompt", "stale", "incomplete_group",
            "torn_step", "checksum",
        }  # fmt: skip
        assert not any(audit["violations"].values()), audit
        started = audit["groups_started"]
        assert started == (
            audit["groups_trained"] + audit["groups_set_aside"] + audit["groups_outstanding"]
        )
        return audit


@pytest.fixture
def workspace(kafka, run_name: str, tmp_path: Path) -> Workspace:
    shutil.copy(EXAMPLES / "spell_backward.py", tmp_path)
    (tmp_path / "quick.py").write_text(QUICK)
    text = (EXAMPLES / "spell_backward.toml").read_text()
    text = text.replace('"spell_backward:prepare"', '"quick:prepare"')
    text = text.replace('name = "spell-backward"', f'name = "{run_name}"')
    assert "quick:prepare" in text and run_name in text
    (tmp_path / "quick.toml").write_text(text)
    return Workspace(tmp_path, kafka.bootstrap_servers, run_name)


@pytest.fixture
def prepared(workspace: Workspace) -> Workspace:
    """With a model that is there already."""
    make_model(workspace.directory / "models" / "spell_backward", positions=128)
    return workspace


SMALL = {
    "window__groups_per_step": 4,
    "window__group_size": 4,
    "evaluation__prompts": 16,
    "evaluation__every": 0,
    "rollout__kv_cache_gib": 0.25,
}
EMULATED = {
    **SMALL,
    "rollout__engine": "emulated",
    "rollout__capacity": 16,
    "rollout__max_new_tokens": 48,
    "rollout__heartbeat_seconds": 0.5,
    "rollout__heartbeat_timeout_seconds": 4,
    "rollout__emulated": "{time_scale=0.2, length_mean=24, load_seconds=0.2}",
    "trainer__engine": "emulated",
    "trainer__emulated": "{step_seconds=0.5}",
}


def test_a_run_with_vllm_ends_with_a_summary_and_a_clean_audit(
    workspace: Workspace,
) -> None:
    settings = {**SMALL, "rollout__workers": 1}
    process = workspace.start(**settings, trainer__steps=3)
    output = workspace.finish(process)
    assert process.returncode == 0, output + workspace.logs()
    summary = workspace.summary()
    assert (summary["run"], summary["steps"]) == (workspace.run, 3)
    assert {
        "wall_seconds", "success_first", "success_last", "trajectories", "tokens",
        "max_staleness", "live_versions_max", "trainer_idle_share", "logprob_mismatch_mean",
    } <= summary.keys()  # fmt: skip
    assert summary["trajectories"] == 3 * 4 * 4 + 2 * 16
    assert summary["max_staleness"] <= 1
    assert summary["logprob_mismatch_mean"] < 1e-4
    assert str(Path("runs") / workspace.run / "summary.json") in output
    audit = workspace.check_audit()
    assert (audit["steps"], audit["groups_trained"], audit["groups_outstanding"]) == (3, 12, 0)


def steps_done(workspace: Workspace) -> int:
    log = workspace.directory / "runs" / workspace.run / "logs" / "trainer.log"
    text = log.read_text() if log.exists() else ""
    return text.count(" groups set aside, waited")


def await_steps(workspace: Workspace, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while steps_done(workspace) < count:
        assert process.poll() is None, process.communicate()[0] + workspace.logs()
        assert time.monotonic() < deadline, f"no {count} steps\n{workspace.logs()}"
        time.sleep(0.2)  # the condition is a file that another process writes


def children(process: subprocess.Popen[str], part: str) -> list[psutil.Process]:
    def is_part(child: psutil.Process) -> bool:
        try:
            return part in child.cmdline()
        except psutil.NoSuchProcess:
            return False

    return [c for c in psutil.Process(process.pid).children(recursive=True) if is_part(c)]


def test_an_interrupted_run_says_how_to_go_on_and_goes_on(prepared: Workspace) -> None:
    process = prepared.start(**EMULATED, trainer__steps=30)
    await_steps(prepared, 2, process)
    process.send_signal(signal.SIGINT)
    output = prepared.finish(process)
    assert process.returncode != 0
    assert "dora run quick.toml" in output
    assert not children_alive(prepared)
    process = prepared.start(**EMULATED, trainer__steps=6)
    output = prepared.finish(process)
    assert process.returncode == 0, output + prepared.logs()
    audit = prepared.check_audit()
    assert audit["steps"] >= 6
    assert audit["groups_outstanding"] == 0


def children_alive(workspace: Workspace) -> list[str]:
    return [
        " ".join(p.info["cmdline"])
        for p in psutil.process_iter(["cmdline", "cwd"])
        if p.info["cmdline"] and p.info["cwd"] == str(workspace.directory)
    ]


@pytest.mark.parametrize("victims", [("rollout", "train", "coordinator")], ids="-".join)
def test_a_run_survives_the_sudden_death_of_each_of_its_parts(
    prepared: Workspace, victims: tuple[str, ...]
) -> None:
    process = prepared.start(**EMULATED, trainer__steps=12, trainer__checkpoint_every=4)
    for count, victim in enumerate(victims, start=1):
        await_steps(prepared, 2 * count, process)
        alive = children(process, victim)
        assert alive, f"no {victim} process"
        alive[0].kill()
    output = prepared.finish(process)
    assert process.returncode == 0, output + prepared.logs()
    audit = prepared.check_audit()
    assert (audit["steps"], audit["groups_trained"]) == (12, 48)
