"""GPU gather kernels in Triton's interpreter: the very numbers that are stored."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu.compile import load
from kvcompile.codegen.spec import KernelSpec
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.gpu_pages import GpuCase, GpuPages, case_dtype


def gather(
    pages: GpuPages, begin: int, end: int, *, k_end: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens begin..end-1 of K and V, NaN where nothing was written."""
    case, layout = pages.case, pages.layout
    spec = KernelSpec(
        op="gather",
        target="gpu",
        isa="triton",
        dtype=case.dtype,
        **layout.spec_fields(),
    )
    batch = len(pages.starts)
    outs = [
        torch.full((batch, case.kv_heads, end - begin, dim), torch.nan, dtype=case_dtype(case))
        for dim in case.dims
    ]
    arguments: list[object] = []
    for out, last in zip(outs, (end if k_end is None else k_end, end), strict=True):
        arguments += [out, *out.stride()[:3], last]
    table = pages.pages.addresses
    arguments += [table, table.stride(0), pages.starts, begin]
    if pages.exact is not None:
        exact = pages.exact.addresses
        arguments += [pages.quantized, pages.ring_from, exact, exact.stride(0)]
    load(spec)[(-(-(end - begin) // TILE), case.kv_heads, batch)](*arguments)
    return outs[0], outs[1]


CASES = [
    *(GpuCase(k=name, page_size=64) for name in ("bf16", "fp8", "int8", "int4", "int3", "int2")),
    GpuCase(k="fp8_e5m2", v="fp8", page_size=16),
    GpuCase(k="int1", page_size=64, dims=(128, 128)),
    GpuCase(k="int4", v="bf16", dims=(56, 80)),
    GpuCase(k="bf16", v="int2", dims=(64, 96), page_size=128),
    GpuCase(k="int4", dtype="fp32", q_group_size=32, page_size=16),
    GpuCase(k="fp16", dtype="fp16", dims=(30, 112)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_stored_comes_back(case: GpuCase) -> None:
    length, starts = 190, (0, 13)
    k, v = (torch.randn(2, case.kv_heads, length, dim).to(case_dtype(case)) for dim in case.dims)
    pages = GpuPages(case, k, v, starts)
    if case.is_grouped:
        assert pages.quantized.min() > 0
    padding = torch.arange(length) < torch.tensor(starts)[:, None]
    for begin, end in ((0, length), (9, 21)):
        for out, stored in zip(gather(pages, begin, end), (pages.k, pages.v), strict=True):
            wanted = stored.masked_fill(padding[:, None, :, None], 0)[:, :, begin:end]
            assert torch.equal(out, wanted.to(torch.float32).to(case_dtype(case)))


def test_one_role_alone() -> None:
    case = GpuCase(k="int4")
    k, v = (torch.randn(1, 2, 90, 64).to(torch.bfloat16) for _ in range(2))
    pages = GpuPages(case, k, v, (0,))
    none, found = gather(pages, 0, 90, k_end=0)
    assert none.isnan().all()
    assert torch.equal(found, pages.v.to(torch.bfloat16))
