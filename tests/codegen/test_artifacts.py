"""The kernel cache on disk, and compilers that are missing or broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.codegen import artifacts
from kvcompile.codegen.cpu import toolchain
from kvcompile.codegen.cpu.compile import forget_loaded, load
from kvcompile.codegen.errors import CompilerNotFoundError, KernelCompilationError
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
@pytest.mark.parametrize("damage", ["corrupted", "truncated", "no fingerprint", "deleted"])
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
    elif damage == "no fingerprint":
        library.write_bytes(whole)
        library.with_name("kernel.so.sha256").unlink()
    assert artifacts.try_load(library.parent) is None
    assert load(SPEC).library == library
    assert artifacts.try_load(library.parent) == library


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
