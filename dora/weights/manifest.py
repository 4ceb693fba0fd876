"""The manifest of a version: which files its directory holds, with sizes and sha256.

Invariant: a path that comes from a manifest never leaves the directory it belongs to, and a file
that passes `verify` holds exactly the bytes that the trainer announced.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from dora.errors import WeightsError
from dora.schemas.records import WeightFile

_BLOCK = 1 << 20


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def describe(directory: Path) -> tuple[WeightFile, ...]:
    """The manifest of all files under `directory`, in order of their paths."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file())
    return tuple(
        WeightFile(p.relative_to(directory).as_posix(), p.stat().st_size, sha256_of(p))
        for p in paths
    )


def safe_relative(path: str) -> PurePosixPath:
    """`path` if it names a file below the directory it is relative to.

    Raises WeightsError for absolute paths, `..`, empty parts and backslashes: a manifest comes from
    the log, and a damaged one must not read or write elsewhere.
    """
    pure = PurePosixPath(path)
    unsafe = (
        not path or path != str(pure) or pure.is_absolute() or ".." in pure.parts or path == "."
    )
    if unsafe or "\\" in path or "\0" in path:
        raise WeightsError(f"the manifest names {path!r}, which is no path inside its directory")
    return pure


def verify(directory: Path, files: Iterable[WeightFile]) -> None:
    """Compare the files in `directory` with the manifest.

    Raises WeightsError naming the first file that is missing or differs, with what was expected
    and what was found.
    """
    for file in files:
        path = directory / safe_relative(file.path)
        try:
            size = path.stat().st_size
            if size != file.size:
                raise WeightsError(
                    f"{path} has {size} bytes, its manifest says {file.size}",
                    hint="The file was cut or replaced after it was published.",
                )
            found = sha256_of(path)
        except FileNotFoundError:
            raise WeightsError(
                f"{path} is missing",
                hint="Its version may have been pruned (weights.keep), or this machine does not "
                "see the trainer's weight store (weights.store).",
            ) from None
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}") from error
        if found != file.sha256:
            raise WeightsError(
                f"{path} has sha256 {found}, its manifest says {file.sha256}",
                hint="The file was damaged or replaced after it was published.",
            )
