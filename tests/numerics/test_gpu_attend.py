"""GPU attend kernels in Triton's interpreter, against float64 attention over what is stored.

Every page slot, partial output and scale that must not be read is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.spec import Compute, DTypeName, IsaName, MaskKind
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.gpu_pages import (
    MOST_ERROR,
    GpuCase,
    GpuPages,
    attend,
    case_dtype,
    expected,
    worst_error,
)


def tokens_of(case: GpuCase, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [B, K, T, D] whose channels have means and sizes of their own."""
    k, v = (
        torch.randn(batch, case.kv_heads, length, dim)
        * torch.logspace(-1, 0.5, dim)[torch.randperm(dim)]
        + torch.randn(1, case.kv_heads, 1, dim)
        for dim in case.dims
    )
    return k.to(case_dtype(case)), v.to(case_dtype(case))


def check(
    case: GpuCase,
    *,
    length: int = 150,
    starts: tuple[int, ...] = (0, 13),
    queries: int = 1,
    splits: int = 3,
) -> None:
    k, v = tokens_of(case, len(starts), length)
    pages = GpuPages(case, k, v, starts)
    heads = case.group * case.kv_heads
    q = torch.randn(len(starts), queries, heads, case.dims[0]).transpose(1, 2).to(case_dtype(case))
    mask = None
    if case.mask == "bool":
        mask = torch.rand(len(starts), 1, queries, length) > 0.3
    elif case.mask == "additive":
        mask = torch.randn(len(starts), heads, queries, length)
        mask = mask.masked_fill(torch.rand_like(mask) < 0.3, -torch.inf)
        mask = mask.to(case_dtype(replace(case, dtype=case.mask_dtype or case.dtype)))
    out = attend(pages, q, splits=splits, mask=mask)
    error = worst_error(out, expected(pages, q, mask=mask))
    assert error < MOST_ERROR, f"{case}: {error:.2f} roundings"


FLAVOURS = ["ptx", "triton"]
FORMATS = ["bf16", "fp8", "fp8_e5m2", "int8", "int4", "int3", "int2", "int1"]


@pytest.mark.parametrize("isa", FLAVOURS)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, isa: IsaName) -> None:
    check(GpuCase(k=name, isa=isa, dims=(128, 128), page_size=64), length=230)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("int8", "int4"),
        ("int4", "bf16"),
        ("bf16", "int2"),
        ("fp8", "int4"),
        ("int2", "int8"),
        ("int3", "fp8"),
        ("fp8", "fp8_e5m2"),
    ],
)
def test_mixed_formats(k: str, v: str) -> None:
    check(GpuCase(k=k, v=v, page_size=64), length=200)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_page_sizes(name: str, page_size: int) -> None:
    check(GpuCase(k=name, page_size=page_size), length=3 * page_size + 75)


@pytest.mark.parametrize("isa", FLAVOURS)
@pytest.mark.parametrize(
    ("k", "v", "dim", "page_size"),
    [
        ("int4", "int4", 32, 16),
        ("int2", "int2", 80, 16),
        ("int1", "int1", 32, 32),
        ("int3", "int3", 112, 32),
        ("int8", "int4", 80, 16),
        ("int4", "bf16", 96, 16),
        ("bf16", "int2", 32, 16),
        ("fp8", "int2", 112, 32),
    ],
)
def test_tiles_too_small_for_tensor_cores(
    k: str, v: str, dim: int, page_size: int, isa: IsaName
) -> None:
    """Words of few channels hold up to 8 tokens of each channel: tiles of 2 to 8 tokens."""
    case = GpuCase(k=k, v=v, isa=isa, dims=(dim, dim), page_size=page_size)
    assert GpuShape(case.spec).tile_tokens < 16
    check(case, length=150, starts=(7,))


@pytest.mark.parametrize("mask", ["bool", "causal"])
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_small_tiles_of_several_queries(compute: Compute, mask: MaskKind) -> None:
    case = GpuCase(
        k="int4", dims=(32, 32), page_size=16, mask=mask, queries="few", group=5, compute=compute
    )
    check(case, length=100, queries=3, starts=(7,))


@pytest.mark.parametrize("dim", [32, 56, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int2"])
def test_head_dims(name: str, dim: int) -> None:
    check(GpuCase(k=name, dims=(dim, dim), page_size=64), length=200, starts=(7,))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 9, 71])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_groups(name: str, group: int) -> None:
    check(GpuCase(k=name, group=group, kv_heads=1, page_size=64), starts=(7,))


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("mask", ["bool", "additive", "none", "causal"])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_masks_and_queries(name: str, mask: MaskKind, queries: int) -> None:
    case = GpuCase(
        k=name,
        page_size=64,
        mask=mask,
        mask_dtype="bf16" if mask == "additive" else None,
        queries="few",
        group=5,
    )
    check(case, queries=queries, starts=(3, 0))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16", "int4"])
def test_sink_logits(name: str, splits: int) -> None:
    """Of one partial output and of several; a row that sees nothing else gets zeros."""
    dtype: DTypeName = "fp16" if name == "fp16" else "bf16"
    sinks: DTypeName = "fp32" if name == "int4" else dtype
    case = GpuCase(k=name, dtype=dtype, sink_dtype=sinks, group=3, mask="bool", queries="few")
    case = replace(case, softcap=3.0) if name == "int4" else case
    splits += case.is_grouped
    check(case, queries=3, starts=(0, 13), splits=splits)
    k, v = tokens_of(case, 1, 40)
    pages, q = GpuPages(case, k, v, (0,)), torch.ones(1, 6, 3, 64, dtype=case_dtype(case))
    nothing = torch.zeros(1, 1, 3, 40, dtype=torch.bool)
    assert not attend(pages, q, splits=splits, mask=nothing).any()
    other = replace(case, sink_dtype=None)
    plain = expected(GpuPages(other, k, v, (0,)), q)
    assert worst_error(attend(pages, q, splits=splits, mask=~nothing), plain) > 8 * MOST_ERROR


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 36, 63, 64, 65, 99, 100, 101])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_lengths_and_empty_splits(name: str, length: int) -> None:
    check(GpuCase(k=name), length=length, starts=(0, min(2, length - 1)), splits=5)


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_chunk_of_a_prompt(name: str) -> None:
    """Many queries of which each sees the tokens up to its own: a mask says which."""
    case = GpuCase(k=name, page_size=64, mask="bool", queries="many", group=3)
    length, queries = 170, 70
    k, v = tokens_of(case, 1, length)
    pages = GpuPages(case, k, v, (5,))
    q = torch.randn(1, queries, 6, 64).transpose(1, 2).to(case_dtype(case))
    own = length - queries + torch.arange(queries)
    mask = (torch.arange(length) <= own[:, None])[None, None]
    out = attend(pages, q, splits=2, mask=mask)
    assert worst_error(out, expected(pages, q, mask=mask)) < MOST_ERROR
