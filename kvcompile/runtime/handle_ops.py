"""What operators do with handles: a few work on pages, all others on the dense tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils import _pytree as pytree

from kvcompile.passes.ir.remarks import Remark, emit
from kvcompile.runtime.claim import show_from, writable_store
from kvcompile.runtime.errors import CacheFileError, HandleWriteError
from kvcompile.runtime.exits import is_handle
from kvcompile.runtime.joining import on_device
from kvcompile.runtime.row_ops import index, index_select, join_rows, repeat
from kvcompile.runtime.targets import gpu_devices

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from kvcompile.runtime.handle import KVTensor

aten = torch.ops.aten
Access = Literal["read", "view", "write"]


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator some of whose arguments are handles."""
    native = NATIVE.get(func)
    if native is not None:
        result = native(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _on_dense(func, args, kwargs)


@functools.cache
def _accesses(func: OpOverload) -> tuple[tuple[str, Access], ...]:
    """Return, for each argument in the order of the schema, what the operator does to it."""

    def access(argument: torch.Argument) -> Access:
        if argument.alias_info is None:
            return "read"
        return "write" if argument.alias_info.is_write else "view"

    return tuple((argument.name, access(argument)) for argument in func._schema.arguments)


def _on_dense(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on dense tensors; whatever it can write or alias, the handle keeps."""
    name = str(func.overloadpacket)
    if torch.Tag.inplace_view in func.tags:
        raise HandleWriteError(
            f"{name} changes shape or storage of a KV handle in place, which a handle cannot do; "
            "use the operator that returns a new tensor, or handle.materialize()"
        )
    written: list[tuple[torch.Tensor, KVTensor]] = []

    def dense_of(value: Any, access: Access) -> Any:
        if not is_handle(value):
            return value
        if access == "read":
            return value.read(name)
        dense = value.expose(name, is_write=access == "write")
        if access == "write":
            written.append((dense, value))
        return dense

    accesses = _accesses(func)
    by_name = dict(accesses)
    dense_args = [
        pytree.tree_map(functools.partial(dense_of, access=access), value)
        for value, (_, access) in zip(args, accesses, strict=False)
    ]
    dense_kwargs = {
        key: pytree.tree_map(functools.partial(dense_of, access=by_name[key]), value)
        for key, value in kwargs.items()
    }
    result = func(*dense_args, **dense_kwargs)
    for dense, handle in written:
        if result is dense:
            return handle
    return result


def _alias(handle: KVTensor) -> Any:
    if handle.store is not None:
        return handle.alias()
    anchors = {"anchor": aten.detach.default(handle.anchor)}
    _, context = handle.__tensor_flatten__()
    return handle.__tensor_unflatten__(anchors, context, handle.shape, handle.stride())


def _slice(
    handle: KVTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """Crop or slice rows: for callers in C++, whose result is an autograd view of the handle."""
    if handle.store is None or handle.store.capacity is not None:
        return NotImplemented
    part = range(handle.shape[dim])[slice(start, end, step)]
    if handle.from_front(dim) == handle.batch_dim and part:
        return handle.rows(part)
    if handle.from_front(dim) != handle.token_dim or part.step != 1:
        return NotImplemented
    return handle.alias(part)


def _split(handle: KVTensor, size: Any, dim: int = 0) -> Any:
    """Split rows, or tokens into one that begins at token 0 and others: for callers in C++."""
    if handle.store is None or handle.store.capacity is not None:
        return NotImplemented
    is_native = handle.from_front(dim) in (handle.batch_dim, handle.parts_dim)
    return list(handle.split(size, dim)) if is_native else NotImplemented


def _expand(handle: KVTensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    """Show the only row several times: for callers in C++."""
    if handle.store is None or handle.store.capacity is not None or len(size) != handle.ndim:
        return NotImplemented
    batch = handle.batch_dim
    rest = [d for d in range(handle.ndim) if d != batch and size[d] not in (-1, handle.shape[d])]
    if rest or handle.shape[batch] != 1 or size[batch] < 1:
        return NotImplemented
    return handle.repeated(size[batch])


def _clone(handle: KVTensor, *, memory_format: torch.memory_format | None = None) -> Any:
    store = handle.store
    if store is None or handle.is_written:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    if store.capacity is None:
        return handle.of(store, handle.role, handle.length, handle.begin)
    return handle.of(store.derive("fork", handle.role, 0, store.fork), handle.role)


def _to_copy(handle: KVTensor, *, device: torch.device | None = None, **options: Any) -> Any:
    kept = {"dtype": handle.dtype, "layout": torch.strided}
    for name, value in options.items():
        if name != "non_blocking" and value not in (None, False, kept.get(name)):
            return NotImplemented
    return _clone(handle) if device in (None, handle.device) else moved_to(handle, device)


def moved_to(handle: KVTensor, device: torch.device) -> Any:
    """Return a handle of the same tokens on another device, if caches have kernels there."""
    store = handle.store
    if store is None or handle.is_written or device.type not in ("cpu", *gpu_devices()):
        return NotImplemented
    if device.type != "cpu" and device.index is None:
        device = torch.empty(0, device=device).device
    length = handle.end if store.capacity is None else 0
    try:
        there = store.derive(("to", device), handle.role, length, lambda: on_device(store, device))
    except CacheFileError:
        return NotImplemented
    return handle.of(there, handle.role, handle.length, handle.begin)


def _zero_(handle: KVTensor) -> Any:
    """Reset of a static buffer: nothing is stored any more, and what is not stored is zero."""
    store = handle.store
    if store is None or store.capacity is None or handle.role in store.cells:
        return NotImplemented
    store.truncate(0, handle.role)
    return handle


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    # PyTorch lets an empty tensor of one dimension stand anywhere; caches begin with one.
    tensors = [tensor for tensor in tensors if tensor.ndim != 1 or tensor.shape[0]]
    past = tensors[0]
    if len(tensors) == 1 and is_handle(past) and -past.ndim <= dim < past.ndim:
        return _clone(past)
    known = next(t for t in tensors if is_handle(t))
    if known.store is not None and known.from_front(dim) == known.batch_dim:
        return join_rows(tensors)
    if len(tensors) != 2 or not is_handle(past) or past.store is None:
        return NotImplemented
    is_native = past.from_front(dim) == past.token_dim
    return _append_eagerly(past, tensors[1]) if is_native else NotImplemented


def _append_eagerly(past: KVTensor, new: torch.Tensor) -> Any:
    """Append K or V in a model that runs without a compiled graph."""
    store = past.store
    if store is None or store.capacity is not None or past.is_written or is_handle(new):
        return NotImplemented
    time = past.token_dim
    rest = [size for dim, size in enumerate(past.shape) if dim != time]
    fits = new.ndim == len(past.shape) and rest == [n for d, n in enumerate(new.shape) if d != time]
    if not fits or new.dtype != past.dtype or new.device != past.device or new.requires_grad:
        return NotImplemented
    target = writable_store(past)
    show_from(target, past.begin)
    length, new_len = past.length, new.shape[time]
    new = new.detach()
    both = store.parts_of(new) if past.role == "kv" else (new, new)
    k, v = (store.heads_first(part) for part in both)
    target.append(None if past.role == "v" else k, None if past.role == "k" else v, length)
    target.commit(length + new_len, past.role)
    emit(
        Remark(
            kind="note",
            code="KVC502",
            origin="eager-append",
            site="",
            where="",
            reason="the model appended to its cache outside a compiled graph; the cache stays in "
            "pages, but attention reads a dense copy of it at every step",
            hint='look for graph breaks or recompilations: TORCH_LOGS="graph_breaks,recompiles"',
        ),
        once="eager-append",
    )
    return past.of(target, past.role, length + new_len, past.begin)


NATIVE: dict[OpOverload, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.expand.default: _expand,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten.repeat.default: repeat,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.zero_.default: _zero_,
    aten.cat.default: _cat,
}
