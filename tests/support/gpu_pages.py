"""Pages as GPU kernels find them: int64 addresses, every unused byte poisoned, and kernels on them.

The kernels run in Triton's interpreter, on tensors in main memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcompile.codegen.formats import TILE, get_format
from kvcompile.codegen.gpu.compile import load
from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.spec import (
    Compute,
    DTypeName,
    IsaName,
    KernelSpec,
    MaskKind,
    MergeSpec,
    Queries,
)
from kvcompile.reference.attention import attention
from tests.support.fake_store import POISON
from tests.support.numerics import DTYPES, OUTPUT_UNIT

MOST_ERROR = 2.0
"""Of an output, in units of the rounding of its type, in the mean over channels."""


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One attend kernel and the model it serves.

    Attributes:
        hidden: Tokens before the kernel's column 0. They count in lengths, starts and masks here.
    """

    k: str = "bf16"
    v: str | None = None
    dtype: DTypeName = "bf16"
    isa: IsaName = "ptx"
    dims: tuple[int, int] = (64, 64)
    group: int = 4
    kv_heads: int = 2
    page_size: int = 32
    mask: MaskKind = "none"
    mask_dtype: DTypeName | None = None
    queries: Queries = "one"
    q_group_size: int = 64
    sinks: int = 4
    residual: int = 32
    softcap: float | None = None
    sink_dtype: DTypeName | None = None
    sliding_window: int | None = None
    hidden: int = 0
    latent: bool = False
    compute: Compute | None = None

    def __str__(self) -> str:
        return self.spec.symbol.removeprefix("attend_")

    @property
    def is_grouped(self) -> bool:
        """Whether K or V is quantized."""
        return any(get_format(name).is_grouped for name in (self.k, self.v or self.k))

    @property
    def spec(self) -> KernelSpec:
        """The spec of the kernel."""
        compute = self.compute
        if compute is None and self.is_grouped:
            compute = "fp32" if self.dtype == "fp32" else "fp16"
        return KernelSpec(
            op="attend_latent" if self.latent else "attend",
            target="gpu",
            isa=self.isa,
            dtype=self.dtype,
            k_format=self.k,
            v_format=self.v or self.k,
            head_dim_qk=self.dims[0],
            head_dim_vo=self.dims[1],
            page_size=self.page_size,
            layout="gpu16",
            q_heads_per_kv_head=self.group,
            mask=self.mask,
            mask_dtype=self.mask_dtype,
            queries=self.queries,
            q_group_size=self.q_group_size if self.is_grouped else None,
            num_sink_tokens=self.sinks if self.is_grouped else None,
            compute=compute,
            softcap=self.softcap,
            sink_dtype=self.sink_dtype,
            sliding_window=self.sliding_window,
            slides=self.hidden > 0,
        )

    def sink_logits(self) -> torch.Tensor | None:
        """Return sink logits [H] that weigh about as much as some tokens do, if it has any."""
        if self.sink_dtype is None:
            return None
        return (2 + torch.arange(self.group * self.kv_heads) / 3).to(DTYPES[self.sink_dtype])

    def layout(self) -> RecordLayout:
        """Return the layout of its records."""
        layout = GpuShape(self.spec).layout
        if layout.window is None:
            return layout
        window = Window(self.dtype, self.sinks, self.residual)
        return replace(layout, window=window)


class _Pool:
    """Pages of one size anywhere in one memory."""

    def __init__(self, layout: RecordLayout, heads: int, batch: int, columns: int) -> None:
        self.layout = layout
        count = batch * columns
        self.memory = torch.full((count, heads, layout.record_bytes), POISON).byte()
        self._order = torch.randperm(count).view(batch, columns)
        self.addresses = self.memory.data_ptr() + self._order * self.memory[0].numel()

    def __getitem__(self, at: tuple[int, int]) -> torch.Tensor:
        """Return the records of a page of a row, uint8[K, bytes], as a view."""
        return self.memory[int(self._order[at])]


class GpuPages:
    """K and V of one layer on pages, and what is stored of them."""

    def __init__(
        self, case: GpuCase, k: torch.Tensor, v: torch.Tensor, starts: Sequence[int]
    ) -> None:
        """Store k, v [B, K, T, D]; the first `starts[b]` tokens of a row are left padding."""
        self.case = case
        self.layout = layout = case.layout()
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.length = k.shape[2]
        batch, heads = k.shape[:2]
        columns = -(-self.length // layout.page_size) + 1
        self.pages = _Pool(layout, heads, batch, columns)
        self.quantized = torch.zeros(batch, dtype=torch.int32)
        self.ring_from = torch.zeros(batch, dtype=torch.int32)
        self.k, self.v = k.double(), v.double()
        self.exact: _Pool | None = None
        if layout.window is not None:
            exact_columns = -(-self.length // TILE) + layout.window.sink_pages + 1
            self.exact = _Pool(layout.exact, heads, batch, exact_columns)
        for row, start in enumerate(starts):
            self._store(row, start)

    def _store(self, row: int, start: int) -> None:
        window, size = self.layout.window, self.layout.page_size
        stored = self.length - start
        first = 0
        pages = -(-stored // size)
        if window is not None:
            first, pages = window.num_sink_tokens, window.full_pages(stored, size)
            self.quantized[row] = self.ring_from[row] = pages
        for number in range(pages):
            tokens = torch.arange(first + number * size, first + (number + 1) * size) + start
            self._write(self.pages, row, number, tokens)
        if window is None:
            return
        assert self.exact is not None
        ring = first + pages * size
        for number in range(window.sink_pages):
            tokens = torch.arange(number * TILE, (number + 1) * TILE)
            tokens = torch.where(tokens < first, tokens + start, self.length)
            self._write(self.exact, row, number, tokens)
        for number in range(-(-max(stored - ring, 0) // TILE)):
            tokens = torch.arange(ring + number * TILE, ring + (number + 1) * TILE) + start
            self._write(self.exact, row, window.sink_pages + number, tokens)

    def _write(self, pool: _Pool, row: int, number: int, tokens: torch.Tensor) -> None:
        """Store tokens of a row in a page; slots of those beyond the length stay NaN."""
        there = tokens < self.length
        parts = []
        for dense in (self.k, self.v):
            found = torch.full((dense.shape[1], len(tokens), dense.shape[3]), math.nan)
            found[:, there] = dense[row, :, tokens[there]].float()
            parts.append(found)
        record = pool.layout.pack(parts[0], parts[1])
        pool[row, number][:] = record
        for dense, back in zip((self.k, self.v), pool.layout.unpack(record), strict=True):
            dense[row, :, tokens[there]] = back[:, there].double()


def attend(
    pages: GpuPages,
    q: torch.Tensor,
    *,
    splits: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run attend and merge_splits in the interpreter; partial outputs begin as NaN."""
    case = pages.case
    batch, heads, queries, _ = q.shape
    spec, shape = case.spec, GpuShape(case.spec)
    dim, rows = case.dims[0 if case.latent else 1], case.group * queries
    partial = torch.full((batch * heads * queries, splits, dim), math.nan)
    lse = torch.full((batch * heads * queries, splits), math.nan)
    arguments: list[object] = [q, *q.stride()[:3]]
    table = pages.pages.addresses
    starts, length = pages.starts - case.hidden, pages.length - case.hidden
    arguments += [table, table.stride(0), starts, torch.tensor([length])]
    if pages.exact is not None:
        exact = pages.exact.addresses
        arguments += [pages.quantized, pages.ring_from, exact, exact.stride(0)]
    if mask is not None:
        mask = mask.expand(batch, heads, queries, -1)[..., case.hidden :]
        mask = mask.view(torch.int8) if mask.dtype is torch.bool else mask
        arguments += [mask, *mask.stride()]
    scale = 1 / math.sqrt(q.shape[-1])
    arguments += [partial, lse, scale * math.log2(math.e)]
    blocks = 1
    if shape.has_blocks:
        arguments += [case.kv_heads, queries]
        blocks = -(-rows // shape.block_rows)
    load(spec)[(splits, case.kv_heads * blocks, batch)](*arguments)
    out = torch.full((batch, queries, heads, dim), math.nan, dtype=q.dtype).transpose(1, 2)
    most = 1 << (splits - 1).bit_length()
    merge = MergeSpec(
        dtype=case.dtype,
        head_dim_vo=dim,
        q_heads_per_kv_head=case.group,
        most_splits=most,
        sink_dtype=case.sink_dtype,
    )
    arguments = [partial, lse, splits, out, *out.stride()[:3], case.kv_heads, rows]
    sinks = case.sink_logits()
    load(merge)[(len(partial),)](*arguments, *([] if sinks is None else [sinks]))
    return out


def bias_of(pages: GpuPages, q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return what is added to scores, float64 [B, H, S, T]: -inf where a token is not seen."""
    case = pages.case
    tokens, queries = torch.arange(pages.length), q.shape[2]
    first = pages.starts.clamp(min=case.hidden)
    seen = (tokens >= first[:, None])[:, None, None, :].expand(-1, 1, queries, -1)
    if case.sliding_window is not None:
        own = pages.length - queries + torch.arange(queries)
        seen = seen & (tokens > own[:, None] - case.sliding_window)
    if case.mask == "causal":
        seen = seen & (tokens - case.hidden <= torch.arange(queries)[:, None])
    bias = torch.zeros(q.shape[0], q.shape[1], queries, pages.length, dtype=torch.float64)
    if mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    elif mask is not None:
        bias = bias + mask.double()
    return torch.where(seen, bias, -math.inf)


def expected(pages: GpuPages, q: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float64 attention over what is stored."""
    case, bias = pages.case, bias_of(pages, q, mask)
    if case.latent:
        return attention(q.double(), torch.cat([pages.k, pages.v], -1), pages.k, mask=bias)
    more = {"softcap": case.softcap, "sinks_H": case.sink_logits()}
    return attention(q.double(), pages.k, pages.v, mask=bias, **more)  # type: ignore[arg-type]


def worst_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error of an output over its length, in roundings of its type."""
    error = (out.double() - reference).norm(dim=-1)
    size = reference.norm(dim=-1).clamp_min(1e-300)
    return float((error / size).max() / OUTPUT_UNIT[out.dtype])


def case_dtype(case: GpuCase) -> torch.dtype:
    """Return the torch dtype of a case."""
    return DTYPES[case.dtype]
