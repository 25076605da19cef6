from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import FORMATS as ALL_FORMATS
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout, Window
from kvcompile.codegen.rotary import MEAN_BYTES, Rotary
from tests.support.rotary import angles, turning

FORMATS = {name: format_ for name, format_ in ALL_FORMATS.items() if not format_.is_grouped}
WORDS = {4: torch.int32, 2: torch.int16}
layouts = st.builds(
    RecordLayout,
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(sorted(FORMATS)),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(PAGE_SIZES),
)


@st.composite
def rotaries(draw: st.DrawFn, channels: int) -> Rotary:
    return Rotary(2 * draw(st.integers(1, channels // 2)), draw(st.booleans()))


@st.composite
def quantized_layouts(draw: st.DrawFn) -> RecordLayout:
    names = [
        draw(st.sampled_from([name for name in ALL_FORMATS if ALL_FORMATS[name].is_grouped])),
        draw(st.sampled_from(sorted(ALL_FORMATS))),
    ]
    k, v = draw(st.permutations(names))
    k_dim = draw(st.integers(2, 80))
    smallest = max(ALL_FORMATS[name].smallest_page for name in names)
    rotates = ALL_FORMATS[k].is_grouped and draw(st.booleans())
    return RecordLayout(
        k,
        v,
        k_dim,
        draw(st.integers(1, 80)),
        draw(st.sampled_from([size for size in PAGE_SIZES if size >= smallest])),
        draw(st.integers(1, 8)) * 16,
        Window(draw(st.sampled_from(sorted(FORMATS))), draw(st.integers(0, 40)), 64),
        draw(rotaries(k_dim)) if rotates else None,
    )


any_layout = layouts | quantized_layouts()


def random_bits(name: str, *shape: int) -> torch.Tensor:
    """Return every kind of bit pattern, NaNs with payloads included."""
    dtype = FORMATS[name].dtype
    word = WORDS[dtype.itemsize]
    bits = torch.randint(torch.iinfo(word).min, torch.iinfo(word).max, shape, dtype=word)
    return bits.view(dtype)


@given(layouts, st.integers(1, 3))
def test_unpack_returns_the_bits_that_were_packed(layout: RecordLayout, heads: int) -> None:
    k = random_bits(layout.k_format, heads, layout.page_size, layout.head_dim_qk)
    v = random_bits(layout.v_format, heads, layout.page_size, layout.head_dim_vo)
    record = layout.pack(k, v)
    assert record.shape == (heads, layout.record_bytes)
    assert layout.record_bytes % 64 == 0
    for given_part, part in zip((k, v), layout.unpack(record), strict=True):
        word = WORDS[part.dtype.itemsize]
        assert torch.equal(part.contiguous().view(word), given_part.view(word))


@pytest.mark.parametrize("name", FORMATS)
def test_words_lie_where_the_documentation_says(name: str) -> None:
    page, k_dim, v_dim = 32, 12, 9
    k_wide, v_wide = 16, 16
    layout = RecordLayout(name, name, k_dim, v_dim, page)
    k = torch.arange(page * k_dim).remainder(97).view(page, k_dim).float() + 1
    v = torch.arange(page * v_dim).remainder(89).view(page, v_dim).float() + 1
    record = layout.pack(k, v)
    words = record.view(FORMATS[name].dtype).float()
    k_words = words[: page * k_wide]
    v_words = words[layout.v_offset // FORMATS[name].dtype.itemsize :]
    for t in range(page):
        for d in range(k_wide):
            tile, lane = divmod(t, 16)
            at = tile * k_wide * 16 + d * 16 + lane
            if name == "bf16":
                at = tile * k_wide * 16 + d // 2 * 32 + lane * 2 + d % 2
            assert k_words[at] == (k[t, d] if d < k_dim else 0)
        for d in range(v_wide):
            at = t // 2 * v_wide * 2 + d * 2 + t % 2 if name == "bf16" else t * v_wide + d
            assert v_words[at] == (v[t, d] if d < v_dim else 0)


def test_bytes_are_what_the_dtype_costs() -> None:
    assert RecordLayout("bf16", "bf16", 64, 64, 32).page_bytes(3) == 3 * 32 * 2 * 64 * 2
    assert RecordLayout("fp32", "fp16", 64, 128, 16).record_bytes == 16 * (64 * 4 + 128 * 2)


@given(any_layout, any_layout)
def test_symbols_are_equal_only_for_equal_layouts(a: RecordLayout, b: RecordLayout) -> None:
    assert (a.symbol == b.symbol) == (a == b)


@given(quantized_layouts(), st.data())
def test_how_keys_rotate_is_in_the_symbol(layout: RecordLayout, data: st.DataObject) -> None:
    layout = replace(layout, k_format="fp8")
    choices = st.none() | rotaries(layout.head_dim_qk)
    one, other = data.draw(choices), data.draw(choices)
    same = replace(layout, rotary=one).symbol == replace(layout, rotary=other).symbol
    assert same == (one == other)


@given(quantized_layouts())
@settings(max_examples=60, deadline=None)
def test_a_mean_lies_between_the_codes_of_k_and_v_and_makes_no_pair_coarser(
    layout: RecordLayout,
) -> None:
    """Codes see what is left; a pair keeps its mean only if its squared ranges shrink."""
    rotary = layout.rotary
    assert layout.mean_offset % 64 == layout.v_offset % 64 == 0
    assert layout.v_offset - layout.mean_offset == (0 if rotary is None else MEAN_BYTES)
    if rotary is None:
        return
    table = angles(rotary, layout.page_size)
    k = torch.randn(2, layout.page_size, layout.head_dim_qk)
    k[1] += 50 * turning(rotary, layout.page_size, layout.head_dim_qk)
    v = torch.randn(2, layout.page_size, layout.head_dim_vo)
    record = layout.pack(k, v, table)
    assert record.shape == (2, layout.record_bytes)
    plain = replace(layout, rotary=None)
    bare = record[:, : layout.mean_offset], record[:, layout.v_offset :]
    left, v_back = plain.unpack(torch.cat(bare, 1))
    back, v_same = layout.unpack(record, table)
    assert torch.equal(v_same, v_back)
    assert torch.equal(back[..., rotary.dim :], left[..., rotary.dim :])
    assert not torch.equal(back[1], left[1]), "the bias is kept apart"
    pairs = rotary.channels(torch.arange(rotary.pairs))
    spread = [x.aminmax(dim=-2) for x in (k, k - (back - left))]
    if layout.format("k").has_minimum:
        spans = [top - low + low.abs() / 128 for low, top in spread]
    else:
        spans = [low.abs().maximum(top.abs()) for low, top in spread]
    before, after = ((x[:, pairs[0]] ** 2 + x[:, pairs[1]] ** 2) for x in spans)
    # Adding what was subtracted rounds numbers of up to 60 to 2^-19, in ranges of up to 120.
    assert bool((after <= before + 240 * 2.0**-18).all())


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="unknown cache format 'int5'; known: fp32"):
        RecordLayout("int5", "bf16", 64, 64, 32)
    with pytest.raises(ValueError, match="page_size must be one of"):
        RecordLayout("bf16", "bf16", 64, 64, 48)
    with pytest.raises(ValueError, match="positive"):
        RecordLayout("bf16", "bf16", 0, 64, 32)
    window = Window("bf16", 4, 64)
    with pytest.raises(ValueError, match="goes with quantized keys"):
        RecordLayout("bf16", "int4", 64, 64, 64, window=window, rotary=Rotary(64))
    with pytest.raises(ValueError, match="64 of 32 channels cannot rotate"):
        RecordLayout("int4", "int4", 32, 64, 64, window=window, rotary=Rotary(64))
