"""The weight store: one directory per policy version, local or anywhere that fsspec reaches.

A version's directory is complete and on disk before `publish` returns, and is never visible under
its name before: files are written beside, flushed, and renamed; on object stores the caller
announces the version only after all its files are there. Names carry the checksum, so two trainers
that both believe to be the current one cannot overwrite one another's weights. The manifest of a
version names its files with sizes and sha256; it is part of the Policy record.
"""

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import unquote

import fsspec

from dora.config import Config
from dora.errors import MissingWeightsError, WeightsError
from dora.schemas.records import Policy, WeightFile
from dora.weights.tensors import weights_checksum, write_tensors

_NAME = re.compile(r"v(\d{8,})-[0-9a-f]{16}")
_UNFINISHED = ".unfinished-"
_FILE = "file://"
_CACHED_VERSIONS = 2
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A version in the store, as its Policy record announces it."""

    uri: str
    files: tuple[WeightFile, ...]
    checksum: str


def version_name(version: int, checksum: str) -> str:
    """Name of a version's directory."""
    return f"v{version:08d}-{checksum[:16]}"


def name_of(uri: str) -> str:
    """Last part of a `weights_uri`; WeightsError if it is no name of a version."""
    name = uri.rstrip("/").rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise WeightsError(f"the policy record names {uri!r}, which is no version of a store")
    return name


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


def flush_directory(directory: Path) -> None:
    """fsync every file below `directory` and the directories themselves."""
    for root, _, files in os.walk(directory):
        for entry in [*files, "."]:
            handle = os.open(os.path.join(root, entry), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def storage_error(what: str, place: str, error: OSError) -> WeightsError:
    """A WeightsError that tells what to do about a full or read-only disk."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free space there, or lower weights.keep and trainer.keep_checkpoints; then start "
        hint += "the trainer again: nothing that was committed is lost."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "Give the trainer write access there, or set run.directory / weights.store."
    return WeightsError(f"{what} at {place}: {error.strerror or error}", hint=hint)


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, flushed before and after; an old `target` goes away."""
    flush_directory(source)
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)
    flush_entry(target.parent)


def flush_entry(directory: Path) -> None:
    """fsync one directory, so that renames in it survive a crash."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WeightStore:
    """Versions under one URL, of which `cached_versions` copies are kept where the store is remote.
    Errors of the storage become WeightsError."""

    def __init__(self, url: str, cached_versions: int = _CACHED_VERSIONS) -> None:
        self._cached_versions = cached_versions
        self.url = url if "://" in url else Path(url).absolute().as_uri()
        self._files, self._root = self._open(self.url)
        self._local = self.url.startswith(_FILE)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The store of a run: `weights.store` followed by the run's name, or `weights` in the run's
        directory. Of a remote store as many versions are kept at hand as an engine may host."""
        cached = _CACHED_VERSIONS if config.policy.lora is None else config.window.ring
        if config.weights.store is None:
            return cls(str(config.run_directory / "weights"), cached)
        return cls(f"{config.weights.store.rstrip('/')}/{config.run.name}", cached)

    @staticmethod
    def _open(url: str) -> tuple[Any, str]:
        if url.startswith(_FILE):
            # fsspec takes the escapes of a file URL, %20 for a space, for part of the name.
            return fsspec.filesystem("file"), unquote(url.removeprefix(_FILE)).rstrip("/")
        try:
            files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise WeightsError(
                f"weights.store = {url!r} cannot be opened: {error}",
                hint="Give file:///directory, or install the fsspec driver of this kind of store.",
            ) from error
        return files, str(root).rstrip("/")

    def publish(
        self,
        version: int,
        state: Mapping[str, Any],
        companions: Callable[[Path], None],
        scratch: Path | None = None,
        write: Callable[[Path, Mapping[str, Any]], None] = write_tensors,
        checksum: str | None = None,
    ) -> Published:
        """Store the tensors of `version` with what `companions` adds to the directory.

        `scratch` is a local directory for files on their way to a remote store. `write` puts the
        tensors into the directory, by default as those of a whole model; `checksum` is theirs,
        where it is known. Publishing the same tensors of the same version twice gives the same
        directory.
        """
        checksum = weights_checksum(state) if checksum is None else checksum
        name = version_name(version, checksum)
        parent = Path(self._root) if self._local else (scratch or Path.cwd())
        staging = parent / f"{_UNFINISHED}{name}-{uuid.uuid4().hex[:8]}"
        try:
            staging.mkdir(parents=True)
            write(staging, state)
            companions(staging)
            files = describe(staging)
            if self._local:
                replace_directory(staging, parent / name)
            else:
                self._upload(staging, name, files)
        except OSError as error:
            raise storage_error(f"cannot store version {version}", self.url, error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Published(f"{self.url.rstrip('/')}/{name}", files, checksum)

    def _upload(self, staging: Path, name: str, files: tuple[WeightFile, ...]) -> None:
        for file in files:
            target = f"{self._root}/{name}/{file.path}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(staging / file.path), target)
            found = self._files.size(target)
            if found != file.size:
                raise WeightsError(f"{target} has {found} bytes after {file.size} were written")

    def fetch(self, policy: Policy, cache: Path) -> Path:
        """A local directory with the verified files of `policy`.

        A local store's own directory is returned; others are copied to `cache`, where the two
        versions used last are kept. The version is looked up by name in this store, wherever the
        trainer sees it mounted. Raises WeightsError when files are missing or not as announced.
        """
        name = name_of(policy.weights_uri)
        for file in policy.files:
            safe_relative(file.path)
        if self._local:
            directory = Path(self._root) / name
            if not directory.is_dir():
                raise MissingWeightsError(
                    f"version {policy.version} is not in the weight store: no {directory}",
                    hint=f"The trainer wrote it to {policy.weights_uri}; it may have been pruned "
                    "(weights.keep), or this machine does not see that directory (weights.store).",
                )
            verify(directory, policy.files)
            return directory
        return self._download(policy, name, cache)

    def _download(self, policy: Policy, name: str, cache: Path) -> Path:
        target = cache / name
        if target.is_dir():
            try:
                verify(target, policy.files)
            except WeightsError:
                shutil.rmtree(target)
            else:
                os.utime(target)
                return target
        staging = cache / f"{_UNFINISHED}{name}-{uuid.uuid4().hex[:8]}"
        try:
            for file in policy.files:
                path = staging / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file.path}", str(path))
            verify(staging, policy.files)
            staging.rename(target)
        except FileNotFoundError as error:
            raise MissingWeightsError(
                f"version {policy.version} is not complete in the weight store {self.url}: {error}",
                hint=f"The trainer wrote it to {policy.weights_uri}.",
            ) from error
        except OSError as error:
            what = f"cannot copy version {policy.version}"
            raise storage_error(what, str(cache), error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        copies = [p for p in cache.iterdir() if _NAME.fullmatch(p.name)]
        for old in sorted(copies, key=lambda p: p.stat().st_mtime)[: -self._cached_versions]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _entries(self) -> list[str]:
        try:
            paths = self._files.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("cannot list the weight store", self.url, error) from error
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def versions(self) -> list[str]:
        """Names of the stored versions, oldest first."""
        return sorted(name for name in self._entries() if _NAME.fullmatch(name))

    def delete(self, name: str) -> None:
        """Remove a version; none of that name is fine."""
        if not _NAME.fullmatch(name) and not name.startswith(_UNFINISHED):
            raise WeightsError(f"{name!r} is no version of a store")
        try:
            self._files.rm(f"{self._root}/{name}", recursive=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(f"cannot delete {name}", self.url, error) from error

    def keep_only(self, names: Collection[str], *, newest: int | None = None) -> list[str]:
        """Remove every version not in `names` and what an interrupted `publish` left; returns what
        was removed. Files that dora did not write are left alone, and with `newest` so is whatever
        is of a later version."""
        removed = []
        for entry in sorted(self._entries()):
            if newest is not None and is_later(entry, newest):
                continue
            if entry.startswith(_UNFINISHED) or (_NAME.fullmatch(entry) and entry not in names):
                self.delete(entry)
                removed.append(entry)
        return removed


def is_later(entry: str, newest: int) -> bool:
    """Whether a directory of weights or a checkpoint, finished or not, is of a version after
    `newest`, or of none that its name tells."""
    number = re.match(r"[a-z]+-?(\d+)-", entry.removeprefix(_UNFINISHED))
    return number is None or int(number.group(1)) > newest
