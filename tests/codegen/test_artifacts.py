"""The kernel cache on disk, and compilers that are missing or broken."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcompile.codegen import artifacts
from kvcompile.codegen.cpu import toolchain
from kvcompile.codegen.cpu.compile import compile_text, forget_loaded, load
from kvcompile.codegen.cpu.isa import compiler_flags
from kvcompile.codegen.errors import CompilerNotFoundError, KernelCompilationError
from kvcompile.codegen.registry import generate
from tests.support.numerics import Case

SPEC = Case(dims=(4, 4)).spec("portable", "append")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    forget_loaded()
    return tmp_path / "cache"


def compiler_script(folder: Path, body: str) -> str:
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo odd 1.0; exit 0;; esac\n{body}\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.compiler
def test_a_kernel_is_compiled_once_and_kept_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(SPEC).library
    assert load(SPEC) is load(SPEC)
    assert SPEC.symbol in library.parent.name
    assert f"// {SPEC.symbol}" in (library.parent / "kernel.cpp").read_text()
    names = {"kernel.cpp", "kernel.so", "kernel.so.sha256", "lock"}
    assert {path.name for path in library.parent.iterdir()} == names

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    forget_loaded()
    monkeypatch.setattr(toolchain, "compile_shared", never)
    assert load(SPEC).library == library


@pytest.mark.compiler
@pytest.mark.parametrize(
    "damage", ["corrupted", "truncated", "empty", "no fingerprint", "empty fingerprint", "deleted"]
)
def test_a_damaged_library_is_rebuilt(damage: str) -> None:
    library = load(SPEC).library
    whole = library.read_bytes()
    forget_loaded()
    # A library that is mapped into this process is replaced, never written to.
    library.unlink()
    if damage == "corrupted":
        library.write_bytes(whole[:4000] + b"\xff" * 64 + whole[4064:])
    elif damage == "truncated":
        library.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        library.touch()
    elif damage == "empty fingerprint":
        library.write_bytes(whole)
        library.with_name("kernel.so.sha256").write_text("")
    elif damage == "no fingerprint":
        library.write_bytes(whole)
        library.with_name("kernel.so.sha256").unlink()
    assert artifacts.try_load(library.parent) is None
    assert load(SPEC).library == library
    assert artifacts.try_load(library.parent) == library


@pytest.mark.compiler
@pytest.mark.parametrize("damage", ["another machine", "not a library"])
def test_a_whole_library_that_cannot_be_loaded_is_rebuilt(damage: str) -> None:
    # Not loaded yet: the loader knows by its name what it has loaded once.
    library = compile_text(SPEC.symbol, generate(SPEC).text, compiler_flags(SPEC))
    other = bytearray(library.read_bytes())
    other[18:20] = (0xF3 if damage == "another machine" else 0, 0)  # the machine of an ELF file
    if damage == "not a library":
        other[:4] = b"text"
    library.unlink()
    library.write_bytes(other)
    library.with_name("kernel.so.sha256").write_text(hashlib.sha256(other).hexdigest())
    assert artifacts.try_load(library.parent) == library
    assert load(SPEC).library == library
    assert library.read_bytes() != other


@pytest.mark.compiler
def test_a_cache_that_can_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(SPEC).library
    forget_loaded()

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(artifacts, "_locked", read_only)
    assert load(SPEC).library == library
    forget_loaded()
    library.unlink()
    with pytest.raises(KernelCompilationError, match="Read-only file system.*KVCOMPILE_CACHE_DIR"):
        load(SPEC)


@pytest.mark.compiler
def test_a_process_that_is_killed_while_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, real = tmp_path / "marker", toolchain.find_compiler().command[0]
    body = f'if [ ! -e {marker} ]; then echo $$ > {marker}; exec sleep 60; fi; exec {real} "$@"'
    monkeypatch.setenv("CXX", compiler_script(tmp_path, body))
    child = os.fork()
    if not child:
        load(SPEC)
        os._exit(0)
    while not marker.exists() or not marker.read_text():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(int(marker.read_text()), signal.SIGKILL)
    assert artifacts.try_load(load(SPEC).library.parent) is not None


@pytest.mark.compiler
def test_two_processes_compile_at_once(cache: Path) -> None:
    program = (
        "from kvcompile.codegen.cpu.compile import load\n"
        "from kvcompile.codegen.spec import KernelSpec\n"
        f"print(load({SPEC!r}).library)"
    )
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(cache.iterdir())) == 1


def test_the_key_holds_all_that_the_bytes_depend_on() -> None:
    keys = [("text", "g++ 12", "-O3"), ("text2", "g++ 12", "-O3"), ("text", "g++ 13", "-O3")]
    keys += [("text", "g++ 12", "-O2"), ("text", "g++ 12-O3")]  # type: ignore[list-item]
    assert len({artifacts.artifact_directory("f", *key) for key in keys}) == len(keys)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert artifacts.cache_directory() == Path("/a")
    monkeypatch.delenv("KVCOMPILE_CACHE_DIR")
    assert artifacts.cache_directory() == Path("/b/kvcompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert artifacts.cache_directory() == Path("/c/.cache/kvcompile")


def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, "exit 0"))
    cache.write_text("a file stands in the way")
    with pytest.raises(KernelCompilationError, match="cannot write the kernel cache"):
        load(SPEC)


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(CompilerNotFoundError, match="'no-such-compiler' is not on the path"):
        load(SPEC)


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(CompilerNotFoundError, match="does not run"):
        load(SPEC)


BROKEN = {
    "refuses": ("echo nonsense at line 7 >&2; exit 1", "nonsense at line 7"),
    "writes nothing": ("exit 0", "status 0"),
    "writes garbage": (
        'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"',
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_compiler_that(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, words = BROKEN[how]
    monkeypatch.setenv("CXX", compiler_script(tmp_path, body))
    with pytest.raises(KernelCompilationError, match=words):
        load(SPEC)
