"""Every family of GPU kernels on the device, against plain torch and float64 attention.

Letters: B batch, H query heads, K KV heads, S query tokens, T cached tokens, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.codegen.formats import get_format
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.spec import Compute
from kvcompile.passes.plan_formats import EXACT_FORMATS
from kvcompile.reference.attention import attention
from kvcompile.runtime import launch, torch_path
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore
from tests.support.numerics import OUTPUT_UNIT

MOST_ERROR = 2.0
"""Of an output row over its length, in roundings of its type."""

RESIDUAL = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of store and one call of attention.

    Attributes:
        k: Format of K.
        v: Format of V.
        dtype: Of the model.
        dims: D of a key and of a value.
        group: H / K.
        page_size: Tokens of a page.
        queries: S.
        has_mask: Whether a mask hides tokens at random.
        tokens: T.
    """

    k: str
    v: str
    dtype: torch.dtype = torch.bfloat16
    dims: tuple[int, int] = (128, 128)
    group: int = 4
    page_size: int = 64
    queries: int = 1
    has_mask: bool = False
    tokens: int = 333

    def __str__(self) -> str:
        mask = ", mask" if self.has_mask else ""
        return (
            f"K {self.k} V {self.v} {EXACT_FORMATS[self.dtype]} D{self.dims[0]} G{self.group} "
            f"P{self.page_size} S{self.queries}{mask}"
        )


def cases() -> list[Case]:
    """Return the cases: every format, mixed ones, and sizes off the usual."""
    formats = ("bf16", "fp8", "fp8_e5m2", "int8", "int4", "int3", "int2", "int1")
    found = [Case(k=name, v=name) for name in formats]
    found += [Case(k="int8", v="int4"), Case(k="int4", v="bf16"), Case(k="bf16", v="int2")]
    for name in ("bf16", "int4"):
        found += [Case(k=name, v=name, dims=(d, d)) for d in (64, 80, 96, 256)]
        found += [Case(k=name, v=name, group=group) for group in (1, 3, 7, 9)]
        found += [Case(k=name, v=name, page_size=size) for size in (32, 128)]
        found += [
            Case(k=name, v=name, queries=queries, has_mask=True, group=5)
            for queries in (1, 6, 16, 40)
        ]
    found.append(Case(k="fp16", v="fp16", dtype=torch.float16))
    found.append(Case(k="int4", v="int4", dtype=torch.float16))
    found.append(Case(k="fp32", v="fp32", dtype=torch.float32))
    return found


def layout_of(case: Case) -> RecordLayout:
    """Return the layout of a case's records."""
    window = None
    if get_format(case.k).is_grouped or get_format(case.v).is_grouped:
        window = Window(EXACT_FORMATS[case.dtype], 4, RESIDUAL)
    return RecordLayout(case.k, case.v, *case.dims, case.page_size, window=window, order="gpu16")


def new_store(
    layout: RecordLayout, heads: int, dtype: torch.dtype, device: torch.device, batch: int
) -> PagedStore:
    """Return an empty store on a device."""
    arena = Arena(layout.page_bytes(heads), device)
    if layout.window is None:
        return PagedStore(layout, heads, dtype, device, arena, batch=batch)
    exact = Arena(layout.exact.page_bytes(heads), device)
    store = QuantizedStore(layout, heads, dtype, device, (arena, exact), batch=batch)
    compute: Compute = "fp32" if dtype is torch.float32 else "fp16"
    store.compute = compute
    return store


def check(case: Case, device: torch.device) -> dict[str, Any]:
    """Run append, gather and attend; return what was found of each.

    Returns:
        `bytes_equal` and `gather_equal`, against plain torch in main memory, and `roundings`, the
        worst row's error of attention against float64 over what is stored.
    """
    heads, starts = 2, [0, 13]
    layout = layout_of(case)
    k, v = (
        torch.randn(2, heads, case.tokens, dim) * torch.logspace(-1, 0.5, dim)
        + torch.randn(heads, 1, dim)
        for dim in case.dims
    )
    k, v = k.to(case.dtype), v.to(case.dtype)
    store = new_store(layout, heads, case.dtype, device, 2)
    twin = new_store(layout, heads, case.dtype, torch.device("cpu"), 2)
    for target, append in ((store, launch.append), (twin, torch_path.append)):
        target.set_starts(starts)
        for begin, end in ((0, case.tokens - 9), (case.tokens - 9, case.tokens)):
            target.reserve(begin, end - begin)
            new_k, new_v = (x[:, :, begin:end].to(target.device) for x in (k, v))
            append(target, new_k, new_v, begin)
            target.appended = end
            target.commit(end)
    found: dict[str, Any] = {"bytes_equal": _same_pages(store, twin)}
    dense = {}
    for role in ("k", "v"):
        stored = launch.gather(store, role, 0, case.tokens).cpu()
        exact = torch_path.gather(twin, role, 0, case.tokens)
        found["gather_equal"] = found.get("gather_equal", True) and torch.equal(stored, exact)
        dense[role] = torch_path.gather(twin, role, 0, case.tokens, torch.float64)
    q = torch.randn(2, case.queries, heads * case.group, case.dims[0]).to(case.dtype)
    q = q.transpose(1, 2)
    seen = (torch.arange(case.tokens) >= torch.tensor(starts)[:, None])[:, None, None]
    mask = None
    if case.has_mask:
        mask = torch.rand(2, 1, case.queries, case.tokens) > 0.3
        seen = seen & mask
        mask = mask.to(device)
    scale = 1 / math.sqrt(case.dims[0])
    out = launch.attend(store, q.to(device), mask, False, scale, case.tokens).cpu().double()
    wanted = attention(q.double(), dense["k"], dense["v"], mask=seen, scale=scale)
    error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    found["roundings"] = float(error.max()) / OUTPUT_UNIT[case.dtype]
    return found


def is_right(case: Case, found: dict[str, Any]) -> bool:
    """Whether what was found of a case is what it has to be.

    Sums of fp32 numbers are off by more roundings than two: one per term, in the worst case.
    """
    most = MOST_ERROR if case.dtype is not torch.float32 else float(case.tokens + case.dims[0])
    return bool(found["bytes_equal"] and found["gather_equal"] and found["roundings"] <= most)


def _same_pages(store: PagedStore, twin: PagedStore) -> bool:
    """Whether two stores have the same quantized pages."""
    if not isinstance(twin, QuantizedStore):
        return True  # every slot without a token is undefined; gather compares the others
    for row, count in enumerate(twin.quantized.tolist()):
        for number in range(count):
            mine, other = (s.pages.arena.page(s.pages.rows[row][number]) for s in (store, twin))
            if not torch.equal(mine.cpu(), other):
                return False
    return True
