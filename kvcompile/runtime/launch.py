"""Launching kernels on stores: `append`, `attend` and `gather` on tensors.

Each call finds its launcher in a dictionary: one of `cpu_launch` or of `gpu_launch`. Where a kernel
cannot be had, the same call runs in plain torch and one remark says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from kvcompile.codegen.spec import (
    MOST_QUERIES,
    Compute,
    DTypeName,
    KernelSpec,
    MaskKind,
    Op,
    Queries,
    Spec,
)
from kvcompile.passes.ir.remarks import Remark, emit
from kvcompile.runtime import cpu_launch, gpu_launch, torch_path
from kvcompile.runtime.rope import Rope
from kvcompile.runtime.variant import PLAIN, Variant

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
    device: torch.device
    batch: int
    hidden: int
    state: torch.Tensor


Append = Callable[[Store, torch.Tensor | None, torch.Tensor | None, int, Rope | None], None]
Attend = Callable[
    [Store, torch.Tensor, torch.Tensor | None, bool, float, int, Rope | None, Variant], torch.Tensor
]
Gather = Callable[[Store, Role, int, int], torch.Tensor]

_appends: dict[object, Append] = {}
_attends: dict[object, Attend] = {}
_gathers: dict[object, Gather] = {}
LAUNCHERS: list[dict[Any, Any]] = [_appends, _attends, _gathers]
"""Every choice between kernel and torch that was made in this process."""


def append(
    store: Store,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    past_len: int,
    rope: Rope | None = None,
) -> None:
    """Write k, v [B, K, S, D] as the tokens from `past_len` on of every row.

    The pages must be there. Tokens of left padding are skipped; nothing else is touched.

    Args:
        store: The store.
        k: New keys, any strides, or None to leave them alone.
        v: New values of the same dtype, or None.
        past_len: Position of the first new token.
        rope: What k turns by on its way in, if it comes unrotated.

    Raises:
        ValueError: Shapes do not fit the store.
    """
    new = k if k is not None else v
    if new is None:
        return
    if rope is not None:
        rope.check(new)
    _append_of(store.layout, new.dtype, rope)(store, k, v, past_len, rope)


def flush(store: Store, length: int) -> None:
    """Quantize the pages that `length` stored tokens have made old enough, from the ring alone."""
    _append_of(store.layout, store.dtype, None)(store, None, None, length, None)


def attend(
    store: Store,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kv_len: int,
    rope: Rope | None = None,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """Return attention of q [B, H, S, Dk] over the first `kv_len` columns, left padding excluded.

    Args:
        store: The store.
        q: Queries of as many tokens as `reads_pages` allows.
        mask: Broadcasts to [B, H, S, at least kv_len]; bool (True is visible) or additive.
        causal: Query token s sees the tokens t <= s; only without a mask.
        scale: Factor of the scores.
        kv_len: Columns to look at, left padding included.
        rope: What q turns by on its way in, if it comes unrotated.
        variant: What it does beside scaling and masking.

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
    turns = None
    if rope is not None:
        rope.check(q)
        turns = rope.key
    _, heads, queries, _ = q.shape
    group = heads // store.num_kv_heads
    kind = _kind_of(queries)
    does: object = None if variant is PLAIN else variant.key
    if store.hidden:
        does = "slides", does
    key = (store.layout.symbol, q.dtype, group, rule, kind, store.compute, turns, does)
    launcher = _attends.get(key)
    if launcher is None:
        launcher = _attends[key] = _new_attend(store, q, mask, rope, variant, causal=causal)
    return launcher(store, q, mask, causal, scale, kv_len, rope, variant)


def reads_pages(store: Store, queries: int) -> bool:
    """Whether `attend` takes so many query tokens; if not, they attend to a dense copy."""
    is_gpu = store.layout.order == "gpu16"
    return queries <= (gpu_launch.MOST_QUERIES if is_gpu else MOST_QUERIES)


def gather(store: Store, role: Role, start: int, stop: int) -> torch.Tensor:
    """Return the tokens start..stop-1 of one role, dense [B, K, T, D]; left padding is zeros."""
    key = (store.layout.symbol, store.dtype)
    launcher = _gathers.get(key)
    if launcher is None:
        spec = _spec(store.layout, store.dtype, "gather")
        made = _made(spec, cpu_launch.gather_launcher, gpu_launch.gather_launcher)
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
    rope: Rope | None = None,
    of_attend: Mapping[str, Any] | None = None,
) -> KernelSpec | None:
    """Return the spec of the kernel for these tensors, or None after a remark.

    Args:
        layout: Layout of the records.
        dtype: Dtype of q or of new K and V.
        op: What it does.
        rope: What q or new K turns by on its way in.
        of_attend: The fields that only attend has.
    """
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
        **(of_attend or {}),
        rope=None if rope is None else rope.rotary,
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


def _kind_of(queries: int) -> Queries:
    if queries == 1:
        return "one"
    return "few" if queries <= MOST_QUERIES else "many"


def _append_of(layout: RecordLayout, dtype: torch.dtype, rope: Rope | None) -> Append:
    key = (layout.symbol, dtype, None if rope is None else rope.key)
    launcher = _appends.get(key)
    if launcher is None:
        spec = _spec(layout, dtype, "append", rope)
        made = _made(spec, cpu_launch.append_launcher, gpu_launch.append_launcher)
        launcher = _appends[key] = made or torch_path.append
    return launcher


def _new_attend(
    store: Store,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    rope: Rope | None,
    variant: Variant,
    *,
    causal: bool,
) -> Attend:
    """Choose how queries and masks of these dtypes are served, after checking what is fixed."""
    if q.shape[1] % store.num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not share {store.num_kv_heads} KV heads")
    if not reads_pages(store, q.shape[2]):
        raise ValueError(f"queries {tuple(q.shape)} do not fit attention over pages: too many")
    kind: MaskKind = "causal" if causal else "none"
    mask_dtype = None
    if mask is not None:
        kind = "bool" if mask.dtype is torch.bool else "additive"
        if kind == "additive":
            mask_dtype = q.dtype if mask.dtype == q.dtype else torch.float32
    sink_dtype = None
    if variant.sinks is not None:
        sink_dtype = q.dtype if variant.sinks.dtype == q.dtype else torch.float32
    fields = {
        "q_heads_per_kv_head": q.shape[1] // store.num_kv_heads,
        "mask": kind,
        "mask_dtype": None if mask_dtype is None else DTYPE_NAMES[mask_dtype],
        "queries": _kind_of(q.shape[2]),
        "compute": store.compute,
        "slides": store.hidden > 0,
        "softcap": variant.softcap,
        "sink_dtype": None if sink_dtype is None else DTYPE_NAMES[sink_dtype],
    }
    spec = _spec(store.layout, q.dtype, "attend", rope, fields)
    made = _made(
        spec,
        lambda kernel: cpu_launch.attend_launcher(kernel, mask_dtype, sink_dtype),
        lambda spec: gpu_launch.attend_launcher(spec, mask_dtype, sink_dtype),
    )
    return made or torch_path.attend
