"""How fast attention over pages is on a GPU: against the copy bandwidth, and against other kernels.

Calls rotate over layers, so that no cache on the chip has what the next call reads. What Python
does to launch a kernel is left out: calls of a candidate are captured in one CUDA graph and
replayed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_correctness import Case, layout_of, new_store
from kvcompile.codegen.gpu.compile import gpu_isa, load
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.spec import KernelSpec, MergeSpec
from kvcompile.runtime import launch
from kvcompile.runtime.store import PagedStore

COPY_BYTES = 1 << 30
REPLAYS = 20
COLD_BYTES = 512 << 20
"""Bytes that the layers of a candidate have together, several times what a chip caches."""

HEADS, GROUP, DIM = 8, 4, 128
LATENT, ROTATING, LATENT_HEADS = 512, 64, 16


@dataclass(frozen=True)
class Speed:
    """One candidate at one length.

    Attributes:
        name: What ran.
        microseconds: Median time of a call.
        bytes: Bytes of K and V that a call has to read.
    """

    name: str
    microseconds: float
    bytes: int

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read per time."""
        return self.bytes / self.microseconds / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Return the GB/s of copying, reads and writes together."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(lambda: target.copy_(source)) for _ in range(REPLAYS)]
    return 2 * COPY_BYTES / statistics.median(seconds) / 1e9


def _seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def replayed(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median microseconds of a call, from replays of all calls in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = [_seconds(graph.replay) for _ in range(REPLAYS)]
    return statistics.median(seconds) / len(calls) * 1e6


def attention_speeds(tokens: int, batch: int, device: torch.device) -> list[Speed]:
    """Time one decode step's attention of every candidate at one length."""
    dtype, scale = torch.bfloat16, 1 / math.sqrt(DIM)
    dense_bytes = 2 * batch * HEADS * tokens * DIM * 2
    layers = max(1, -(-COLD_BYTES // dense_bytes))
    q = torch.randn(batch, HEADS * GROUP, 1, DIM, dtype=dtype, device=device)
    k, v = (torch.randn(batch, HEADS, tokens, DIM, dtype=dtype, device=device) for _ in range(2))
    dense = [(k.clone(), v.clone()) for _ in range(layers)]
    found = [
        Speed("SDPA", replayed([_sdpa(q, *pair) for pair in dense]), dense_bytes),
    ]
    flex = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
    found.append(
        Speed(
            "flex_attention",
            replayed([_flex(flex, q, *pair) for pair in dense]),
            dense_bytes,
        )
    )
    del dense
    for name in ("bf16", "int8", "int4", "int2"):
        layout = layout_of(Case(k=name, v=name, dims=(DIM, DIM)))
        stores = [_filled(layout, k, v) for _ in range(_layers(layout, tokens, batch))]
        held = sum(h.held_bytes for h in stores[0].holdings())
        calls = [_attend(store, q, scale, tokens) for store in stores]
        found.append(Speed(f"pages {name}", replayed(calls), held))
        if name == "int4":
            calls = [_dequantized(store, q, tokens) for store in stores[:2]]
            found.append(Speed("dequantize int4 + SDPA", replayed(calls), held))
        del stores
    return found


def _layers(layout: RecordLayout, tokens: int, batch: int) -> int:
    size = batch * -(-tokens // layout.page_size) * layout.page_bytes(HEADS)
    return max(1, -(-COLD_BYTES // size))


def _filled(layout: RecordLayout, k: torch.Tensor, v: torch.Tensor) -> PagedStore:
    store = new_store(layout, k.shape[1], k.dtype, k.device, k.shape[0])
    store.append(k, v, 0)
    store.commit(k.shape[2])
    return store


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flex(
    flex: Callable[..., object], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], object]:
    return lambda: flex(q, k, v, enable_gqa=True)


def _attend(store: PagedStore, q: torch.Tensor, scale: float, tokens: int) -> Callable[[], object]:
    return lambda: launch.attend(store, q, None, False, scale, tokens)


def _dequantized(store: PagedStore, q: torch.Tensor, tokens: int) -> Callable[[], object]:
    def run() -> object:
        k, v = (launch.gather(store, role, 0, tokens) for role in ("k", "v"))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def latent_speed(tokens: int, batch: int, device: torch.device) -> Speed:
    """Time attention over latents of 512 + 64 channels, 16 heads."""
    layout = RecordLayout("bf16", "bf16", LATENT, ROTATING, 64, order="gpu16")
    pages = -(-tokens // 64)
    size = batch * pages * layout.record_bytes
    layers = max(1, -(-COLD_BYTES // size))
    memory = torch.randn(layers * size // 2, device=device).to(torch.bfloat16)
    order = torch.randperm(layers * batch * pages, device=device).view(layers, batch, pages)
    tables = memory.data_ptr() + order * layout.record_bytes
    spec = KernelSpec(
        op="attend_latent",
        target="gpu",
        isa=gpu_isa(),
        dtype="bf16",
        **layout.spec_fields(),
        q_heads_per_kv_head=LATENT_HEADS,
        mask="none",
        queries="one",
    )
    q = torch.randn(batch, LATENT_HEADS, 1, LATENT + ROTATING, device=device).to(torch.bfloat16)
    calls = [_latent_call(spec, q, table, tokens) for table in tables]
    return Speed("latents bf16, 16 heads", replayed(calls), size)


def _latent_call(
    spec: KernelSpec, q: torch.Tensor, table: torch.Tensor, tokens: int
) -> Callable[[], Any]:
    batch = len(table)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = max(1, min(64, 2 * processors // batch))
    out = torch.empty(batch, 1, LATENT_HEADS, LATENT, dtype=q.dtype, device=q.device)
    out = out.transpose(1, 2)
    partial = torch.empty(batch * LATENT_HEADS, splits, LATENT, device=q.device)
    lse = torch.empty(batch * LATENT_HEADS, splits, device=q.device)
    starts = torch.zeros(batch, dtype=torch.int32, device=q.device)
    length = torch.tensor([tokens], device=q.device)
    scale = math.log2(math.e) / math.sqrt(LATENT + ROTATING)
    merge = MergeSpec(
        dtype="bf16",
        head_dim_vo=LATENT,
        q_heads_per_kv_head=LATENT_HEADS,
        most_splits=1 << (splits - 1).bit_length(),
    )

    def run() -> None:
        given = (q, *q.stride()[:3], table, table.stride(0), starts, length)
        load(spec)[(splits, 1, batch)](*given, partial, lse, scale, num_warps=4, num_stages=2)
        to = (out, *out.stride()[:3], 1, LATENT_HEADS)
        load(merge)[(len(partial),)](partial, lse, splits, *to)

    return run
