"""Tokenizers that a model directory describes wholly, without the library's Auto classes."""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from dora.config import Config, PolicySection, TaskSection
from dora.errors import PolicyError, TaskError
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import Tokenizer, load_tokenizer, stop_token_ids
from dora.weights.models import check_length
from tests.small_run import VOCABULARY, make_model

LOAD = """
import sys
from dora.config import PolicySection
from dora.producers.tasks.tokenization import load_tokenizer
load_tokenizer(PolicySection(model=sys.argv[1]))
sys.exit("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_process_that_only_needs_text_does_not_load_torch(model: Path) -> None:
    subprocess.run([sys.executable, "-c", LOAD, str(model)], check=True, timeout=120)


def test_a_tokenizer_is_what_its_file_says_whatever_the_kind_of_model(model: Path) -> None:
    """The Auto class takes that of Qwen2 for all models of Qwen2's kind, which loses the spaces."""
    tokenizer = load_tokenizer(PolicySection(model=str(model)))
    ids = tokenizer.encode("sun = 3")
    assert len(ids) == 7 and tokenizer.decode(ids) == "sun = 3"
    assert (tokenizer.highest_id, tokenizer.eos_token_id) == (VOCABULARY - 1, 1)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, vocabulary=32)
    with pytest.raises(PolicyError, match=r"token ids up to 39, but .* has a vocabulary of 32"):
        load_tokenizer(PolicySection(model=str(model)))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    for file in model.glob("*token*"):
        file.unlink()
    with pytest.raises(PolicyError, match=r"policy\.model: "):
        load_tokenizer(PolicySection(model=str(model)))


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": None}, {"text_config": {"vocab_size": 32}}],
    ids=["no size", "nested"],
)
def test_a_model_that_does_not_name_its_vocabulary_is_asked_for_it(
    tmp_path: Path, change: dict[str, object]
) -> None:
    model = make_model(tmp_path)
    file = model / "config.json"
    fields = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    assert load_tokenizer(PolicySection(model=str(model))).highest_id == VOCABULARY - 1


def named(model: Path, **rollout: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "stops"},
            "policy": {"model": str(model)},
            "task": {"kind": "reasoning-gym", "name": "spell_backward"},
            "rollout": rollout,
            "trainer": {"steps": 1},
        }
    )


def write_json(path: Path, **fields: object) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | fields))


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({}, None, (1,)),
        ({"eos_token_id": 4}, None, (1, 4)),
        ({"eos_token_id": [1, 4]}, None, (1, 4)),
        ({"eos_token_id": None}, {"eos_token_id": [7, 4]}, (1, 4, 7)),
        ({"text_config": {"eos_token_id": 9}}, {"eos_token_id": 1}, (1, 9)),
    ],
    ids=["tokenizer only", "one", "list", "generation config", "nested"],
)
def test_every_end_token_that_the_model_names_ends_a_response(
    tmp_path: Path,
    config: dict[str, object],
    generation: dict[str, object] | None,
    stops: tuple[int, ...],
) -> None:
    model = make_model(tmp_path)
    write_json(model / "config.json", **{"eos_token_id": None} | config)
    if generation is not None:
        write_json(model / "generation_config.json", **generation)
    tokenizer = load_tokenizer(PolicySection(model=str(model)))
    assert stop_token_ids(named(model), tokenizer) == stops
    assert stop_token_ids(named(model, stop_token_ids=[3]), tokenizer) == (3,)


def test_an_end_token_that_is_no_number_is_refused_by_file(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    write_json(model / "generation_config.json", eos_token_id=["</s>"])
    tokenizer = load_tokenizer(PolicySection(model=str(model)))
    with pytest.raises(PolicyError, match=r"generation_config.json has no usable eos_token_id"):
        stop_token_ids(named(model), tokenizer)


def with_added_token(directory: Path) -> Tokenizer:
    """A tokenizer with one added token just behind the model's vocabulary, as gemma-3-1b-it has."""
    from transformers import PreTrainedTokenizerFast

    model = make_model(directory)
    backend = PreTrainedTokenizerFast.from_pretrained(str(model))
    assert backend.add_special_tokens({"additional_special_tokens": ["<image>"]}) == 1
    backend.save_pretrained(str(model))
    return load_tokenizer(PolicySection(model=str(model)))


def test_an_added_token_without_an_embedding_is_accepted_until_a_text_holds_it(
    tmp_path: Path,
) -> None:
    tokenizer = with_added_token(tmp_path)
    assert tokenizer.highest_id == VOCABULARY
    assert tokenizer.encode("sun")
    with pytest.raises(TaskError, match=r"<image> \(id 40\).*no embedding for"):
        tokenizer.encode("sun<image>")


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    model = make_model(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(str(model))
    backend.add_special_tokens({"bos_token": "<pad>"})
    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    tokenizer = Tokenizer(backend, "with bos")
    once = tokenizer.encode("sun")
    assert once[0] == 0 and once[1] != 0
    assert tokenizer.encode("<pad>sun") == once
    assert tokenizer.encode("<pad>sun", special_tokens=False) == once


STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            r'{"prompt": [{"role": "system", "content": "s"}], "answer": "1"}',
            r"line 2: the chat template of .* refuses the conversation: System role not supported",
        ),
        (
            r'{"prompt": "s\ud800", "answer": "1"}',
            r"line 2: the tokenizer .* cannot encode the text: ",
        ),
    ],
    ids=["system role", "half a surrogate pair"],
)
def test_a_row_that_template_or_tokenizer_refuses_is_named_by_its_line(
    tmp_path: Path, row: str, message: str
) -> None:
    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    (tmp_path / "data.jsonl").write_text('{"prompt": "sun", "answer": "1"}\n' + row + "\n")
    task = {"kind": "jsonl", "path": "data.jsonl", "verifier": "a:b", "chat_template": True}
    config = named(model).model_copy(update={"home": tmp_path})
    config = config.model_copy(update={"task": TaskSection.model_validate(task)})
    tokenizer = load_tokenizer(PolicySection(model=str(model)))
    with pytest.raises(TaskError, match=message):
        create_task(config, tokenizer)


def test_a_template_that_inserts_the_date_makes_the_same_prompt_every_day(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    dated = "{{ strftime_now('%d %B %Y') }}: {{ messages[0]['content'] }}"
    (model / "chat_template.jinja").write_text(dated)
    policy = PolicySection(model=str(model))
    hello = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(policy).chat(hello) == "01 January 2026: hi"
    assert load_tokenizer(policy, date(2024, 7, 26)).chat(hello) == "26 July 2024: hi"


def test_a_prompt_stays_on_its_side_when_the_template_changes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    rows = [{"prompt": f"q{n}", "answer": "1"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sides = []
    for template in ("{{ messages[0]['content'] }}", "now: {{ messages[0]['content'] }}"):
        (model / "chat_template.jinja").write_text(template)
        task = {
            "kind": "jsonl", "path": "data.jsonl", "verifier": "a:b", "chat_template": True,
            "held_out_fraction": 0.5,
        }  # fmt: skip
        section = TaskSection.model_validate(task)
        config = named(model).model_copy(update={"home": tmp_path, "task": section})
        made = create_task(config, load_tokenizer(config.policy))
        sides.append({made.prompt(n, "eval").item["prompt"] for n in range(40)})
    assert sides[0] == sides[1] and 0 < len(sides[0]) < 40


def test_a_model_without_positions_for_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, positions=64)
    config = named(model, max_new_tokens=60)
    short = config.task.model_copy(update={"max_prompt_tokens": 4})
    check_length(config.model_copy(update={"task": short}))
    long = config.task.model_copy(update={"max_prompt_tokens": 5})
    config = config.model_copy(update={"task": long})
    with pytest.raises(PolicyError, match=r"sequences of 65 tokens do not fit .* has 64 positions"):
        check_length(config)
    write_json(model / "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    check_length(config)
