"""The cache of compiled kernels on disk.

One directory per (symbol, text, compiler, flags):

    <cache>/<symbol>-<key>/  kernel.cpp  kernel.so  kernel.so.sha256  lock

and one per (headers, compiler, flags) whose name begins with `headers`. A library is used only if
its fingerprint matches, so a corrupted or truncated one is rebuilt.
Files appear by atomic renames under a lock: any number of processes may build at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcompile.codegen.errors import KernelCompilationError

Build = Callable[[Path, Path], None]
"""Compiles the source at the first path to the library at the second."""


@dataclass(frozen=True)
class Files:
    """What the files of an artifact are called: the text, and what is built of it."""

    source: str
    output: str


KERNEL_FILES = Files("kernel.cpp", "kernel.so")
HEADER_FILES = Files("headers.hpp", "headers.hpp.gch")
"""GCC looks for a precompiled header under the header's name with `.gch`."""


def cache_directory() -> Path:
    """Return $KVCOMPILE_CACHE_DIR, else $XDG_CACHE_HOME/kvcompile, else ~/.cache/kvcompile."""
    own = os.environ.get("KVCOMPILE_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcompile"


def artifact_directory(symbol: str, *key: str) -> Path:
    """Return the directory of one artifact; `key` is everything its bytes depend on."""
    digest = hashlib.sha256("\0".join((symbol, *key)).encode()).hexdigest()[:24]
    return cache_directory() / f"{symbol}-{digest}"


def try_load(directory: Path, files: Files = KERNEL_FILES) -> Path | None:
    """Return the library in `directory` if it is whole, else None. Never raises."""
    library = directory / files.output
    try:
        expected = (directory / f"{files.output}.sha256").read_text()
        return library if _fingerprint(library) == expected else None
    except OSError:
        return None


def load_or_build(
    directory: Path,
    text: str,
    build: Build,
    *,
    anew: bool = False,
    files: Files = KERNEL_FILES,
) -> Path:
    """Return a whole library for `text`, building it if there is none.

    Args:
        directory: From `artifact_directory`; created if need be.
        text: The source; kept beside the library for readers and debuggers.
        build: Called at most once, under the lock of the directory.
        anew: Build it even if there is one.
        files: What they are called.

    Raises:
        KernelCompilationError: `build` failed, or the cache cannot be written.
    """
    found = None if anew else try_load(directory, files)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            found = None if anew else try_load(directory, files)
            return found or _build(directory, text, build, files)
    except OSError as error:
        raise _unwritable(directory, error) from error


def write_source(directory: Path, name: str, text: str) -> Path:
    """Return the path of a file with `text`, writing it if it is not there.

    Raises:
        KernelCompilationError: The cache cannot be written.
    """
    path = directory / name
    try:
        if path.exists() and path.read_text() == text:
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            draft = Path(scratch) / name
            draft.write_text(text)
            draft.replace(path)
    except OSError as error:
        raise _unwritable(directory, error) from error
    return path


def _unwritable(directory: Path, error: OSError) -> KernelCompilationError:
    return KernelCompilationError(
        f"cannot write the kernel cache {directory}: {error}; set KVCOMPILE_CACHE_DIR"
    )


def _build(directory: Path, text: str, build: Build, files: Files) -> Path:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source, library = Path(scratch) / files.source, Path(scratch) / files.output
        source.write_text(text)
        build(source, library)
        fingerprint = Path(scratch) / f"{files.output}.sha256"
        fingerprint.write_text(_fingerprint(library))
        for path in (source, library, fingerprint):
            path.replace(directory / path.name)
    return directory / files.output


def _fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
