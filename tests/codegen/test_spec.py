from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.layout import PAGE_SIZES
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import Compute, DTypeName, KernelSpec, MaskKind, Op, Queries

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
COMPUTES: list[Compute] = ["fp32", "int8"]
GROUPED = [name for name, format_ in FORMATS.items() if format_.is_grouped]
rotaries = st.builds(Rotary, st.integers(1, 150).map(lambda pairs: 2 * pairs), st.booleans())


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
    if op != "gather" and attend.head_dim_qk > 1:
        pairs = draw(st.integers(1, attend.head_dim_qk // 2))
        rope = draw(st.none() | st.builds(Rotary, st.just(2 * pairs), st.booleans()))
        attend = replace(attend, rope=rope)
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


@st.composite
def quantized_specs(draw: st.DrawFn) -> KernelSpec:
    spec = draw(specs())
    k_is_quantized = draw(st.booleans())
    return replace(
        spec,
        k_format=draw(st.sampled_from(GROUPED)) if k_is_quantized else spec.k_format,
        v_format=draw(st.sampled_from(list(FORMATS) if k_is_quantized else GROUPED)),
        q_group_size=draw(st.integers(1, 8)) * 16,
        num_sink_tokens=draw(st.integers(0, 40)),
        compute=draw(st.sampled_from(COMPUTES)) if spec.op == "attend" else None,
        rotary=draw(st.none() | rotaries) if k_is_quantized else None,
    )


any_spec = specs() | quantized_specs()


@given(any_spec, any_spec)
def test_symbols_are_equal_only_for_equal_specs(a: KernelSpec, b: KernelSpec) -> None:
    assert (a.symbol == b.symbol) == (a == b)


@given(any_spec, st.data())
def test_every_field_is_in_the_symbol(spec: KernelSpec, data: st.DataObject) -> None:
    numbers = ["head_dim_qk", "head_dim_vo", "page_size"]
    numbers += ["q_heads_per_kv_head", "chunk"] if spec.op == "attend" else []
    numbers += ["q_group_size", "num_sink_tokens"] if spec.is_grouped else []
    field = data.draw(st.sampled_from(numbers))
    assert replace(spec, **{field: getattr(spec, field) + 1}).symbol != spec.symbol


@given(quantized_specs(), st.none() | rotaries, st.none() | rotaries)
def test_how_keys_rotate_is_in_the_symbol(
    spec: KernelSpec, one: Rotary | None, other: Rotary | None
) -> None:
    spec = replace(spec, k_format="int4")
    same = replace(spec, rotary=one).symbol == replace(spec, rotary=other).symbol
    assert same == (one == other)


@given(any_spec)
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
    with pytest.raises(ValueError, match="rotary goes with quantized keys"):
        replace(spec, rotary=Rotary(64))
    with pytest.raises(ValueError, match="rope means nothing to gather"):
        replace(spec, op="gather", rope=Rotary(64))
    with pytest.raises(ValueError, match="66 of 64 channels cannot turn"):
        replace(spec, rope=Rotary(66))


@given(any_spec, st.none() | rotaries, st.none() | rotaries)
def test_what_turns_inside_is_in_the_symbol(
    spec: KernelSpec, one: Rotary | None, other: Rotary | None
) -> None:
    if spec.op != "gather":
        specs = [replace(spec, head_dim_qk=300, rope=rope) for rope in (one, other)]
        assert (specs[0].symbol == specs[1].symbol) == (one == other)
