"""The C++ compiler: finding it and calling it."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvcompile.codegen.errors import CompilerNotFoundError, KernelCompilationError

BASE_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that answered `--version`.

    Attributes:
        command: The command and its leading arguments.
        version: First line of its version, part of every cache key.
    """

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> tuple[str, ...]:
        """What the bytes it writes depend on, beside the text and the flags of the kernel."""
        return (self.version, *self.command, *BASE_FLAGS)


def find_compiler() -> Compiler:
    """Return the compiler in $CXX, or g++.

    Raises:
        CompilerNotFoundError: It is not on the path or does not run.
    """
    return _find_compiler(os.environ.get("CXX") or "g++", os.environ.get("PATH", ""))


@functools.cache
def _find_compiler(command: str, path: str) -> Compiler:
    parts = shlex.split(command)
    program = shutil.which(parts[0], path=path)
    if program is None:
        raise CompilerNotFoundError(
            f"the C++ compiler {parts[0]!r} is not on the path; install g++ or set CXX"
        )
    full = (program, *parts[1:])
    try:
        answer = subprocess.run(
            [*full, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerNotFoundError(
            f"the C++ compiler {command!r} does not run ({error}); set CXX to one that does"
        ) from error
    return Compiler(full, (answer.stdout.splitlines() or [""])[0])


def compile_shared(compiler: Compiler, source: Path, output: Path, flags: tuple[str, ...]) -> None:
    """Compile `source` to the shared library `output`.

    Raises:
        KernelCompilationError: The compiler refused, crashed or took too long; carries its words.
    """
    _run([*compiler.command, *BASE_FLAGS, *flags, str(source)], output)


def compile_header(compiler: Compiler, source: Path, output: Path, flags: tuple[str, ...]) -> None:
    """Precompile the header `source` to `output`.

    Raises:
        KernelCompilationError: The compiler refused, crashed or took too long; carries its words.
    """
    _run([*compiler.command, *BASE_FLAGS, *flags, "-x", "c++-header", str(source)], output)


def _run(command: list[str], output: Path) -> None:
    command = [*command, "-o", str(output)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelCompilationError(f"{shlex.join(command)}: {error}") from error
    if answer.returncode != 0 or not output.exists():
        words = (answer.stderr or answer.stdout).strip()[:4000]
        raise KernelCompilationError(
            f"{shlex.join(command)} ended with status {answer.returncode}:\n{words}"
        )
