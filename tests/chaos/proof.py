"""What is proved once a chaos run has ended: audit, conservation, redo of the whole ledger.

Invariant: the proof looks at the log, the announced weights and the starting model alone; nothing
that the harness remembers of the run is believed.
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from dora.bus import BEGINNING, LogReader, RunTopics
from dora.schemas.records import Admission
from tests.chaos.report import Findings, conservation
from tests.chaos.scene import Scene

_AUDIT_SECONDS = 900.0
_REDO_SECONDS = 1800.0
_READ_SECONDS = 300.0
_REPOSITORY = Path(__file__).resolve().parents[2]


def prove(scene: Scene, findings: Findings, *, redo: bool = True) -> None:
    """Add to `findings` what the log of the ended run says."""
    name = scene.config().run.name
    arguments = ["-m", "dora", "audit", name, "--json", "-b", scene.address]
    findings.audit = _ask(findings, "dora audit", arguments, _AUDIT_SECONDS, (0, 1))
    if findings.audit is not None:
        findings.conservation = conservation(findings.audit, journal_ordinals(scene))
    if redo:
        arguments = ["-m", "tests.chaos.redo_check", str(scene.path), scene.address]
        findings.redo = _ask(findings, "the redo", arguments, _REDO_SECONDS, (0,))


def journal_ordinals(scene: Scene) -> list[int]:
    """Prompt ordinals of the training groups in the admission journal, in its order."""
    topics = RunTopics(scene.config().run.name)
    with closing(LogReader(scene.settings, client_id="chaos-proof")) as reader:
        reader.assign({(topics.dispatch, 0): BEGINNING})
        return [
            message.value.ordinal
            for message in reader.read_to_end(_READ_SECONDS)
            if isinstance(message.value, Admission) and message.value.purpose == "train"
        ]


def _ask(
    findings: Findings, what: str, arguments: list[str], seconds: float, codes: tuple[int, ...]
) -> dict[str, Any] | None:
    """What a process says in JSON; None, with a failure noted, if it says nothing useful."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        findings.failures.append(f"{what} took more than {seconds:g} s")
        return None
    if done.returncode in codes and done.stdout.strip():
        # libraries may have printed lines before it
        text = done.stdout[done.stdout.index("{") :]
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer
    told = done.stderr.strip().splitlines()[-15:]
    failure = "\n".join([f"{what} ended with code {done.returncode}:", *told])
    findings.failures.append(failure)
    return None
