"""Printed kernels that turn q and new K on their way in; without `rope` no text changes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import DTypeName, KernelSpec, Op
from tests.support.golden import Golden
from tests.support.numerics import Case

ROPES = [Rotary(16), Rotary(8, interleaved=True)]
OPS: list[Op] = ["append", "attend"]


def spec(op: Op, rope: Rotary, dtype: DTypeName, *, gpu: bool, quantized: bool) -> KernelSpec:
    """Return the spec of a kernel of 20 channels."""
    case = Case(dtype=dtype, dims=(20, 16), page_size=64, mask="none", queries="few")
    exact = replace(case.spec("portable", op), rope=rope)
    if quantized:
        exact = replace(
            exact,
            k_format="int4",
            v_format="int4",
            q_group_size=16,
            num_sink_tokens=4,
            compute="fp32" if op == "attend" else None,
        )
    return replace(exact, target="gpu", isa="triton", layout="gpu16") if gpu else exact


def only_rope(text: str) -> str:
    """Return the lines of a kernel that speak of what turns, and their neighbours."""
    lines = text.splitlines()
    words = re.compile(r"\bturn|rotat|cos|sin_|Keys|partner")
    kept = {i for i, line in enumerate(lines) if words.search(line)}
    near = sorted({j for i in kept for j in (i - 1, i, i + 1) if lines[j]})
    return "\n".join(lines[i] for i in near) + "\n"


@pytest.mark.parametrize("quantized", [False, True], ids=["exact", "quantized"])
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("op", OPS)
def test_printed_text(op: Op, gpu: bool, quantized: bool, golden: Golden) -> None:
    rope = ROPES[quantized]
    golden(only_rope(generate(spec(op, rope, "bf16", gpu=gpu, quantized=quantized)).text))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("quantized", [False, True], ids=["exact", "quantized"])
@pytest.mark.parametrize("op", OPS)
def test_no_template_name_and_no_long_line_is_left(
    op: Op, quantized: bool, rope: Rotary, dtype: DTypeName
) -> None:
    source = generate(spec(op, rope, dtype, gpu=False, quantized=quantized))
    text = source.text.replace(source.spec.symbol, "symbol")
    assert "$" not in text
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]\n", text)
    assert max(len(line) for line in text.splitlines()) <= 100
