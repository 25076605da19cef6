from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import FORMATS as ALL_FORMATS
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout

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


@given(layouts, layouts)
def test_symbols_are_equal_only_for_equal_layouts(a: RecordLayout, b: RecordLayout) -> None:
    assert (a.symbol == b.symbol) == (a == b)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="unknown cache format 'int5'; known: fp32"):
        RecordLayout("int5", "bf16", 64, 64, 32)
    with pytest.raises(ValueError, match="page_size must be one of"):
        RecordLayout("bf16", "bf16", 64, 64, 48)
    with pytest.raises(ValueError, match="positive"):
        RecordLayout("bf16", "bf16", 0, 64, 32)
