"""Dense tensors of handles: made for one operator, or kept once a handle is written or viewed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime import launch
from kvcompile.runtime.errors import StaleHandleError
from kvcompile.runtime.notices import tell_materialized
from kvcompile.runtime.registry import ROLES, Role, anchor_for, register

if TYPE_CHECKING:
    from kvcompile.runtime.handle import KVTensor
    from kvcompile.runtime.store import PagedStore


ASKED_FOR = frozenset(("materialize", "numpy", "tolist", "dlpack"))
"""Operators by which a user asks for a dense tensor in so many words."""


class Materializations(Counter[str]):
    """Operator name -> how often it needed the dense tensor."""

    def add(self, operator: str) -> None:
        """Count an operator for which a dense tensor is made and dropped; tell the first time."""
        self[operator] += 1
        if operator not in ASKED_FOR:
            tell_materialized(operator)


def dense_of(
    store: PagedStore, role: Role, length: int | None, begin: int | None = None
) -> torch.Tensor:
    """Return the dense tensor of one role; see `PagedStore.materialize`."""
    stored = store.role_length(role)
    cell = store.cells.get(role)
    if cell is not None and cell.dense is not None:
        return cell.dense.clone()
    if role == "kv":
        assert store.fused is not None
        parts = (dense_of(store, half, length, begin) for half in ROLES)
        return store.fused.join(*parts)
    if store.capacity is None:
        first = 0 if begin is None else begin - store.origin
        wanted = stored - first if length is None else length
        if first + wanted > stored:
            raise StaleHandleError(
                f"{wanted} tokens of {role.upper()} were asked for, but only {stored - first} are "
                "stored: the cache was truncated in the meantime; take a new handle from it"
            )
        if wanted:
            dense = launch.gather(store, role, first, first + wanted)
            return store.heads_first(dense).contiguous()
        return torch.empty(store.shape(role, 0), dtype=store.dtype, device=store.device)
    dense = torch.zeros(store.shape(role, stored), dtype=store.dtype, device=store.device)
    if stored:
        store.heads_first(dense)[:, :, :stored] = launch.gather(store, role, 0, stored)
    return dense


class DenseCell:
    """One piece of memory as the user sees it: handles that alias each other share one.

    A static store has one cell per role, because all its handles stand for one buffer. Handles
    of a growing store are values; they share a cell when one is a crop or an alias of another.
    As long as nothing needs an address, the cell is empty and its data is the store's.

    Attributes:
        role: K or V.
        key: Registry key, names this cell to graphs of other compilers.
        anchor: int64[1], the same.
        begin: The first token of the dense tensor.
    """

    begin: int = 0

    def __init__(self, store: PagedStore, role: Role) -> None:
        self._store = weakref.ref(store)
        # A static store owns its cells: a reference back would leave both to garbage collection.
        self._keep_alive = store if store.capacity is None else None
        self.role: Role = role
        self._dense: torch.Tensor | None = None
        self.key = register(self)
        self.anchor = anchor_for(self.key, role)
        self._version = 0
        self._written = False
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def dense(self) -> torch.Tensor | None:
        """[B, K, T, D] once a view or a write needed it, else None."""
        return self._dense

    @property
    def store(self) -> PagedStore:
        """The store whose tokens the cell stands for."""
        store = self._store()
        assert store is not None
        return store

    @property
    def is_written(self) -> bool:
        """Whether the dense tensor, or a view of it, was written."""
        if self.dense is None:
            return False
        if not self._written:
            self._written = self.dense._version != self._version or any(
                handle._version != version
                for ref, version in self._watched
                if (handle := ref()) is not None
            )
        return self._written

    @property
    def is_viewed(self) -> bool:
        """Whether somebody else holds the dense tensor's memory: a view of it."""
        if self.dense is None:
            return False
        storage = self.dense.untyped_storage()
        own = 2  # the dense tensor, and the Python object of the line above
        return torch._C._storage_Use_Count(storage._cdata) > own

    def mark_written(self) -> None:
        """Note a write, or that one could come unnoticed."""
        self._written = True

    def watch(self, handle: torch.Tensor) -> None:
        """Note that the dispatcher makes a view of the dense tensor for `handle`.

        PyTorch counts writes to such a view at the handle, or, in inference mode, nowhere.
        """
        if handle.is_inference() or torch.is_inference_mode_enabled():
            self.mark_written()
        else:
            self._watched.append((weakref.ref(handle), handle._version))

    @property
    def nbytes(self) -> int:
        """Bytes of anchor and dense tensor."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def turn_dense(self, operator: str) -> None:
        """Keep a dense tensor from now on, of all tokens that a living handle stands for."""
        # An inference tensor has no version counter, which is how writes are noticed.
        with torch.inference_mode(mode=False):
            self.store.materializations[operator] += 1
            begin, end = self.reach()
            dense = dense_of(self.store, self.role, end - begin, begin)
            self.fill(dense.clone() if dense.is_inference() else dense, begin)

    def fill(self, dense: torch.Tensor, begin: int = 0) -> None:
        """Keep a dense tensor from now on; it must not be an inference tensor."""
        self.begin = begin
        self._dense = dense
        self._version = dense._version

    def reach(self) -> tuple[int, int]:
        """Return the first token that a live handle of this memory has, and that behind the last.

        Of a static store all handles are the whole buffer.
        """
        handles = [h for h in self.store.live_handles() if h.present_cell() is self]
        first = min((h.begin for h in handles), default=0)
        return first, max((h.begin + h.tokens for h in handles), default=first)

    def materialize(
        self, role: Role, length: int, operator: str, begin: int | None = None
    ) -> torch.Tensor:
        """Return a copy of `length` tokens from `begin` on."""
        if self.dense is None:
            return self.store.materialize(role, length, operator, begin)
        self.store.materializations.add(operator)
        return self.part(begin or 0, length).clone()

    def part(self, begin: int, length: int) -> torch.Tensor:
        """Return `length` tokens of the dense tensor from `begin` on."""
        dense = self.dense
        assert dense is not None
        time = self.token_dim_of(self.role)
        if dense.shape[time] == length:
            return dense
        return dense.narrow(time, begin - self.first_token(), length)

    def first_token(self) -> int:
        """Return the first token of the dense tensor."""
        return self.begin

    def token_dim_of(self, role: Role) -> int:
        """Return the dimension of the dense tensor that counts tokens."""
        return self.store.token_dim_of(role)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor the cell owns."""
        return [self.anchor] if self._dense is None else [self.anchor, self._dense]

    def memory(self) -> list[DenseCell]:
        """Return the cells whose tensors this one keeps alive, itself first."""
        return [self]


class RowsCell(DenseCell):
    """Rows of the memory of another cell: a view, as PyTorch's slices are.

    Its store shares the pages of the whole, so that reading needs no dense tensor. A write turns
    the whole dense, and reaches it; what is written to the whole is seen here. So the handle that
    the rows were taken from has to live, as the base of a view does: while it stands for tokens,
    nobody overwrites them when a cache is cropped and goes on.
    """

    def __init__(
        self,
        store: PagedStore,
        role: Role,
        base: KVTensor,
        view: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Begin without a dense tensor.

        Args:
            store: The rows in pages.
            role: K or V.
            base: A handle of all rows; of a store that grows.
            view: Takes the rows from the dense tensor of the whole, without copying.
        """
        super().__init__(store, role)
        self._base = base
        self._whole = base.shared_cell()
        self._view = view

    @property
    def dense(self) -> torch.Tensor | None:
        """The rows of the dense tensor of the whole, if there is one."""
        whole = self._whole.dense
        return None if whole is None else self._view(whole)

    @property
    def is_written(self) -> bool:
        """Whether any part of the whole was written."""
        return self._whole.is_written

    def mark_written(self) -> None:
        """Note a write, or that one could come unnoticed."""
        self._whole.mark_written()

    def watch(self, handle: torch.Tensor) -> None:
        """Note that the dispatcher makes a view of the dense tensor for `handle`."""
        self._whole.watch(handle)

    def first_token(self) -> int:
        """Return the first token of the dense tensor of the whole."""
        return self._whole.first_token()

    def turn_dense(self, operator: str) -> None:
        """Turn the whole into a dense tensor."""
        self._whole.turn_dense(operator)

    def memory(self) -> list[DenseCell]:
        """Return the cells whose tensors this one keeps alive, itself first."""
        return [self, *self._whole.memory()]
