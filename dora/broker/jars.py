"""What the local broker runs on: a Java, and Apache Kafka's jars.

A directory of jars in the cache is complete: Maven writes into a temporary directory that is
renamed when all is there, under a lock. Its name is the hash of the pom that it was made from, so
versions of Kafka do not mix.
"""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from dora.errors import BrokerError

JARS_VARIABLE = "DORA_KAFKA_JARS"
"""Environment variable: a directory of Kafka's jars to use instead of fetching them."""

MINIMUM_JAVA = 17
FETCH_SECONDS = 600.0
JAVA_SECONDS = 20.0

_KAFKA_JAR = re.compile(r"kafka_2\.\d+-(\d[\w.-]*)\.jar")
_POM_VERSION = re.compile(r"<kafka\.version>([^<]+)</kafka\.version>")
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)([^"]*)"')
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java launcher that can run Kafka."""

    path: str
    version: str


def ops_directory() -> Path:
    """Directory of `pom.xml`, `server.properties` and `log4j2.properties`: installed, or source."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_ops" / "kafka", package.parent / "ops" / "kafka")
    for candidate in candidates:
        if (candidate / "pom.xml").is_file():
            return candidate
    raise BrokerError(
        f"the broker's files are missing; looked in {candidates[0]} and {candidates[1]}",
        hint="This installation is incomplete: install dora again.",
    )


def cache_directory() -> Path:
    """Per-user cache: on Linux `${XDG_CACHE_HOME:-~/.cache}/dora/kafka`."""
    return user_cache_path("dora") / "kafka"


def cached_jars() -> Path | None:
    """Directory of jars that `fetch_jars` would return without fetching."""
    given = os.environ.get(JARS_VARIABLE)
    if given:
        return _given_jars(Path(given))
    target = cache_directory() / _pom_hash()
    return target if target.is_dir() else None


def pinned_kafka_version() -> str:
    """Version of Kafka that `pom.xml` names."""
    match = _POM_VERSION.search((ops_directory() / "pom.xml").read_text(encoding="utf-8"))
    if match is None:
        raise BrokerError(f"{ops_directory() / 'pom.xml'} names no kafka.version")
    return match.group(1)


def kafka_version(jars: Path) -> str:
    """Version of Kafka in a directory of jars."""
    for name in sorted(path.name for path in jars.glob("kafka_2*.jar")):
        match = _KAFKA_JAR.fullmatch(name)
        if match:
            return match.group(1)
    raise BrokerError(
        f"{jars} holds no Kafka server (kafka_2.13-<version>.jar)",
        hint=f"Delete the directory to fetch the jars anew, or correct {JARS_VARIABLE}.",
    )


def java_command() -> str:
    """Path of a Java that runs Kafka; BrokerError when there is none, or only older ones."""
    return find_java().path


def find_java() -> Java:
    """First of `$JAVA_HOME/bin/java` and `java` on the PATH that is new enough."""
    home = os.environ.get("JAVA_HOME")
    in_home = str(Path(home) / "bin" / "java") if home else None
    candidates = [path for path in (in_home, "java") if path is not None]
    refused: list[str] = []
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            continue
        output = _java_output(path)
        match = _JAVA_VERSION.search(output)
        if match is None:
            said = next(iter(output.splitlines()), "nothing")
            refused.append(f"{path} does not work: `java -version` said: {said}")
        elif int(match.group(1)) < MINIMUM_JAVA:
            refused.append(f"{path} is Java {match.group(1)}")
        else:
            return Java(str(Path(path).absolute()), match.group(1) + match.group(2))
    hint = (
        f"Install a Java runtime of version {MINIMUM_JAVA} or newer (Debian and Ubuntu: `apt"
        " install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) and put it on the"
        " PATH or set JAVA_HOME; or run Kafka elsewhere and give its address with"
        " --bootstrap-server."
    )
    if refused:
        needed = f"the local broker needs Java {MINIMUM_JAVA} or newer"
        raise BrokerError(f"{needed}, but {'; '.join(refused)}", hint=hint)
    raise BrokerError("the local broker needs Java, and there is none on the PATH", hint=hint)


def fetch_jars() -> Path:
    """Directory of Kafka's jars, fetched with Maven into the per-user cache if they are not there.

    Raises BrokerError without Maven or Java, and with Maven's own words when it fails.
    """
    cached = cached_jars()
    if cached is not None:
        return cached
    find_java()
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerError(
            "Kafka's jars are not in the cache yet, and fetching them needs Maven (`mvn`), which is"
            " not on the PATH",
            hint="Install it (Debian and Ubuntu: `apt install maven`; macOS: `brew install maven`),"
            f" or unpack a Kafka release and set {JARS_VARIABLE} to its libs directory, or use"
            " Docker: `docker compose -f ops/compose.yaml up --wait`.",
        )
    cache, name = cache_directory(), _pom_hash()
    target = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{name}.lock", timeout=FETCH_SECONDS):
            if not target.is_dir():
                # The lock is ours, so these are what killed downloads left.
                for leftover in cache.glob(f"{name}.download-*"):
                    shutil.rmtree(leftover)
                _download(maven, cache, target)
    except Timeout as error:
        raise BrokerError(
            f"another process has been fetching Kafka's jars for over {FETCH_SECONDS:.0f} s",
            hint=f"It holds {cache / name}.lock; wait for it, or end it, and try again.",
        ) from error
    except OSError as error:
        raise BrokerError(
            f"cannot write Kafka's jars to {cache}: {error.strerror or error}",
            hint="Make it writable, or set XDG_CACHE_HOME to a directory that is.",
        ) from error
    return target


def class_path(jars: Path) -> str:
    """The jars in a fixed order: Java's shared class archive is bound to the order."""
    return os.pathsep.join(str(path) for path in sorted(jars.glob("*.jar")))


def class_archive(jars: Path, java: Java) -> Path | None:
    """Where the shared class archive (JEP 350) of these jars under this Java belongs.

    It halves the time of a start. None when the cache cannot be written.
    """
    key = hashlib.sha256(f"{jars}\0{java.path}\0{java.version}".encode()).hexdigest()[:16]
    directory = cache_directory() / "classes"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.debug("no shared class archive: %s", error)
        return None
    return directory / f"{key}.jsa" if os.access(directory, os.W_OK) else None


def _pom_hash() -> str:
    return hashlib.sha256((ops_directory() / "pom.xml").read_bytes()).hexdigest()[:16]


def _given_jars(directory: Path) -> Path:
    if not directory.is_dir():
        raise BrokerError(
            f"{JARS_VARIABLE} names {directory}, which is not a directory",
            hint="Set it to the libs directory of an unpacked Kafka release, or unset it.",
        )
    kafka_version(directory)
    return directory.absolute()


def _java_output(path: str) -> str:
    try:
        result = subprocess.run(
            [path, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=JAVA_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {JAVA_SECONDS:.0f} s"
    except OSError as error:
        return str(error.strerror or error)
    return result.stdout.strip()


def _download(maven: str, cache: Path, target: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.download-", dir=cache))
    _log.info("fetching Apache Kafka %s with Maven into %s", pinned_kafka_version(), target)
    command = [
        maven,
        "--batch-mode",
        "--quiet",
        "--strict-checksums",
        "-Dstyle.color=never",
        f"--file={ops_directory() / 'pom.xml'}",
        "dependency:copy-dependencies",
        f"-DoutputDirectory={temporary}",
        "-DincludeScope=runtime",
    ]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=FETCH_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise BrokerError(
                f"Maven could not fetch Kafka's jars: {_maven_reason(result.stdout)}",
                hint="Check the network, and the proxy and mirror in ~/.m2/settings.xml; or unpack"
                f" a Kafka release and set {JARS_VARIABLE} to its libs directory.",
            )
        kafka_version(temporary)
        temporary.rename(target)
    except subprocess.TimeoutExpired as error:
        raise BrokerError(
            f"Maven did not fetch Kafka's jars within {FETCH_SECONDS:.0f} s",
            hint="Check the network and try again: what Maven has already is not fetched twice.",
        ) from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _maven_reason(output: str) -> str:
    lines = [line.strip() for line in _ANSI.sub("", output).splitlines() if line.strip()]
    errors = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
    return next(iter(errors or lines), "it said nothing")
