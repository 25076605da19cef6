"""The numeric check notices kernels that are wrong by one token: each mutation must fail it."""

from __future__ import annotations

import pytest

from kvcompile.codegen.cpu.compile import load_source
from kvcompile.codegen.cpu.isa import detect_isa
from kvcompile.codegen.registry import generate
from kvcompile.codegen.source import KernelSource
from tests.numerics.test_attend import FEW, problem
from tests.support.numerics import Case, run_attend

pytestmark = pytest.mark.compiler

CAUSAL = Case(dtype="fp32", dims=(12, 12), group=5, page_size=16, mask="causal", queries="few")

MUTATIONS = {
    "mask read one token late": (FEW, "bias_of(x[t]);", "bias_of(x[t + 1]);"),
    "mask without left padding": (FEW, "row + (call.store.starts[b] + first)", "row + (first)"),
    "causal by one": (CAUSAL, "t0 + t <= s", "t0 + t < s"),
    "one dead lane taken in": (FEW, "int t = tokens; t < end", "int t = tokens + 1; t < end"),
    "odd last token forgotten": (FEW, "tokens % 2 == 1", "false"),
    "last page forgotten": (FEW, "page < chunk.pages; ++page", "page + 1 < chunk.pages; ++page"),
    "chunks not rescaled": (FEW, "std::exp2(part.m[row] - m)", "1.0f"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_fails_for(name: str) -> None:
    case, text, mutated = MUTATIONS[name]
    source = generate(case.spec(detect_isa(), "attend"))
    assert text in source.text
    kernel = load_source(KernelSource(source.spec, source.text.replace(text, mutated)))
    given = problem(case, 555 if case is FEW else 13, (0, 6), 4)
    with pytest.raises(AssertionError, match=r"bound|NaN"):
        given.check(run_attend(kernel, given))


def test_the_check_passes_without_a_mutation() -> None:
    for case, kv_len in ((FEW, 555), (CAUSAL, 13)):
        kernel = load_source(generate(case.spec(detect_isa(), "attend")))
        given = problem(case, kv_len, (0, 6), 4)
        given.check(run_attend(kernel, given))
