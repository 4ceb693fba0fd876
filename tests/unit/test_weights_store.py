"""The weight store: complete or invisible, verified when read."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dora.consumers.trainer.checkpoints import Checkpoints
from dora.errors import PolicyError, WeightsError
from dora.schemas.records import Policy, WeightFile, pack_logprobs, pack_tokens
from dora.weights.canary import canary_tokens, check
from dora.weights.models import model_directory
from dora.weights.store import Published, WeightStore, safe_relative, version_name
from dora.weights.tensors import read_tensors, weights_checksum

STATE = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.ones(3)}


def companions(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def policy(published: Published, version: int = 3) -> Policy:
    return Policy(
        run="r",
        version=version,
        kind="full",
        weights_uri=published.uri,
        files=published.files,
        weights_checksum=published.checksum,
        canary_token_ids=pack_tokens([]),
        canary_logprobs=pack_logprobs([]),
        slots=(),
        created_ms=0,
    )


def test_a_published_version_is_fetched_with_the_same_tensors(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    published = store.publish(3, STATE, companions)
    directory = store.fetch(policy(published), tmp_path / "cache")
    found = read_tensors(directory)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    assert weights_checksum(found) == published.checksum
    assert [f.path for f in published.files] == ["config.json", "model.safetensors"]
    assert store.versions() == [version_name(3, published.checksum)]


@pytest.mark.parametrize("name", ["My Disk", "é", "100%20 sure", "a#b?c"])
@pytest.mark.parametrize("as_url", [False, True])
def test_a_store_lies_in_the_directory_that_its_path_or_url_names(
    tmp_path: Path, name: str, as_url: bool
) -> None:
    place = tmp_path / name
    store = WeightStore(place.as_uri() if as_url else str(place))
    published = store.publish(3, STATE, companions)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert store.fetch(policy(published), tmp_path).parent == place
    assert WeightStore(store.url).versions() == [version_name(3, published.checksum)]


def test_the_checksum_depends_on_names_types_shapes_and_values_but_not_on_order() -> None:
    base = weights_checksum(STATE)
    assert weights_checksum(dict(reversed(STATE.items()))) == base
    variants = [
        {"b": STATE["b"], "c": STATE["a"]},
        {"b": STATE["b"], "a": STATE["a"].bfloat16()},
        {"b": STATE["b"].reshape(3, 2), "a": STATE["a"]},
        {"b": STATE["b"] + torch.tensor(1e-6), "a": STATE["a"]},
    ]
    assert len({base, *(weights_checksum(v) for v in variants)}) == 5
    assert weights_checksum({"a": torch.ones(2, dtype=torch.bfloat16)})


def test_a_failed_publish_leaves_nothing_visible(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))

    def broken(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightsError, match=r"cannot store version 7.*No space left") as caught:
        store.publish(7, STATE, broken)
    assert "weights.keep" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_publishing_the_same_version_again_gives_the_same_directory(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))
    assert store.publish(1, STATE, companions) == store.publish(1, STATE, companions)
    assert len(store.versions()) == 1


@pytest.mark.parametrize("remote", [False, True])
def test_damaged_files_are_refused_with_name_expected_and_found(
    tmp_path: Path, remote: bool
) -> None:
    url = f"memory://{tmp_path.name}" if remote else str(tmp_path / "weights")
    store = WeightStore(url)
    published = store.publish(3, STATE, companions, scratch=tmp_path / "scratch")
    good = policy(published)
    weights = published.files[1]
    wrong = replace(weights, sha256="0" * 64)
    with pytest.raises(WeightsError, match=f"model.safetensors has sha256 {weights.sha256}.*0000"):
        store.fetch(replace(good, files=(wrong,)), tmp_path / "cache")
    short = replace(weights, size=5)
    with pytest.raises(WeightsError, match=f"has {weights.size} bytes, its manifest says 5"):
        store.fetch(replace(good, files=(short,)), tmp_path / "cache")
    absent = WeightFile("other.safetensors", 5, "0" * 64)
    with pytest.raises(WeightsError, match=r"other\.safetensors"):
        store.fetch(replace(good, files=(absent,)), tmp_path / "cache")
    assert store.fetch(good, tmp_path / "cache").is_dir()


def test_a_remote_store_is_copied_once_and_keeps_two_versions(tmp_path: Path) -> None:
    store = WeightStore(f"memory://{tmp_path.name}")
    cache = tmp_path / "cache"
    for version in range(4):
        state = {"a": torch.full((2,), float(version))}
        published = store.publish(version, state, companions, scratch=tmp_path / "scratch")
        directory = store.fetch(policy(published, version), cache)
        assert torch.equal(read_tensors(directory)["a"], state["a"])
    assert len(store.versions()) == 4
    assert len(list(cache.iterdir())) == 2
    store.keep_only(store.versions()[2:])
    assert len(store.versions()) == 2


def test_orphans_and_unfinished_versions_are_removed_and_foreign_files_kept(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))
    names = [
        version_name(v, store.publish(v, {"a": torch.ones(v + 1)}, companions).checksum)
        for v in range(3)
    ]
    (tmp_path / ".unfinished-v00000009-x").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    removed = store.keep_only(names[1:2])
    assert sorted(removed) == sorted([".unfinished-v00000009-x", names[0], names[2]])
    assert store.versions() == names[1:2]
    assert (tmp_path / "notes.txt").exists()
    store.delete(names[0])


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b"])
def test_paths_that_leave_the_directory_are_refused(path: str) -> None:
    with pytest.raises(WeightsError, match="no path inside"):
        safe_relative(path)


def test_a_policy_record_cannot_point_outside_the_store(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))
    good = policy(store.publish(1, STATE, companions))
    with pytest.raises(WeightsError, match="no version of a store"):
        store.fetch(replace(good, weights_uri="file:///etc"), tmp_path)
    with pytest.raises(WeightsError, match="not in the weight store"):
        store.fetch(replace(good, weights_uri="file:///x/v00000002-0123456789abcdef"), tmp_path)


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(WeightsError, match="cannot be opened"):
        WeightStore("nosuch://bucket")


def test_the_canary_is_fixed_and_fails_on_any_wrong_number() -> None:
    tokens = canary_tokens(5, 60, 100)
    assert tokens == canary_tokens(5, 60, 100) and tokens != canary_tokens(6, 60, 100)
    assert len(tokens) == 32 and all(0 <= t < 60 for t in tokens)
    assert len(canary_tokens(5, 60, 10)) == 10
    expected = [-1.0, -2.0, -3.0]
    close = check([-1.01, -2.0, -3.0], expected, 0.02)
    assert close.passed and math.isclose(close.max_difference, 0.01)
    assert not check([-1.0, -2.0, -3.1], expected, 0.02).passed
    assert not check([-1.0, math.nan, -3.0], expected, 0.02).passed
    assert not check([-1.0, -2.0], expected, 0.02).passed
    assert not check([], [], 0.02).passed


def test_an_unusable_model_directory_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no directory"):
        model_directory(str(tmp_path / "absent"))
    for path in ("./absent", "../absent", "~/absent"):  # never looked up as a name
        with pytest.raises(PolicyError, match="relative paths start from"):
            model_directory(path)
    with pytest.raises(PolicyError, match=r"no config\.json"):
        model_directory(str(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(PolicyError, match="cannot be read"):
        model_directory(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PolicyError, match=r"no \*\.safetensors(.|\n)*save_pretrained"):
        model_directory(str(tmp_path))


def test_what_a_trainer_that_took_over_may_have_written_is_left_alone(tmp_path: Path) -> None:
    names = [f"v{version:08d}-{version:016x}" for version in range(1, 6)]
    later = ".unfinished-v00000006-0123456789abcdef-01234567"
    former = ".unfinished-v00000002-0123456789abcdef-01234567"
    for name in (*names, former, later):
        (tmp_path / "weights" / name).mkdir(parents=True)
    store = WeightStore(str(tmp_path / "weights"))
    assert store.keep_only(names[2:3], newest=3) == [former, *names[:2]]
    assert store.versions() == names[2:]
    assert (tmp_path / "weights" / later).exists()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    kept = [f"step-{version:08d}-{version:016x}" for version in (4, 8, 12)]
    for name in (*kept, ".unfinished-x"):
        (checkpoints.directory / name).mkdir(parents=True)
    assert checkpoints.keep_only([], newest=8) == kept[:2]
    assert checkpoints.names() == {kept[2]}
    assert checkpoints.keep_only([]) == [".unfinished-x", kept[2]]
