"""The directory of the starting model: its files, its vocabulary, its end tokens."""

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from dora.config import Config
from dora.errors import PolicyError, WeightsError, first_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer."""
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
"""Files that belong to a model besides its weights."""

EMULATED = "emulated"
"""`policy.model` of a run in which nothing computes."""


def looks_like_path(model: str) -> bool:
    """Whether `model` can only be a directory, never a name on Hugging Face."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def model_directory(model: str) -> Path:
    """The directory of `policy.model`: itself, or the local copy of a Hugging Face model.

    Raises PolicyError, saying what to do, when it is missing or cannot be used.
    """
    directory = Path(model)
    if not directory.exists() and not looks_like_path(model):
        directory = _download(model, [*COMPANIONS, "*.safetensors*", "*.py"])
    if not directory.is_dir():
        raise PolicyError(
            f"policy.model: there is no directory {directory} (relative paths start from "
            f"{Path.cwd()})",
            hint="Give a directory with config.json and *.safetensors, a Hugging Face model name, "
            "or a policy.prepare function that makes the directory (`dora run` calls it).",
        )
    check_model_directory(directory)
    return directory


def check_model_directory(directory: Path) -> None:
    """Raise PolicyError unless `directory` has a readable config.json and safetensors files."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        raise PolicyError(f"policy.model: {directory} has no config.json") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"policy.model: {path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise PolicyError(f"policy.model: {path} holds no JSON object")
    if not any(directory.glob("*.safetensors")):
        pickled = any(directory.glob("*.bin"))
        raise PolicyError(
            f"policy.model: {directory} has no *.safetensors files",
            hint="Pickled weights (*.bin) are not read; convert them with "
            "`AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`."
            if pickled
            else None,
        )


def emulated_vocabulary(model: str) -> int:
    """Size of the vocabulary where nothing computes: 32,000 for `policy.model = "emulated"`, else
    that of the model's directory, which needs a config.json and nothing more. PolicyError if there
    is none."""
    if model == EMULATED:
        return 32_000
    try:
        return vocabulary_of(Path(model))
    except WeightsError as error:
        raise PolicyError(
            f"policy.model: {error.message}",
            hint=f'Set policy.model = "{EMULATED}", which needs no directory.',
        ) from error


def vocabulary_of(directory: Path) -> int:
    """Number of tokens of a model directory, from its config.json; raises `WeightsError`."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"cannot read the size of the vocabulary from {path}: {error}"
        ) from error
    settings = config if isinstance(config, dict) else {}
    size = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise WeightsError(f"{path} has no usable vocab_size: {size!r}")
    return size


def eos_token_ids(model: str) -> frozenset[int]:
    """Tokens that end a text by the model's own account: each `eos_token_id`, one or a list, of
    config.json (and its text_config) and generation_config.json.

    `model` is a directory or a Hugging Face name. PolicyError for a file that cannot be read, or an
    id that is no whole number.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_file(model, name)
        if path is None:
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PolicyError(f"policy.model: {path} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise PolicyError(f"policy.model: {path} holds no JSON object")
        for each in (settings, settings.get("text_config") or {}):
            ids = each.get("eos_token_id")
            for token in ids if isinstance(ids, list) else [ids]:
                if isinstance(token, bool) or not isinstance(token, int | None):
                    raise PolicyError(
                        f"policy.model: {path} has no usable eos_token_id: {ids!r}",
                        hint="Correct the file, or set rollout.stop_token_ids.",
                    )
                if token is not None and token >= 0:
                    found.add(token)
    return frozenset(found)


def check_length(config: Config) -> None:
    """PolicyError if the model has no positions for the longest sequence of the run
    (`task.max_prompt_tokens` and `rollout.max_new_tokens` together): its config.json says how many
    it has, times the factor of a `rope_scaling`."""
    path = model_file(config.policy.model, "config.json")
    if path is None:
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"policy.model: {path} cannot be read: {error}") from error
    inner = settings.get("text_config") or settings
    positions = inner.get("max_position_embeddings")
    factor = (inner.get("rope_scaling") or {}).get("factor") or 1
    if not isinstance(positions, int) or config.max_model_len <= positions * factor:
        return
    raise PolicyError(
        f"sequences of {config.max_model_len} tokens do not fit the model {config.policy.model}, "
        f"which has {positions * factor:g} positions: task.max_prompt_tokens is "
        f"{config.task.max_prompt_tokens}, rollout.max_new_tokens {config.rollout.max_new_tokens}",
        hint="Lower one of the two.",
    )


def model_file(model: str, name: str) -> Path | None:
    """A small file of the model, a directory or a Hugging Face name; None if it has none of this
    name. PolicyError if the model is neither here nor to be had."""
    if model == EMULATED:
        return None
    path = (Path(model) if Path(model).is_dir() else _small_files(model)) / name
    return path if path.is_file() else None


@cache
def _small_files(model: str) -> Path:
    """The local copy of a Hugging Face model's files without its weights: asked for once, because
    a network that is away takes half a minute to say so."""
    return _download(model, COMPANIONS)


def companion_files(directory: Path, *, code: bool = False) -> Iterator[Path]:
    """Files that a published version takes over from the starting model; with `code` also the
    model's own Python files (policy.trust_remote_code)."""
    for name in COMPANIONS:
        if (directory / name).is_file():
            yield directory / name
    if code:
        yield from sorted(directory.glob("*.py"))


def copy_companions(source: Path, target: Path, *, code: bool = False) -> None:
    """Copy the companion files of a model."""
    for path in companion_files(source, code=code):
        shutil.copyfile(path, target / path.name)


def _download(model: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (OSError, ValueError, RuntimeError) as error:
        raise PolicyError(
            f"policy.model: {model!r} is no directory, and cannot be had from Hugging Face: "
            f"{first_line(error)}",
            hint="Check the path; without a network, download the model first and give its "
            "directory.",
        ) from error
