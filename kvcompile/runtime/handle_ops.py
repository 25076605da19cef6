"""What operators do with handles: a few work on pages, all others on the dense tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch.utils import _pytree as pytree

from kvcompile.passes.ir.remarks import Remark, emit
from kvcompile.runtime.claim import writable_store
from kvcompile.runtime.errors import HandleWriteError
from kvcompile.runtime.exits import PythonExits

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from kvcompile.runtime.handle import KVTensor
    from kvcompile.runtime.store import PagedStore

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


def is_handle(value: Any) -> TypeGuard[KVTensor]:
    """Whether `value` is a handle."""
    return isinstance(value, PythonExits)


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
    """Crop: only for callers in C++, whose result is an autograd view of the handle."""
    if handle.store is None or handle.store.capacity is not None:
        return NotImplemented
    begin, stop, stride = slice(start, end, step).indices(handle.shape[dim])
    if dim % handle.ndim != handle.token_dim or begin or stride != 1:
        return NotImplemented
    return handle.alias(stop)


def _index_select(handle: KVTensor, dim: int, index: torch.Tensor) -> Any:
    return _select_rows(handle, index) if dim % handle.ndim == 0 else NotImplemented


def _index(handle: KVTensor, indices: Sequence[torch.Tensor | None]) -> Any:
    first = indices[0] if is_handle(handle) else None
    if first is None or any(index is not None for index in indices[1:]):
        return NotImplemented
    if first.dtype == torch.bool:
        first = first.nonzero()[:, 0] if first.ndim == 1 else None
    return NotImplemented if first is None or first.ndim != 1 else _select_rows(handle, first)


def _select_rows(handle: KVTensor, index: torch.Tensor) -> Any:
    """Beam reordering: the same pages under another block table."""
    store = handle.store
    if store is None or handle.is_written or index.ndim != 1:
        return NotImplemented
    rows = [row + store.batch if row < 0 else row for row in index.tolist()]
    if any(not 0 <= row < store.batch for row in rows):
        return NotImplemented  # the dense operator raises PyTorch's own error
    chosen = store.derive(("rows", *rows), handle.role, lambda: store.select_rows(rows))
    return handle.of(chosen, handle.role, handle.length)


def _clone(handle: KVTensor, *, memory_format: torch.memory_format | None = None) -> Any:
    store = handle.store
    if store is None or handle.is_written:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    if store.capacity is None:
        return handle.of(store, handle.role, handle.length)
    return handle.of(store.derive("fork", handle.role, store.fork), handle.role)


def _to_copy(handle: KVTensor, **options: Any) -> Any:
    kept = {"dtype": handle.dtype, "device": handle.device, "layout": torch.strided}
    for name, value in options.items():
        if name != "non_blocking" and value not in (None, False, kept.get(name)):
            return NotImplemented
    return _clone(handle)


def _zero_(handle: KVTensor) -> Any:
    """Reset of a static buffer: nothing is stored any more, and what is not stored is zero."""
    store = handle.store
    if store is None or store.capacity is None or handle.role in store.cells:
        return NotImplemented
    store.truncate(0, handle.role)
    return handle


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    if dim in (0, -4) and all(is_handle(tensor) for tensor in tensors):
        return _join_rows(tensors)
    past = tensors[0]
    if len(tensors) != 2 or not is_handle(past) or past.store is None:
        return NotImplemented
    return _append_eagerly(past, tensors[1]) if dim % 4 == past.token_dim else NotImplemented


def _join_rows(handles: Sequence[Any]) -> Any:
    stores: list[PagedStore | None] = [handle.store for handle in handles]
    first = stores[0]
    if first is None or any(
        store is None
        or handle.is_written
        or store.capacity != first.capacity
        or (store.arena, store.layout, store.dtype, store.token_dim)
        != (first.arena, first.layout, first.dtype, first.token_dim)
        or store.rotary_table is not first.rotary_table
        or handle.length != store.k_len
        or (store.k_len, store.v_len) != (first.k_len, first.v_len)
        for handle, store in zip(handles, stores, strict=True)
    ):
        return NotImplemented
    others = [store for store in stores[1:] if store is not None]
    what = ("join", *(store.key for store in others))
    joined = first.derive(what, handles[0].role, lambda: first.joined(others))
    return handles[0].of(joined, handles[0].role)


def _append_eagerly(past: KVTensor, new: torch.Tensor) -> Any:
    """Append K or V in a model that runs without a compiled graph."""
    store = past.store
    if store is None or store.capacity is not None or past.is_written or is_handle(new):
        return NotImplemented
    time = store.token_dim
    rest = [size for dim, size in enumerate(past.shape) if dim != time]
    fits = new.ndim == len(past.shape) and rest == [n for d, n in enumerate(new.shape) if d != time]
    if not fits or new.dtype != past.dtype or new.device != past.device or new.requires_grad:
        return NotImplemented
    length, end = past.length, past.length + new.shape[time]
    target = writable_store(past)
    dense = store.heads_first(new.detach())
    target.append(dense if past.role == "k" else None, dense if past.role == "v" else None, length)
    target.commit(end, past.role)
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
    return past.of(target, past.role, end)


NATIVE: dict[OpOverload, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.slice.Tensor: _slice,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.zero_.default: _zero_,
    aten.cat.default: _cat,
}
