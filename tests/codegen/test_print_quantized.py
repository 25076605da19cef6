"""The printed append and gather kernels of quantized pages."""

from __future__ import annotations

import re

import pytest

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import IsaName, KernelSpec, Op
from tests.support.golden import Golden

OPS: list[Op] = ["append", "gather"]


def spec(
    op: Op,
    isa: IsaName,
    k: str,
    v: str,
    *,
    v_dim: int = 72,
    page_size: int = 32,
    group_size: int = 32,
    sinks: int = 4,
    rotary: Rotary | None = None,
) -> KernelSpec:
    """Return the spec of a kernel whose head dimensions need padding."""
    return KernelSpec(
        op=op,
        isa=isa,
        dtype="bf16",
        k_format=k,
        v_format=v,
        head_dim_qk=20,
        head_dim_vo=v_dim,
        page_size=page_size,
        q_group_size=group_size,
        num_sink_tokens=sinks,
        rotary=rotary,
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rotary", [None, Rotary(16)], ids=["plain", "turning"])
def test_printed_text(op: Op, rotary: Rotary | None, golden: Golden) -> None:
    golden(generate(spec(op, "portable", "int4", "int3", rotary=rotary)).text)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_no_template_name_and_no_long_line_is_left(op: Op, isa: IsaName, name: str) -> None:
    for k, v in ((name, "int4"), ("int1", name), (name, "fp8")):
        rotary = Rotary(20, interleaved=True) if FORMATS[k].is_grouped else None
        printed = spec(op, isa, k, v, v_dim=1000, page_size=128, sinks=128, rotary=rotary)
        text = generate(printed).text
        assert "$" not in text
        assert "\n\n\n" not in text
        assert not re.search(r"[ \t]\n", text)
        assert max(len(line) for line in text.splitlines()) <= 100
        assert text.splitlines()[0] == f"// {printed.symbol}"
        assert "bytes per cached token and KV head" in text


@pytest.mark.parametrize("op", OPS)
def test_refusals_name_what_is_wrong(op: Op) -> None:
    for wrong, reason in [
        (spec(op, "portable", "int1", "int4", page_size=16), "page_size must be at least 32"),
        (spec(op, "portable", "int1", "int4", page_size=48), "page_size 48"),
        (spec(op, "portable", "int1", "int4", group_size=24), "multiple of 16, not 24"),
        (spec(op, "portable", "int1", "int4", v_dim=1025), "head_dim_vo 1025"),
        (spec(op, "portable", "int1", "int5"), "unknown cache format"),
    ]:
        with pytest.raises(UnsupportedKernelError, match=reason):
            generate(wrong)
