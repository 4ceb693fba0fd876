"""`dora bench`: a tiny comparison over real Kafka, and what is refused before anything starts."""

import json
from pathlib import Path

import pytest

from dora.bench.comparison import COLUMNS
from dora.bus.settings import ClusterSettings
from dora.bus.topics import TopicAdmin
from tests.small_run import dora, refused

TINY = """\
[run]
name = "tiny"

[policy]
model = "{model}"

[task]
kind = "synthetic"
synthetic_prompt_tokens = 4
max_prompt_tokens = 4
held_out_fraction = 0.0

[window]
groups_per_step = 4
group_size = 2

[rollout]
workers = 4
workers_per_process = 4
engine = "emulated"
capacity = 4
max_new_tokens = 64
heartbeat_seconds = 0.2
heartbeat_timeout_seconds = 20

[rollout.emulated]
time_scale = 0.1
load_seconds = 0.2
length_mean = 16

[trainer]
steps = 2
engine = "emulated"
checkpoint_every = 1000
batch_timeout_seconds = 60

[trainer.emulated]
step_seconds = 2.0
publish_seconds = 0.2
"""
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration with four devices and steps of a few emulated seconds."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 64}')
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(model=model))
    return path


def test_schedules_are_compared_over_kafka_and_leave_nothing_behind(
    tiny: Path, tmp_path: Path, settings: ClusterSettings
) -> None:
    figures, plot, runs = tmp_path / "b.json", tmp_path / "b.png", tmp_path / "bench"
    with TopicAdmin(settings) as admin:
        before = admin.list_runs()
    result = dora(
        "bench", "schedules", str(tiny), "-b", settings.bootstrap_servers,
        "--schedules", "sync,dora:1+streamed", "--split", "2", "--steps", "2", "--warmup", "1",
        "--repeats", "1", "--json", str(figures), "--plot", str(plot), "--directory", str(runs),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert list(report["schedules"]) == ["sync", "dora:1+streamed"]
    for name, summary in report["schedules"].items():
        assert set(COLUMNS) <= set(summary)
        assert summary["violations"] == summary["mixed_version"] == 0
        assert summary["rollout_devices"] == (4 if name == "sync" else 2)
        assert 0 < summary["ideal_share"] <= 1.02
        assert 0 <= summary["trainer_idle_share"] <= 1
        assert 0 <= summary["rollout_only_share"] <= 1
        assert name in result.stdout
    sync, stale = report["schedules"]["sync"], report["schedules"]["dora:1+streamed"]
    assert sync["ratio_to_sync"] == 1
    assert sync["staleness_max"] == 0 and stale["staleness_max"] <= 1
    # colocated training takes 2 s and the split one 4 s: no step can be shorter
    assert sync["step_seconds"] > 2 and stale["step_seconds"] > 4
    assert sync["ideal_share"] == pytest.approx(
        sync["ideal_seconds"] / sync["step_seconds"], rel=1e-6
    )
    for name, line in report["timelines"].items():
        assert 1 <= len(line["devices"]) <= report["schedules"][name]["rollout_devices"]
        assert len(line["training"]) == 2
    assert plot.read_bytes().startswith(PNG)
    with TopicAdmin(settings) as admin:
        assert admin.list_runs() == before
    assert list((runs / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ((), ("either a CONFIG or a --preset", "paper-16")),
        (("--preset", "paper-64"), ("no preset 'paper-64'", "paper-16, paper-32")),
        (("--preset", "paper-16", "--schedules", "sync,fast"), ("'fast' is no schedule",)),
        (("--preset", "paper-16", "--schedules", "sync,sync"), ("sync is named twice",)),
        (("--preset", "paper-16", "--split", "16"), ("1 to 15 of the 16 devices",)),
        (("--preset", "paper-16", "--plot", "a.pdf"), ("a.pdf", ".png")),
        (
            ("--preset", "paper-16", "--set", "rollout.capacity=8"),
            ("rollout.capacity (8) must hold one group", "16"),
        ),
        (
            ("--preset", "agentic-tail", "--set", "rollout.emulated.kv_cache_tokens=9000"),
            ("(9000) cannot hold one sequence", "66048"),
        ),
        (
            (
                *("--preset", "agentic-tail", "--set", "window.group_size=64"),
                *("--set", "rollout.emulated.kv_cache_tokens=100000"),
            ),
            ("(100000) cannot hold the prompts of one group", "131072"),
        ),
    ],
)
def test_a_bench_that_makes_no_sense_is_refused(
    options: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    result = dora("bench", "schedules", *options, "--directory", str(tmp_path))
    refused(result, 2, *parts)


def test_real_engines_are_not_compared_on_emulated_devices(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(tiny.read_text().replace(
        'engine = "emulated"\ncheckpoint_every', 'engine = "deepspeed"\ncheckpoint_every'
    ))  # fmt: skip
    result = dora("bench", "schedules", str(tiny), "--directory", str(tmp_path))
    refused(result, 2, "trainer.engine", "emulated")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--steps", "3"), ("--warmup 3 leaves nothing of --steps 3",)),
        (("--seeds", "a"), ("--seeds a: numbers",)),
        (("--trainer-cores", "4096"), ("--trainer-cores 4096", "may use")),
        (("--schedules", "dora:x"), ("'dora:x' is no schedule",)),
    ],
)
def test_a_real_bench_that_makes_no_sense_is_refused(
    options: tuple[str, ...], parts: tuple[str, ...], tiny: Path, tmp_path: Path
) -> None:
    result = dora("bench", "real", str(tiny), *options, "--directory", str(tmp_path))
    refused(result, 2, *parts)
