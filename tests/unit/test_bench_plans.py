"""What `dora bench` runs for each schedule, and what it draws."""

from pathlib import Path

import pytest

from dora.bench.comparison import Span, Timeline
from dora.bench.emulated import EmulatedWorkload, emulated_preset, run_sets, schedule_plans
from dora.bench.plots import plot_curves, plot_schedules
from dora.bench.real import summary_of
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.simulation.presets import PRESETS, RIVALS

PNG = b"\x89PNG\r\n\x1a\n"


def workload(directory: Path, name: str = "paper-16", *sets: str) -> EmulatedWorkload:
    return emulated_preset(name, sets, KafkaOverrides(), directory=directory, time_scale=0.02)


def configs(work: EmulatedWorkload, directory: Path, split: str = "auto") -> dict[str, Config]:
    found = {}
    for plan in schedule_plans(work, RIVALS, split, None, 5):
        sets = run_sets(plan, "one", directory)
        found[plan.variant.name] = load_config(work.path, sets=sets)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_the_configuration_of_a_preset_describes_its_devices_and_work(
    name: str, tmp_path: Path
) -> None:
    assert workload(tmp_path, name).preset == PRESETS[name]


def test_schedules_differ_in_schedule_bound_and_devices_only(tmp_path: Path) -> None:
    found = configs(workload(tmp_path), tmp_path, split="6")
    apart = {"schedule", "window", "rollout", "trainer"}
    rest = [config.model_dump(exclude=apart) for config in found.values()]
    assert all(each == rest[0] for each in rest)
    assert {name: c.window.max_staleness for name, c in found.items()} == {
        "sync": 0, "one-step-off": 1, "partial": 1, "dora:1": 1, "dora:2": 2, "dora:3": 3,
    }  # fmt: skip
    for name, config in found.items():
        alternates = name in ("sync", "partial")
        assert config.schedule.kind == name.partition(":")[0]
        assert config.schedule.colocated == alternates
        assert config.rollout.workers == (16 if alternates else 6)
        assert config.trainer.emulated.step_seconds == pytest.approx(
            480 if alternates else 480 * 16 / 10
        )


def test_what_is_measured_ends_before_a_run_stops_to_start_groups(tmp_path: Path) -> None:
    work = workload(tmp_path)
    for plan in schedule_plans(work, RIVALS, "auto", None, 5):
        bound = plan.variant.max_staleness
        assert plan.warmup == (1 if bound == 0 else bound + 2)
        config = load_config(work.path, sets=run_sets(plan, "one", tmp_path))
        assert config.trainer.steps == plan.warmup + 5 + bound


def test_a_preset_with_other_devices_has_no_known_splits(tmp_path: Path) -> None:
    changed = workload(tmp_path, "paper-16", "rollout.workers=8").preset
    assert changed.devices == 8
    assert changed.splits == ()


def test_plots_are_written_as_png(tmp_path: Path) -> None:
    summary = {
        "ideal_share": 0.5, "step_seconds": 9.0,
        "spread": {"ideal_share": [0.4, 0.6], "step_seconds": [8.0, 10.0]},
    }  # fmt: skip
    line = Timeline("dora:1", 9.0, ("w0", "w1"), (Span("w1", 3, 0.0, 4.0),), ((4, 5.0, 9.0),))
    plot_schedules(tmp_path / "a.png", "title", {"dora:1": summary}, [line])
    curve = {"step": [1, 2], "seconds": [1.0, 2.0], "success": [0.1, 0.4]}
    plot_curves(tmp_path / "b.png", "title", {"sync": [curve, curve], "dora:3": [curve]})
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_a_real_mode_is_summed_up_over_its_runs() -> None:
    def run(rate: float, success: float | None, stale: int) -> dict[str, object]:
        figures = {"trajectories_per_second": 8 * rate, "trainer_idle_share": 0.5}
        figures |= {"rollout_only_share": 0.5, "staleness_mean": 0.0, "success_first": 0.2}
        return {
            "steps_per_second": rate, "success_last": success, "staleness_max": stale,
            "violations": 0, **figures,
        }  # fmt: skip

    summary = summary_of([run(1.0, 0.8, 0), run(2.0, None, 3)])
    assert summary["steps_per_second"] == 1.5
    assert summary["spread"]["trajectories_per_second"] == [8, 16]
    assert summary["success_last"] == 0.8
    assert summary["staleness_max"] == 3
