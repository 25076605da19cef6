"""Launching Triton kernels on stores whose records lie as GPUs read them.

The signatures are those of `runtime.launch`, which finds a launcher once per kind of store and
call. Kernels get addresses of pages and counts in tensors on the device, and nothing waits for
them.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu.compile import load, out_of_room
from kvcompile.codegen.gpu.schedule import Schedule, choose_splits
from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.spec import MergeSpec
from kvcompile.runtime.device_tables import Tables
from kvcompile.runtime.rope import Rope
from kvcompile.runtime.scheduling import (
    ScheduledKernel,
    read_override,
    schedule_of,
    tuned_schedule,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcompile.codegen.formats import Role
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.codegen.spec import Compute, KernelSpec
    from kvcompile.runtime.page_table import PageTable
    from kvcompile.runtime.variant import Variant

PROCESSORS_OF_INTERPRETER = 8
TUNING_CALLS = 20

MOST_QUERIES = 128
"""Query tokens up to which attention reads the pages themselves. A longer chunk computes longer
than it loads, so that a dense copy costs it little. An estimate; nothing was measured yet."""


class GpuStore(Protocol):
    """What a launch needs of a store."""

    layout: RecordLayout
    compute: Compute | None
    num_kv_heads: int
    dtype: torch.dtype
    batch: int
    state: torch.Tensor
    device: torch.device
    pages: PageTable
    starts: torch.Tensor

    @property
    def device_tables(self) -> Tables:
        """Its tables on the device."""
        ...


def append_launcher(spec: KernelSpec) -> Callable[..., None]:
    """Return `launch.append` for one kind of store."""
    kernel = load(spec)

    def launch(
        store: Any,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        past_len: int,
        rope: Rope | None,
    ) -> None:
        lengths = []
        parts: list[object] = []
        for x, dim in ((k, spec.head_dim_qk), (v, spec.head_dim_vo)):
            part, length = _part(store, x, dim)
            lengths.append(length)
            parts += part
        if all(lengths) and lengths[0] != lengths[1]:
            raise ValueError(f"{lengths[0]} keys and {lengths[1]} values do not go together")
        programs = -(-max(lengths) // TILE)
        parts += _angles(rope)
        tables = store.device_tables
        arguments = [*parts, *_pages(store), tables.number("past_len", past_len)]
        total = programs
        if spec.is_grouped:
            arguments += [*_window(store), programs]
            todo = int((store.quantized - store.ring_from).max())
            total += tables.most_quantized(todo)
        if total:
            kernel[(total, store.num_kv_heads, store.batch)](*arguments)

    return launch


def gather_launcher(spec: KernelSpec) -> Callable[..., torch.Tensor]:
    """Return `launch.gather` for one kind of store."""
    kernel = load(spec)

    def launch(store: Any, role: Role, start: int, stop: int) -> torch.Tensor:
        dim = spec.head_dim_qk if role == "k" else spec.head_dim_vo
        sizes = (store.batch, store.num_kv_heads, stop - start, dim)
        dense = torch.empty(sizes, dtype=store.dtype, device=store.device)
        part = [dense, *dense.stride()[:3]]
        parts = [*part, stop, *part, 0] if role == "k" else [*part, 0, *part, stop]
        arguments = [*parts, *_pages(store), start]
        if spec.is_grouped:
            arguments += _window(store)
        grid = (-(-(stop - start) // TILE), store.num_kv_heads, store.batch)
        kernel[grid](*arguments)
        return dense

    return launch


def attend_launcher(
    spec: KernelSpec, mask_dtype: torch.dtype | None, sink_dtype: torch.dtype | None = None
) -> Callable[..., torch.Tensor]:
    """Return `launch.attend` for one kind of store, query and mask."""
    override = read_override()
    kernel = ScheduledKernel(load(spec), schedule_of(spec, override), out_of_room())
    is_tuned = os.environ.get("KVCOMPILE_AUTOTUNE") != "1"
    shape = GpuShape(spec)
    group, dim = shape.group, spec.head_dim_vo

    def launch(
        store: Any,
        q: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        kv_len: int,
        rope: Rope | None,
        variant: Variant,
    ) -> torch.Tensor:
        nonlocal kernel, is_tuned
        del causal
        batch, kv_heads, queries = store.batch, store.num_kv_heads, q.shape[2]
        heads = group * kv_heads
        if q.shape != (batch, heads, queries, spec.head_dim_qk):
            raise ValueError(f"queries {tuple(q.shape)} do not fit {store!r}")
        if not scale > 0:
            raise ValueError(f"the scale of scores must be positive, not {scale}")
        q = q if q.stride(3) == 1 else q.contiguous()
        rows = group * queries
        blocks = -(-rows // shape.block_rows)
        splits = _splits(
            store, spec, blocks, store.device_tables.most_tokens(kv_len + store.hidden)
        )
        if override.splits is not None:
            splits = max(override.splits, 2 if spec.is_grouped else 1)
        partial = torch.empty(
            (batch * heads * queries, splits, dim), dtype=torch.float32, device=q.device
        )
        lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)
        arguments: list[object] = [q, *q.stride()[:3], *_angles(rope), *_pages(store)]
        arguments.append(store.device_tables.number("kv_len", kv_len))
        if spec.is_grouped:
            arguments += _window(store)
        if mask is not None:
            arguments += _mask(mask, mask_dtype, (batch, heads, queries, kv_len))
        arguments += [partial, lse, scale * math.log2(math.e)]
        if shape.has_blocks:
            arguments += [kv_heads, queries]
        grid = (splits, kv_heads * blocks, batch)
        if not is_tuned and q.is_cuda and not torch.cuda.is_current_stream_capturing():
            kernel, is_tuned = _tuned(spec, grid, arguments), True
        kernel.launch(grid, *arguments)
        out = torch.empty((batch, queries, heads, dim), dtype=q.dtype, device=q.device)
        out = out.transpose(1, 2)
        merge = load(_merge_spec(spec, splits))
        sinks = [] if sink_dtype is None else [variant.sinks_as(sink_dtype, heads)]
        merge[(len(partial),)](partial, lse, splits, out, *out.stride()[:3], kv_heads, rows, *sinks)
        return out

    return launch


def _tuned(spec: KernelSpec, grid: tuple[int, ...], arguments: Sequence[object]) -> ScheduledKernel:
    """Return a kernel with the schedule that is the fastest for these arguments."""

    def measure(schedule: Schedule) -> float:
        options = {"num_warps": schedule.num_warps, "num_stages": schedule.num_stages}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            load(spec)[grid](*arguments, **options)
            begin.record()
            for _ in range(TUNING_CALLS):
                load(spec)[grid](*arguments, **options)
            end.record()
        except out_of_room():
            return math.inf
        end.synchronize()
        return float(begin.elapsed_time(end))

    device = f"{torch.cuda.get_device_name()}, grid {grid}"
    return ScheduledKernel(load(spec), tuned_schedule(spec, device, measure), out_of_room())


def _part(store: GpuStore, x: torch.Tensor | None, dim: int) -> tuple[list[object], int]:
    """Return tensor, strides and length of new K or V; without any, of nothing."""
    if x is None:
        # Nothing is read of it, but a kernel takes no address in main memory, where the state is.
        return [torch.empty(1, dtype=store.dtype, device=store.device), 0, 0, 0, 0], 0
    if x.shape[:2] != (store.batch, store.num_kv_heads) or x.shape[3] != dim:
        raise ValueError(f"keys or values {tuple(x.shape)} do not fit {store!r}")
    x = x if x.stride(3) == 1 or dim == 1 else x.contiguous()
    return [x, *x.stride()[:3], x.shape[2]], x.shape[2]


def _angles(rope: Rope | None) -> list[object]:
    """Return cosines and sines and their strides, if anything turns."""
    if rope is None:
        return []
    cos, sin = rope.strides
    return [rope.cos, *cos, rope.sin, *sin]


def _pages(store: GpuStore) -> list[object]:
    tables = store.device_tables
    pages = tables.addresses("pages", store.pages)
    return [pages, pages.stride(0), tables.counts("starts", store.starts)]


def _window(store: Any) -> list[object]:
    tables = store.device_tables
    exact = tables.addresses("exact", store.exact)
    counts = [tables.counts(name, getattr(store, name)) for name in ("quantized", "ring_from")]
    return [*counts, exact, exact.stride(0)]


def _mask(
    mask: torch.Tensor, dtype: torch.dtype | None, sizes: tuple[int, int, int, int]
) -> list[object]:
    """Return a mask that broadcasts to `sizes`, its last size a minimum, and its strides.

    Raises:
        ValueError: It does not broadcast.
    """
    if mask.dtype is torch.bool:
        mask = mask.view(torch.int8)
    elif mask.dtype != dtype:
        mask = mask.to(dtype)
    columns = sizes[3] if mask.shape[-1] == 1 else mask.shape[-1]
    try:
        mask = mask.expand(*sizes[:3], columns)
    except RuntimeError:
        columns = 0
    if columns < sizes[3]:
        raise ValueError(f"a mask {tuple(mask.shape)} does not broadcast to {sizes}")
    return [mask, *mask.stride()]


def _splits(store: GpuStore, spec: KernelSpec, blocks: int, kv_len: int) -> int:
    """Return into how many partial outputs the tokens are split."""
    processors = PROCESSORS_OF_INTERPRETER
    if store.device.type == "cuda":
        processors = torch.cuda.get_device_properties(store.device).multi_processor_count
    programs = store.batch * store.num_kv_heads * blocks
    return choose_splits(spec, processors=processors, programs=programs, kv_len=kv_len)


def _merge_spec(spec: KernelSpec, splits: int) -> MergeSpec:
    assert spec.q_heads_per_kv_head is not None
    return MergeSpec(
        dtype=spec.dtype,
        head_dim_vo=spec.head_dim_vo,
        q_heads_per_kv_head=spec.q_heads_per_kv_head,
        most_splits=1 << (splits - 1).bit_length(),
        sink_dtype=spec.sink_dtype,
    )
