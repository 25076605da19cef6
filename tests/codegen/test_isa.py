from __future__ import annotations

import pytest

from kvcompile.codegen.cpu import isa
from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.errors import UnsupportedKernelError
from tests.support.numerics import Case


def test_the_best_instruction_set_of_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCOMPILE_ISA", raising=False)
    for name, flags in (("portable", set()), ("avx2", {"avx2", "fma", "f16c"})):
        monkeypatch.setattr(isa, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert isa.detect_isa() == name
        assert isa.available_isas()[-1] == "portable"


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_ISA", "portable")
    assert isa.detect_isa() == "portable"


def test_a_missing_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setenv("KVCOMPILE_ISA", "avx2")
    with pytest.raises(UnsupportedKernelError, match="needs f16c, which this CPU lacks"):
        isa.detect_isa()
    with pytest.raises(UnsupportedKernelError, match="needs f16c"):
        load(Case(dims=(9, 9)).spec("avx2", "append"))
    monkeypatch.setenv("KVCOMPILE_ISA", "sse9")
    with pytest.raises(
        UnsupportedKernelError, match="unknown instruction set 'sse9'; known: avx512"
    ):
        isa.detect_isa()
