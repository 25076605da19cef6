"""Launching a CPU's kernels on stores: addresses and strides, one foreign call.

The signatures are those of `runtime.launch`, which finds a launcher once per kind of store and
call. Everything that can be decided once is decided in a launcher's closure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcompile.codegen.spec import MOST_QUERIES
from kvcompile.runtime.scratch import scratch_of

if TYPE_CHECKING:
    from kvcompile.codegen.cpu.compile import Kernel
    from kvcompile.codegen.formats import Role
    from kvcompile.codegen.spec import KernelSpec
    from kvcompile.runtime.launch import Append, Attend, Gather, Store
    from kvcompile.runtime.rope import Rope
    from kvcompile.runtime.variant import Variant


def append_launcher(kernel: Kernel[KernelSpec]) -> Append:
    """Return `launch.append` for one kind of store."""
    pack, enter, threads = kernel.pack, kernel.enter, torch.get_num_threads
    k_dim, v_dim = kernel.spec.head_dim_qk, kernel.spec.head_dim_vo

    def launch(
        store: Store,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        past_len: int,
        rope: Rope | None,
    ) -> None:
        heads, new_len = store.num_kv_heads, 0
        k_part = v_part = _NOTHING
        if k is not None:
            shape = k.shape
            new_len = shape[2]
            if shape != (store.batch, heads, new_len, k_dim):
                raise ValueError(f"keys {tuple(shape)} do not fit {store!r}")
            k_part, k = _part(k)
        if v is not None:
            shape = v.shape
            if k is not None and (v.dtype != k.dtype or shape[2] != new_len):
                raise ValueError(f"values {v.dtype} {tuple(shape)} do not go with the keys")
            new_len = shape[2]
            if shape != (store.batch, heads, new_len, v_dim):
                raise ValueError(f"values {tuple(shape)} do not fit {store!r}")
            v_part, v = _part(v)
        state, angles = store.state.data_ptr(), () if rope is None else rope.words
        words = pack(state, *k_part, *v_part, *angles, heads, past_len, new_len, threads())
        check(enter(words), kernel)

    return launch


_NOTHING = (0, 0, 0, 0)


def _part(x: torch.Tensor) -> tuple[tuple[int, int, int, int], torch.Tensor]:
    """Return address and strides of x [B, K, S, D], and the tensor that they belong to."""
    row, head, token, channel = x.stride()
    if channel != 1 and x.shape[3] != 1:
        x = x.contiguous()
        row, head, token, _ = x.stride()
    return (x.data_ptr(), row, head, token), x


def gather_launcher(kernel: Kernel[KernelSpec]) -> Gather:
    """Return `launch.gather` for one kind of store."""
    pack, enter, threads = kernel.pack, kernel.enter, torch.get_num_threads
    dims: dict[Role, int] = {"k": kernel.spec.head_dim_qk, "v": kernel.spec.head_dim_vo}

    def launch(store: Store, role: Role, start: int, stop: int) -> torch.Tensor:
        heads = store.num_kv_heads
        dense = torch.empty((store.batch, heads, stop - start, dims[role]), dtype=store.dtype)
        part, _ = _part(dense)
        parts = (*part, *_NOTHING) if role == "k" else (*_NOTHING, *part)
        words = pack(store.state.data_ptr(), *parts, heads, start, stop, threads())
        check(enter(words), kernel)
        return dense

    return launch


def attend_launcher(
    kernel: Kernel[KernelSpec],
    mask_dtype: torch.dtype | None,
    sink_dtype: torch.dtype | None = None,
) -> Attend:
    """Return `launch.attend` for one kind of store, query and mask."""
    pack, enter, threads = kernel.pack, kernel.enter, torch.get_num_threads
    scratch = scratch_of(kernel)
    k_dim, v_dim = kernel.spec.head_dim_qk, kernel.spec.head_dim_vo
    group = kernel.spec.q_heads_per_kv_head
    assert group is not None

    def launch(
        store: Store,
        q: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        kv_len: int,
        rope: Rope | None,
        variant: Variant,
    ) -> torch.Tensor:
        kv_heads, batch = store.num_kv_heads, store.batch
        heads, shape = group * kv_heads, q.shape
        queries = shape[2]
        if shape != (batch, heads, queries, k_dim) or queries > MOST_QUERIES:
            raise ValueError(f"queries {tuple(shape)} do not fit {store!r}")
        out = torch.empty_strided(
            (batch, heads, queries, v_dim),
            (queries * heads * v_dim, v_dim, heads * v_dim, 1),
            dtype=q.dtype,
        )
        q_part, q = _part(q)
        angles = () if rope is None else rope.words
        mask_part = _NO_MASK
        if mask is not None:
            if mask_dtype is not None and mask.dtype != mask_dtype:
                mask = mask.to(mask_dtype)
            mask_part = _mask_part(mask, (batch, heads, queries, kv_len))
        sink_part: tuple[int, ...] = ()
        if sink_dtype is not None:
            sinks = variant.sinks_as(sink_dtype, heads)
            sink_part = (sinks.data_ptr(),)
        words = pack(
            store.state.data_ptr(),
            *q_part,
            out.data_ptr(),
            queries * heads * v_dim,
            v_dim,
            heads * v_dim,
            *angles,
            *mask_part,
            *sink_part,
            kv_heads,
            queries,
            kv_len,
            scratch(batch, kv_heads, queries, kv_len + store.hidden),
            threads(),
            scale,
        )
        check(enter(words), kernel)
        return out

    return launch


_NO_MASK = (0, 0, 0, 0, 0)


def _mask_part(
    mask: torch.Tensor, sizes: tuple[int, int, int, int]
) -> tuple[int, int, int, int, int]:
    """Return address and strides of a mask that broadcasts to `sizes`, its last size a minimum.

    Raises:
        ValueError: It does not broadcast.
    """
    missing = 4 - mask.dim()
    shape = (1,) * missing + tuple(mask.shape)
    stride = (0,) * missing + mask.stride()
    fits = missing >= 0 and (shape[3] == 1 or shape[3] >= sizes[3])
    strides = [0, 0, 0, 0]
    for dim in range(4):
        if fits and shape[dim] != 1:
            strides[dim] = stride[dim]
            fits = dim == 3 or shape[dim] == sizes[dim]
    if not fits:
        raise ValueError(f"a mask {tuple(mask.shape)} does not broadcast to {sizes}")
    return (mask.data_ptr(), strides[0], strides[1], strides[2], strides[3])


def check(status: int, kernel: Kernel[Any]) -> None:
    """Raise ValueError for a kernel that refused its arguments."""
    if status:
        raise ValueError(f"{kernel.spec} rejects its arguments (status {status})")
