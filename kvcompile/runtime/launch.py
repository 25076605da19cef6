"""Launching kernels on stores: `append`, `attend` and `gather` on tensors.

Each call finds its launcher in a dictionary, takes addresses and strides, and makes one foreign
call; everything that can be decided once is decided in a launcher's closure. Where a kernel cannot
be had, the same call runs in plain torch and one remark says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from kvcompile.codegen.cpu.compile import Kernel, S, load
from kvcompile.codegen.cpu.isa import detect_isa
from kvcompile.codegen.errors import (
    CompilerNotFoundError,
    KernelCompilationError,
    UnsupportedKernelError,
)
from kvcompile.codegen.formats import Role
from kvcompile.codegen.gpu.compile import gpu_isa
from kvcompile.codegen.gpu.compile import load as load_triton
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.spec import MOST_QUERIES, Compute, DTypeName, KernelSpec, MaskKind, Op, Spec
from kvcompile.passes.ir.remarks import Remark, emit
from kvcompile.runtime import gpu_launch, torch_path
from kvcompile.runtime.scratch import scratch_of

DTYPE_NAMES: dict[torch.dtype, DTypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Store(Protocol):
    """What a launch needs of a page store."""

    layout: RecordLayout
    compute: Compute | None
    num_kv_heads: int
    dtype: torch.dtype
    batch: int
    state: torch.Tensor


Append = Callable[[Store, torch.Tensor | None, torch.Tensor | None, int], None]
Attend = Callable[[Store, torch.Tensor, torch.Tensor | None, bool, float, int], torch.Tensor]
Gather = Callable[[Store, Role, int, int], torch.Tensor]

_appends: dict[object, Append] = {}
_attends: dict[object, Attend] = {}
_gathers: dict[object, Gather] = {}
LAUNCHERS: list[dict[Any, Any]] = [_appends, _attends, _gathers]
"""Every choice between kernel and torch that was made in this process."""


def append(store: Store, k: torch.Tensor | None, v: torch.Tensor | None, past_len: int) -> None:
    """Write k, v [B, K, S, D] as the tokens from `past_len` on of every row.

    The pages must be there. Tokens of left padding are skipped; nothing else is touched.

    Args:
        store: The store.
        k: New keys, any strides, or None to leave them alone.
        v: New values of the same dtype, or None.
        past_len: Position of the first new token.

    Raises:
        ValueError: Shapes do not fit the store.
    """
    new = k if k is not None else v
    if new is None:
        return
    _append_of(store.layout, new.dtype)(store, k, v, past_len)


def flush(store: Store, length: int) -> None:
    """Quantize the pages that `length` stored tokens have made old enough, from the ring alone."""
    _append_of(store.layout, store.dtype)(store, None, None, length)


def attend(
    store: Store,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kv_len: int,
) -> torch.Tensor:
    """Return attention of q [B, H, S, Dk] over the first `kv_len` tokens, left padding excluded.

    Args:
        store: The store.
        q: Queries of 1 to 16 tokens.
        mask: Broadcasts to [B, H, S, at least kv_len]; bool (True is visible) or additive.
        causal: Query token s sees the tokens t <= s; only without a mask.
        scale: Factor of the scores.
        kv_len: Tokens to look at, left padding included.

    Returns:
        [B, H, S, Dv] of q's dtype, in the memory order of [B, S, H, Dv].

    Raises:
        ValueError: Shapes do not fit the store, or a mask comes with `causal`.
    """
    if mask is None:
        rule: object = causal
    elif causal:
        raise ValueError("attention is either causal or has a mask")
    else:
        rule = mask.dtype
    _, heads, queries, _ = q.shape
    group = heads // store.num_kv_heads
    key = (store.layout.symbol, q.dtype, group, rule, queries == 1, store.compute)
    launcher = _attends.get(key)
    if launcher is None:
        launcher = _attends[key] = _new_attend(store, q, mask, causal=causal)
    return launcher(store, q, mask, causal, scale, kv_len)


def gather(store: Store, role: Role, start: int, stop: int) -> torch.Tensor:
    """Return the tokens start..stop-1 of one role, dense [B, K, T, D]; left padding is zeros."""
    key = (store.layout.symbol, store.dtype)
    launcher = _gathers.get(key)
    if launcher is None:
        spec = _spec(store.layout, store.dtype, "gather")
        made = _made(spec, _gather_launcher, gpu_launch.gather_launcher)
        launcher = _gathers[key] = made or torch_path.gather
    return launcher(store, role, start, stop)


def prepare(spec: Spec) -> bool:
    """Compile and load a kernel ahead of its first call; return whether it can be had."""
    if isinstance(spec, KernelSpec) and spec.target == "gpu":
        return _made(spec, lambda _: True, lambda _: True) is not None
    return load_or_remark(spec) is not None


def forget_launchers() -> None:
    """Forget every choice between kernel and torch, so that the environment is read again."""
    for launchers in LAUNCHERS:
        launchers.clear()


def _spec(
    layout: RecordLayout,
    dtype: torch.dtype,
    op: Op,
    *,
    group: int | None = None,
    mask: MaskKind | None = None,
    mask_dtype: torch.dtype | None = None,
    one: bool = True,
    compute: Compute | None = None,
) -> KernelSpec | None:
    """Return the spec of the kernel for these tensors, or None after a remark."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        remark(f"no {op} kernel takes {dtype}")
        return None
    is_gpu = layout.order == "gpu16"
    try:
        isa = gpu_isa() if is_gpu else detect_isa()
    except UnsupportedKernelError as error:
        remark(str(error))
        return None
    return KernelSpec(
        op=op,
        target="gpu" if is_gpu else "cpu",
        isa=isa,
        dtype=name,
        **layout.spec_fields(),
        q_heads_per_kv_head=group,
        mask=mask,
        mask_dtype=None if mask_dtype is None else DTYPE_NAMES[mask_dtype],
        queries=None if op != "attend" else "one" if one else "few",
        compute=compute,
    )


M = TypeVar("M")


def _made(
    spec: KernelSpec | None,
    on_cpu: Callable[[Kernel[KernelSpec]], M],
    on_gpu: Callable[[KernelSpec], M],
) -> M | None:
    """Return what is made of a kernel, or None after a remark that says why it cannot be had."""
    if spec is None:
        return None
    if spec.target == "cpu":
        kernel = load_or_remark(spec)
        return None if kernel is None else on_cpu(kernel)
    try:
        load_triton(spec)
        return on_gpu(spec)
    except (ImportError, KernelCompilationError, UnsupportedKernelError) as error:
        remark(str(error), hint="Choose what the sentence says, or install triton.")
        return None


def load_or_remark(spec: S) -> Kernel[S] | None:
    """Return a kernel, or None after a remark that says why it cannot be had."""
    if os.environ.get("KVCOMPILE_CPU_KERNELS") == "reference":
        remark("KVCOMPILE_CPU_KERNELS=reference asks for it")
        return None
    try:
        return load(spec)
    except (CompilerNotFoundError, KernelCompilationError, UnsupportedKernelError) as error:
        remark(str(error))
        return None


def remark(reason: str, hint: str = "Install g++, or name a working C++ compiler in CXX.") -> None:
    """Say once per process that plain torch stands in for the kernels."""
    emit(
        Remark(
            kind="missed",
            code="KVC501",
            origin="launch",
            site="",
            where="",
            reason=f"plain torch stands in for a kernel, which is slow: {reason}",
            hint=hint,
        ),
        once="fallback",
    )


def _append_of(layout: RecordLayout, dtype: torch.dtype) -> Append:
    launcher = _appends.get((layout.symbol, dtype))
    if launcher is None:
        spec = _spec(layout, dtype, "append")
        made = _made(spec, _append_launcher, gpu_launch.append_launcher)
        launcher = _appends[layout.symbol, dtype] = made or torch_path.append
    return launcher


def _append_launcher(kernel: Kernel[KernelSpec]) -> Append:
    pack, enter, threads = kernel.pack, kernel.enter, torch.get_num_threads
    k_dim, v_dim = kernel.spec.head_dim_qk, kernel.spec.head_dim_vo

    def launch(store: Store, k: torch.Tensor | None, v: torch.Tensor | None, past_len: int) -> None:
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
        state = store.state.data_ptr()
        words = pack(state, *k_part, *v_part, heads, past_len, new_len, threads())
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


def _gather_launcher(kernel: Kernel[KernelSpec]) -> Gather:
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


def _new_attend(
    store: Store, q: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> Attend:
    """Choose how queries and masks of these dtypes are served, after checking what is fixed."""
    if q.shape[1] % store.num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not share {store.num_kv_heads} KV heads")
    kind: MaskKind = "causal" if causal else "none"
    mask_dtype = None
    if mask is not None:
        kind = "bool" if mask.dtype is torch.bool else "additive"
        if kind == "additive":
            mask_dtype = q.dtype if mask.dtype == q.dtype else torch.float32
    spec = _spec(
        store.layout,
        q.dtype,
        "attend",
        group=q.shape[1] // store.num_kv_heads,
        mask=kind,
        mask_dtype=mask_dtype,
        one=q.shape[2] == 1,
        compute=store.compute,
    )
    made = _made(
        spec,
        lambda kernel: _attend_launcher(kernel, mask_dtype),
        lambda spec: gpu_launch.attend_launcher(spec, mask_dtype),
    )
    return made or torch_path.attend


def _attend_launcher(kernel: Kernel[KernelSpec], mask_dtype: torch.dtype | None) -> Attend:
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
        mask_part = _NO_MASK
        if mask is not None:
            if mask_dtype is not None and mask.dtype != mask_dtype:
                mask = mask.to(mask_dtype)
            mask_part = _mask_part(mask, (batch, heads, queries, kv_len))
        words = pack(
            store.state.data_ptr(),
            *q_part,
            out.data_ptr(),
            queries * heads * v_dim,
            v_dim,
            heads * v_dim,
            *mask_part,
            kv_heads,
            queries,
            kv_len,
            scratch(batch, kv_heads, queries, kv_len),
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
