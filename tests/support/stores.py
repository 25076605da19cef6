"""Small page stores with known content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore

PAGE = 16
HEADS = 2
DIM_QK = 8
DIM_VO = 5


def empty_store(
    *,
    batch: int = 2,
    capacity: int | None = None,
    arena: Arena | None = None,
    page_size: int = PAGE,
) -> PagedStore:
    """Return a store of fp32 records."""
    layout = RecordLayout("fp32", "fp32", DIM_QK, DIM_VO, page_size)
    arena = arena or Arena(layout.page_bytes(HEADS))
    return PagedStore(layout, HEADS, torch.float32, "cpu", arena, batch=batch, capacity=capacity)


def quantized_store(
    *,
    batch: int = 2,
    capacity: int | None = None,
    k_format: str = "int4",
    v_format: str = "int4",
    page_size: int = PAGE,
    sinks: int = 3,
    residual: int = 5,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
) -> QuantizedStore:
    """Return a store of quantized records."""
    exact = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    layout = RecordLayout(
        k_format, v_format, DIM_QK, DIM_VO, page_size, 16, Window(exact, sinks, residual)
    )
    store = QuantizedStore(
        layout,
        heads,
        dtype,
        "cpu",
        (Arena(layout.page_bytes(heads)), Arena(layout.exact.page_bytes(heads))),
        batch=batch,
        capacity=capacity,
    )
    store.compute = "fp32"
    return store


def new_tokens(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random K [batch, HEADS, tokens, DIM_QK] and V [batch, HEADS, tokens, DIM_VO]."""
    return torch.randn(batch, HEADS, tokens, DIM_QK), torch.randn(batch, HEADS, tokens, DIM_VO)


def push(store: PagedStore, k: torch.Tensor, v: torch.Tensor, past_len: int | None = None) -> None:
    """Append and commit."""
    past_len = store.length if past_len is None else past_len
    store.append(k, v, past_len)
    store.commit(past_len + k.shape[2])


@dataclass
class Filled:
    """A store, its handles, and what they stand for as dense tensors."""

    store: PagedStore
    k: KVTensor
    v: KVTensor
    dense_k: torch.Tensor
    dense_v: torch.Tensor


def filled_store(
    length: int,
    *,
    batch: int = 2,
    capacity: int | None = None,
    quantized: bool = False,
    starts: Sequence[int] = (),
) -> Filled:
    """Return a store of `length` random tokens with its handles.

    What a quantized one stands for is what its pages decode to.
    """
    make = quantized_store if quantized else empty_store
    store: PagedStore = make(batch=batch, capacity=capacity)
    if starts:
        store.set_starts(starts)
    k, v = new_tokens(batch, length)
    if length:
        push(store, k, v)
    if quantized or starts:
        k, v = store.materialize("k"), store.materialize("v")
        store.materializations.clear()
    elif capacity is not None:
        k = torch.cat([k, k.new_zeros(batch, HEADS, capacity - length, DIM_QK)], dim=2)
        v = torch.cat([v, v.new_zeros(batch, HEADS, capacity - length, DIM_VO)], dim=2)
    return Filled(store, KVTensor.of(store, "k"), KVTensor.of(store, "v"), k, v)
