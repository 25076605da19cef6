from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.layout import PAGE_SIZES
from kvcompile.codegen.spec import DTypeName, KernelSpec, MaskKind, Op, Queries

DTYPES: list[DTypeName] = ["fp32", "bf16", "fp16"]
OPS: list[Op] = ["append", "attend", "gather"]
dtypes = st.sampled_from(DTYPES)
dims = st.integers(1, 300)


MASKS: dict[MaskKind, list[DTypeName | None]] = {
    "none": [None],
    "causal": [None],
    "bool": [None],
    "additive": ["fp32", "bf16", "fp16"],
}
QUERIES: list[Queries] = ["one", "few"]


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    mask = draw(st.sampled_from(list(MASKS)))
    attend = KernelSpec(
        op="attend",
        isa=draw(st.sampled_from(list(ISAS))),
        dtype=draw(dtypes),
        k_format=draw(dtypes),
        v_format=draw(dtypes),
        head_dim_qk=draw(dims),
        head_dim_vo=draw(dims),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        q_heads_per_kv_head=draw(st.integers(1, 99)),
        mask=mask,
        mask_dtype=draw(st.sampled_from(MASKS[mask])),
        queries=draw(st.sampled_from(QUERIES)),
        chunk=draw(st.sampled_from([None, 128, 256, 384, 1024])),
    )
    op = draw(st.sampled_from(OPS))
    if op == "attend":
        return attend
    return replace(
        attend,
        op=op,
        q_heads_per_kv_head=None,
        mask=None,
        mask_dtype=None,
        queries=None,
        chunk=None,
    )


@given(specs(), specs())
def test_symbols_are_equal_only_for_equal_specs(a: KernelSpec, b: KernelSpec) -> None:
    assert (a.symbol == b.symbol) == (a == b)


@given(specs(), st.data())
def test_every_field_is_in_the_symbol(spec: KernelSpec, data: st.DataObject) -> None:
    numbers = ["head_dim_qk", "head_dim_vo", "page_size"]
    numbers += ["q_heads_per_kv_head", "chunk"] if spec.op == "attend" else []
    field = data.draw(st.sampled_from(numbers))
    assert replace(spec, **{field: getattr(spec, field) + 1}).symbol != spec.symbol


@given(specs())
def test_a_symbol_is_a_name_for_c_and_for_files(spec: KernelSpec) -> None:
    assert spec.symbol.isidentifier()
    assert len(spec.symbol) < 150


def test_contradictions_are_refused() -> None:
    spec = KernelSpec(
        op="append",
        isa="portable",
        dtype="bf16",
        k_format="bf16",
        v_format="bf16",
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=32,
    )
    with pytest.raises(ValueError, match="q_heads_per_kv_head, mask, queries"):
        replace(spec, op="attend")
    with pytest.raises(ValueError, match="mean nothing to append"):
        replace(spec, queries="one")
    with pytest.raises(ValueError, match="mask_dtype"):
        replace(spec, mask_dtype="fp32")
