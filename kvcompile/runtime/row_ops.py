"""Operators on the rows of handles: selecting, repeating and joining them on pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcompile.runtime.exits import is_handle
from kvcompile.runtime.joining import Part, Rows, join

if TYPE_CHECKING:
    from kvcompile.runtime.handle import KVTensor


def index_select(handle: KVTensor, dim: int, index: torch.Tensor) -> Any:
    """Select rows by number."""
    if handle.store is None or handle.from_front(dim) != handle.batch_dim or index.ndim != 1:
        return NotImplemented
    # Where PyTorch raises, the dense operator raises its own error.
    if index.dtype not in (torch.int32, torch.int64) or bool((index < 0).any()):
        return NotImplemented
    return _select_rows(handle, index.tolist())


def index(handle: KVTensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Select rows by number or by a mask."""
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    if not is_handle(handle) or handle.store is None or len(given) != 1:
        return NotImplemented
    (dim, first), batch = given[0], handle.batch_dim
    if dim != batch or first.ndim != 1:
        return NotImplemented
    if first.dtype in (torch.bool, torch.uint8):  # bytes are a mask too, with a warning
        if len(first) != handle.shape[batch]:
            return NotImplemented  # the dense operator raises PyTorch's own error
        first = first.nonzero()[:, 0]
    if first.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return _select_rows(handle, first.tolist())


def repeat(handle: KVTensor, repeats: Sequence[int]) -> Any:
    """Repeat all rows, one after the other."""
    if (
        handle.store is None
        or len(repeats) != handle.ndim
        or any(count != 1 for dim, count in enumerate(repeats) if dim != handle.batch_dim)
    ):
        return NotImplemented
    batch = handle.batch_dim
    return _select_rows(handle, [*range(handle.shape[batch])] * repeats[batch])


def _select_rows(handle: KVTensor, index: list[int]) -> Any:
    """Beam reordering: the same pages under another block table."""
    store = handle.store
    if store is None or handle.is_written:
        return NotImplemented
    rows = [row + store.batch if row < 0 else row for row in index]
    if any(not 0 <= row < store.batch for row in rows):
        return NotImplemented  # the dense operator raises PyTorch's own error
    chosen = store.derive(("rows", *rows), handle.role, handle.end, lambda: store.select_rows(rows))
    return handle.of(chosen, handle.role, handle.length, handle.begin)


def join_rows(tensors: Sequence[torch.Tensor]) -> Any:
    """Put rows of several caches behind one another: `cat` along the batch.

    Caches of another arena are copied page by page into that of the first one; a dense tensor is
    stored there. All have the same shape but for the rows; else PyTorch's own error is due.
    """
    first = next(tensor for tensor in tensors if is_handle(tensor))
    if first.store is None or any(t.requires_grad for t in tensors):
        return NotImplemented
    batch = first.batch_dim

    def kind(tensor: torch.Tensor) -> tuple[object, ...]:
        rest = [size for dim, size in enumerate(tensor.shape) if dim != batch]
        return rest, tensor.dtype, tensor.device

    if any(kind(tensor) != kind(first) for tensor in tensors):
        return NotImplemented
    role, token_dim = first.role, first.store.token_dim
    parts: list[Part] = []
    for tensor in tensors:
        if not is_handle(tensor):
            if role == "kv":
                return NotImplemented
            parts.append(tensor.detach().transpose(1, 2) if token_dim == 1 else tensor.detach())
        elif tensor.store is None or tensor.is_written or not _show_the_same(tensor, first):
            return NotImplemented
        else:
            parts.append(Rows(tensor.store, tensor.begin))
    joined = join(parts, role, first.length)
    return NotImplemented if joined is None else first.of(joined, role, first.length)


def _show_the_same(handle: KVTensor, other: KVTensor) -> bool:
    """Whether two handles are both K, both V, or both K and V that lie alike in one tensor."""
    stores = handle.store, other.store
    layouts = [None if store is None else store.fused for store in stores]
    return handle.role == other.role and (handle.role != "kv" or layouts[0] == layouts[1])
