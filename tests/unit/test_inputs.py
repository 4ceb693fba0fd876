"""What a run's prompts, tokens and scores depend on is noticed when it changes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.config import Config
from dora.errors import RunError, TaskError
from dora.log.inputs import check_inputs, fingerprints
from tests.small_run import make_model

DATA = '{"prompt": "sun", "answer": "nus"}\n{"prompt": "sky", "answer": "yks"}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(DATA)
    (tmp_path / "scoring.py").write_text("from parts.words import right\n\ndef verify(r, i): ...\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "words.py").write_text("def right(): ...\n")
    (tmp_path / "unrelated.py").write_text("")
    return tmp_path


def config(home: Path, *accepted: str, **task: object) -> Config:
    section = {"kind": "jsonl", "path": "data.jsonl", "verifier": "scoring:verify", **task}
    return Config.model_validate(
        {
            "run": {"name": "inputs", "accept_changed": accepted},
            "policy": {"model": str(home / "model")},
            "task": section,
            "trainer": {"steps": 1},
            "home": home,
        }
    )


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def set_json(path: Path, **fields: object) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | fields))


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a line is appended": ("task.path", lambda h: append(h / "data.jsonl", DATA)),
    "a line is changed": (
        "task.path",
        lambda h: (h / "data.jsonl").write_text(DATA.replace("sky", "sea")) and None,
    ),
    "the verifier": ("task.verifier", lambda h: append(h / "scoring.py", "# 7.0\n")),
    "what the verifier imports": (
        "task.verifier",
        lambda h: append(h / "parts" / "words.py", "# more\n"),
    ),
    "the chat template": (
        "policy.tokenizer",
        lambda h: (h / "model" / "chat_template.jinja").write_text("{{ messages }}") and None,
    ),
    "the tokenizer": (
        "policy.tokenizer",
        lambda h: set_json(h / "model" / "tokenizer.json", truncation=None, padding=None, x=1),
    ),
    "the end tokens": (
        "policy.model",
        lambda h: set_json(h / "model" / "generation_config.json", eos_token_id=[1, 4]),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_input_is_refused_by_its_key_unless_it_is_accepted(home: Path, case: str) -> None:
    name, change = CHANGES[case]
    recorded = fingerprints(config(home))
    check_inputs("inputs", recorded, config(home))
    change(home)
    with pytest.raises(RunError, match=f"has changed: {name}: recorded .*, now ") as refused:
        check_inputs("inputs", recorded, config(home))
    assert refused.value.hint and f"--accept-changed {name}" in refused.value.hint
    check_inputs("inputs", recorded, config(home, name))
    with pytest.raises(RunError):
        check_inputs("inputs", recorded, config(home, "something.else"))


def test_what_the_run_does_not_use_may_change(home: Path) -> None:
    recorded = fingerprints(config(home))
    append(home / "unrelated.py", "# other\n")
    (home / "model" / "model.safetensors").touch()
    check_inputs("inputs", recorded, config(home))


def test_a_ledger_that_recorded_no_inputs_is_continued(home: Path) -> None:
    check_inputs("inputs", {}, config(home))


def test_libraries_that_make_prompts_or_scores_count_with_their_version(home: Path) -> None:
    found = fingerprints(
        config(
            home, kind="reasoning-gym", name="spell_backward", path=None,
            verifier="dora.producers.tasks.verifiers:math",
        )
    )  # fmt: skip
    assert {"reasoning-gym", "math-verify", "task.verifier"} <= found.keys()
    assert "task.path" not in found


def test_a_missing_data_file_is_named(home: Path) -> None:
    (home / "data.jsonl").unlink()
    with pytest.raises(TaskError, match=r"data.jsonl cannot be read"):
        fingerprints(config(home))


def test_a_run_without_a_model_asks_no_hub_for_its_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def reached(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", reached)
    given = config(home)
    emulated = given.model_copy(
        update={"policy": given.policy.model_copy(update={"model": "emulated"})}
    )
    assert fingerprints(emulated)["policy.model"] == "ends with none of its own"
