"""Workloads, what can never fit, and advice: which bound and which split."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dora.bench.workloads import config_workload, measured_workload, resized
from dora.cli.main import cli
from dora.errors import UsageError
from dora.simulation.advice import Case, Verdict, advise, best_splits, judge, slice_of
from dora.simulation.presets import PRESETS, Preset, preset_named, schedule_variant
from dora.simulation.scenario import Impossible, Workload, check, scenario_of, with_measured

SMALL = Preset(
    "small", "a few short samples", devices=4, training_seconds=20.0, groups_per_step=8,
    group_size=2, slots=8, prompt_tokens=10, max_new_tokens=600, length_mean=60.0,
    length_sigma=1.2, load_seconds=0.5, publish_seconds=0.1,
)  # fmt: skip


def test_the_ideal_step_is_full_batches_on_all_devices_and_training_on_all() -> None:
    preset = preset_named("paper-16")
    rate = 16 * 256 / (0.024 + 256 * 0.0001)
    assert preset.ideal_seconds(1e6) == pytest.approx(1e6 / rate + 480)
    assert preset.training_seconds_beside(6) == pytest.approx(480 * 16 / 10)
    assert preset.balanced_rollout() == 5


@pytest.mark.parametrize("name", PRESETS)
def test_expected_lengths_are_those_that_are_drawn(name: str) -> None:
    preset = preset_named(name)
    lengths = Workload(preset).lengths
    drawn = [lengths(f"g{n // 16}/{n % 16}", n // 16) for n in range(32_768)]
    assert max(drawn) == preset.max_new_tokens
    assert sum(drawn) / len(drawn) == pytest.approx(preset.mean_tokens(), rel=0.05)


@pytest.mark.parametrize(
    ("text", "kind", "bound", "colocated"),
    [
        ("sync", "sync", 0, True),
        ("one-step-off", "one-step-off", 1, False),
        ("partial", "partial", 1, True),
        ("partial:3", "partial", 3, True),
        ("dora:3", "dora", 3, False),
        ("dora:2+streamed", "dora", 2, False),
    ],
)
def test_schedules_are_read(text: str, kind: str, bound: int, colocated: bool) -> None:
    variant = schedule_variant(text)
    assert (variant.kind, variant.max_staleness, variant.colocated) == (kind, bound, colocated)
    assert variant.name == text


@pytest.mark.parametrize(
    "text", ["", "dora:", "dora:-1", "sync:2", "fifo", "sync+streamed", "dora:1+"]
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        schedule_variant(text)


@pytest.mark.parametrize(
    ("workload", "schedule", "rollout", "message"),
    [
        (Workload(SMALL, model_limit=500), "dora:1", 2, r"610 tokens \(10 .* 600 .*takes 500"),
        (Workload(replace(SMALL, kv_cache_tokens=400)), "dora:1", 2, "610 tokens .* holds 400"),
        (
            Workload(replace(SMALL, kv_cache_tokens=700, prompt_tokens=90, group_size=20)),
            "dora:1", 2, "20 x 90 tokens, .* hold 2 x 700",
        ),
        (Workload(replace(SMALL, group_size=17)), "dora:1", 2, "17 samples, .* at most 16"),
        (Workload(SMALL, lora=True, adapters=3), "dora:3", 2, "4 versions alive, .* 3 adapters"),
        (Workload(SMALL, tokens_per_step=100), "sync", 4, "max_staleness = 1 or more"),
        (Workload(SMALL), "dora:1", 4, "4 of 4 devices for rollout"),
    ],
)  # fmt: skip
def test_what_can_never_fit_is_refused_with_the_numbers(
    workload: Workload, schedule: str, rollout: int, message: str
) -> None:
    with pytest.raises(Impossible, match=message):
        check(workload, schedule_variant(schedule), rollout)
    with pytest.raises(Impossible, match=message):
        scenario_of(workload, schedule_variant(schedule), rollout, steps=2, warmup=0)


def test_measured_lengths_are_drawn_and_cut() -> None:
    workload = with_measured(Workload(SMALL), [5, 900, 7])
    assert {workload.lengths(f"g0/{n}", 0) for n in range(200)} == {5, 7, 600}
    assert workload.preset.length_mean == pytest.approx((5 + 7 + 600) / 3)
    with pytest.raises(Impossible, match="no length"):
        with_measured(workload, [])


def test_a_large_cluster_is_simulated_by_a_slice_with_the_same_work_per_device() -> None:
    large = replace(SMALL, devices=1024, groups_per_step=2048)
    part, parts = slice_of(large)
    assert (part.devices, part.groups_per_step, parts) == (64, 128, 16)
    assert slice_of(SMALL) == (SMALL, 1)


def _pretended(seconds: dict[str, float], best: dict[str, int]) -> object:
    """Judges by a valley around the best split instead of a simulation."""
    real = judge(Case(Workload(SMALL), schedule_variant("dora:1"), 2, 3, 1))
    asked: list[tuple[str, int]] = []

    def judges(cases: Sequence[Case]) -> Iterable[Verdict]:
        for case in cases:
            name = case.variant.name
            asked.append((name, case.rollout))
            step = seconds[name] * (1 + 0.1 * abs(case.rollout - best.get(name, case.rollout)))
            simulated = replace(real.simulated, step_seconds=step)
            devices = case.workload.preset.devices
            yield Verdict(case.variant, case.rollout, devices - case.rollout, simulated, 0.5)

    judges.asked = asked  # type: ignore[attr-defined]
    return judges


@pytest.mark.parametrize("best", [1, 17, 40, 63])
def test_the_search_finds_the_best_split_without_trying_all(best: int) -> None:
    workload = Workload(replace(SMALL, devices=64, groups_per_step=128))
    judges = _pretended({"dora:2": 10.0}, {"dora:2": best})
    variant = schedule_variant("dora:2")
    found = best_splits(workload, [variant], steps=3, warmup=1, judges=judges)  # type: ignore[arg-type]
    assert found[variant][0].rollout == best
    assert len(judges.asked) < 32  # type: ignore[attr-defined]


def test_the_least_staleness_that_nothing_beats_is_advised() -> None:
    seconds = {"sync": 30.0, "dora:1": 20.0, "dora:2": 15.0, "dora:3": 14.9}
    judges = _pretended(seconds, {name: 2 for name in seconds if name != "sync"})
    variants = [schedule_variant(name) for name in seconds]
    advice = advise(Workload(SMALL), variants, steps=3, warmup=1, judges=judges)  # type: ignore[arg-type]
    assert advice.chosen.variant.name == "dora:2"
    assert advice.chosen.rollout == 2
    assert "1.33 times as fast as dora:1" in advice.reason
    assert "dora:3 would gain 0.7%" in advice.reason


def test_schedules_that_do_not_fit_are_left_out_of_an_advice() -> None:
    seconds = {"sync": 30.0, "dora:1": 20.0, "dora:2": 15.0}
    judges = _pretended(seconds, {})
    variants = [schedule_variant(name) for name in seconds]
    workload = Workload(SMALL, lora=True, adapters=2)
    advice = advise(workload, variants, steps=3, warmup=1, judges=judges)  # type: ignore[arg-type]
    assert advice.chosen.variant.name == "dora:1"
    with pytest.raises(Impossible, match="takes 100"):
        advise(Workload(SMALL, model_limit=100), variants, steps=3, warmup=1)


CONFIG = """
[run]
name = "plan"
[policy]
model = "m"
[task]
kind = "synthetic"
synthetic_prompt_tokens = 10
max_prompt_tokens = 10
[window]
groups_per_step = 8
group_size = 2
max_staleness = 1
[rollout]
workers = 4
engine = "emulated"
capacity = 8
max_new_tokens = 600
[rollout.emulated]
length_mean = 60.0
length_sigma = 1.2
[trainer]
steps = 4
engine = "emulated"
[trainer.emulated]
step_seconds = 20.0
seconds_per_token = 0.001
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(CONFIG)
    return path


def test_a_configuration_is_a_workload(config: Path) -> None:
    workload = config_workload(config, ())
    assert workload.preset.devices == 4
    assert workload.preset.training_seconds == 20.0
    assert workload.training_seconds_per_token == 0.001
    twice = resized(workload, 8, 32).preset
    assert (twice.devices, twice.groups_per_step) == (8, 32)
    assert twice.training_seconds == pytest.approx(20.0 / 2 * 4)


def _invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["simulate", *map(str, arguments)])
    return done.exit_code, done.output


def test_schedules_are_compared_and_printed_for_programs(config: Path) -> None:
    code, output = _invoke(config, "--json", "--jobs", 1, "--steps", 4)
    assert code == 0, output
    found = json.loads(output)["schedules"]
    assert set(found) == {"sync", "one-step-off", "partial", "dora:1", "dora:2", "dora:3"}
    assert found["sync"]["ratio_to_sync"] == 1.0
    assert all(each["violations"] == 0 for each in found.values())
    assert found["partial"]["mixed_version"] > 0
    assert {
        "step_seconds", "ideal_share", "ratio_to_sync", "trainer_idle_share", "rollout_only_share",
        "staleness_mean", "staleness_max", "migrations",
    } <= set(found["dora:3"])  # fmt: skip


def test_advice_names_a_bound_and_a_split(config: Path) -> None:
    code, output = _invoke(config, "--advise", "--max-staleness", 1, "--jobs", 1, "--steps", 3)
    assert code == 0, output
    assert "Advice: dora:1" in output or "Advice: sync" in output
    code, output = _invoke(
        config, "--advise", "--max-staleness", 1, "--jobs", 1, "--steps", 3, "--json"
    )
    advice = json.loads(output)["advice"]
    assert advice["rollout_devices"] + advice["training_devices"] >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either a CONFIG or a --preset"),
        (("--preset", "none"), "no preset 'none'"),
        (("--preset", "paper-16", "--schedule", "fifo"), "'fifo' is no schedule"),
        (("--preset", "paper-16", "--rollout", "16"), "16 of 16 devices for rollout"),
        (("--preset", "paper-16", "--rollout", "half"), "a number of devices, or `best`"),
        (("--preset", "paper-16", "--set", "a.b=1"), "a preset is what it is"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, ...], message: str) -> None:
    code, output = _invoke("--jobs", "1", *arguments)
    assert code == 2
    assert message in output


def test_a_file_with_lengths_that_are_none_is_refused_with_its_line(
    config: Path, tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("12\n\n-3\n")
    code, output = _invoke(config, "--lengths", lengths)
    assert code == 2
    assert "line 3: '-3' is no length in tokens" in output
    with pytest.raises(UsageError, match="cannot read the lengths"):
        measured_workload(Workload(SMALL), tmp_path / "none")
