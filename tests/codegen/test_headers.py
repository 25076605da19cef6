"""The precompiled header: the same libraries with it and without, and never a failed kernel."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from kvcompile.codegen import artifacts
from kvcompile.codegen.cpu import headers, toolchain
from kvcompile.codegen.cpu.compile import compile_text
from kvcompile.codegen.cpu.isa import ISAS, available_isas
from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.codegen.registry import generate
from tests.codegen.test_artifacts import compiler_script
from tests.support.numerics import Case

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif("avx2" not in available_isas(), reason="needs AVX2"),
]

SPEC = Case(dims=(8, 8)).spec("avx2", "attend")
FLAGS = ISAS["avx2"].flags
SMALL = "#include <cstring>\n"
TEXT = SMALL + 'extern "C" void copy(char* p, const char* q) { std::memcpy(p, q, 9); }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(headers, "_headers", {})
    monkeypatch.setattr(headers, "_compiled_without", Counter())
    # What happens is the same for a header that is parsed quickly.
    monkeypatch.setattr(headers, "HEADERS", SMALL)
    monkeypatch.setattr(headers, "SLOW_TO_PARSE", SMALL)
    return tmp_path / "cache"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the compiler's commands to come."""
    found: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        found.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    toolchain.find_compiler()
    monkeypatch.setattr(subprocess, "run", noted)
    return found


def compiled(number: int) -> bytes:
    return compile_text(f"copy{number}", TEXT, FLAGS).read_bytes()


def made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "KERNELS_BEFORE", 0)


def test_a_printed_kernel_is_the_same_bit_by_bit(
    cache: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(cache))
    text = generate(SPEC).text
    assert headers.SLOW_TO_PARSE in text
    # Nothing is precompiled that the text does not include by itself.
    assert set(headers.HEADERS.splitlines()) <= set(text.splitlines())
    plain = compile_text(SPEC.symbol, text, FLAGS).read_bytes()
    made_at_once(monkeypatch)
    assert compile_text(SPEC.symbol, text, FLAGS, anew=True).read_bytes() == plain
    assert list(cache.glob("headers-*/headers.hpp.gch"))


def test_the_third_kernel_makes_it_and_every_library_is_the_same(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {compiled(number) for number in range(2)}
    assert not list(cache.glob("headers-*"))
    libraries |= {compiled(number) for number in range(2, 4)}
    assert len(libraries) == 1
    (directory,) = cache.glob("headers-*")
    assert artifacts.try_load(directory, artifacts.HEADER_FILES)
    # -H lists the headers that are opened, with "!" before one that was precompiled.
    flags = [*toolchain.BASE_FLAGS, *FLAGS, "-H", "-include", str(directory / "headers.hpp")]
    source = cache / "source.cpp"
    source.write_text(TEXT)
    command = [*toolchain.find_compiler().command, *flags, str(source), "-o", str(cache / "o.so")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert f"! {directory}/headers.hpp.gch" in listed
    # Another process, whose first kernel this is, makes none.
    monkeypatch.setattr(headers, "_headers", {})
    commands.clear()
    compiled(4)
    assert ["-include" in command for command in commands] == [True]


@pytest.mark.parametrize("damage", ["deleted", "truncated", "empty", "of another compiler"])
def test_one_that_is_of_no_use_fails_no_kernel(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at_once(monkeypatch)
    first = compiled(0)
    (header,) = cache.glob("headers-*/headers.hpp")
    precompiled = header.with_name("headers.hpp.gch")
    # This process has looked at it already.
    if damage == "deleted":
        header.unlink()
        precompiled.unlink()
    else:
        whole = precompiled.read_bytes()
        cut = {"truncated": len(whole) // 2, "empty": 0}.get(damage, len(whole))
        precompiled.unlink()
        precompiled.write_bytes((whole[:8] + bytes(32) + whole[40:])[:cut])
    assert compiled(1) == first


def test_a_damaged_one_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_at_once(monkeypatch)
    first = compiled(0)
    (precompiled,) = cache.glob("headers-*/headers.hpp.gch")
    precompiled.write_bytes(b"gpch")
    monkeypatch.setattr(headers, "_headers", {})
    assert compiled(1) == first
    assert artifacts.try_load(precompiled.parent, artifacts.HEADER_FILES) == precompiled


def test_a_compiler_that_makes_none_or_refuses_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    made_at_once(monkeypatch)
    real = toolchain.find_compiler().command[0]
    refuses = 'case "$*" in *c++-header*) exit 1;; esac\n'
    monkeypatch.setenv("CXX", compiler_script(tmp_path, f'{refuses}exec {real} "$@"'))
    compiled(0)
    commands.clear()
    compiled(1)
    assert ["-include" in command for command in commands] == [False]  # nor is it tried again
    (tmp_path / "2").mkdir()
    refuses = 'case "$*" in *-include*) exit 1;; esac\n'
    monkeypatch.setenv("CXX", compiler_script(tmp_path / "2", f'{refuses}exec {real} "$@"'))
    commands.clear()
    compiled(2)
    compiled(3)
    shared = [command for command in commands if "-shared" in command]
    assert ["-include" in command for command in shared[-3:]] == [True, False, False]


def test_a_wrong_text_is_still_the_compilers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made_at_once(monkeypatch)
    with pytest.raises(KernelCompilationError, match="no_such_name"):
        compile_text("wrong", TEXT + "int x = no_such_name;\n", FLAGS)
