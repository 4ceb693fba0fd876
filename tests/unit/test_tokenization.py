"""Tokenizers that a model directory describes wholly, without the library's Auto classes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dora.config import PolicySection
from dora.errors import PolicyError
from dora.producers.tasks.tokenization import load_tokenizer
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
