"""What a handle becomes when it is written, or when a view of it is taken: a dense tensor, kept."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.registry import Role, anchor_for, register

if TYPE_CHECKING:
    from kvcompile.runtime.store import PagedStore


class DenseCell:
    """One piece of memory as the user sees it: handles that alias each other share one.

    A static store has one cell per role, because all its handles stand for one buffer. Handles
    of a growing store are values; they share a cell when one is a crop or an alias of another.
    As long as nothing needs an address, the cell is empty and its data is the store's.

    Attributes:
        role: K or V.
        dense: [B, K, T, D] once a view or a write needed it, else None.
        anchor: int64[1], names this cell to graphs of other compilers.
    """

    def __init__(self, store: PagedStore, role: Role) -> None:
        self._store = weakref.ref(store)
        # A static store owns its cells: a reference back would leave both to garbage collection.
        self._keep_alive = store if store.capacity is None else None
        self.role: Role = role
        self.dense: torch.Tensor | None = None
        self.anchor = anchor_for(register(self), role)
        self._version = 0
        self._written = False
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []

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

    def fill(self, dense: torch.Tensor) -> torch.Tensor:
        """Keep `dense` from now on; it must not be an inference tensor."""
        self.dense = dense
        self._version = dense._version
        return dense

    def materialize(self, role: Role, length: int, operator: str) -> torch.Tensor:
        """Return a copy of the first `length` tokens."""
        if self.dense is None:
            return self.store.materialize(role, length, operator)
        self.store.materializations[operator] += 1
        return self.first(length).clone()

    def first(self, length: int) -> torch.Tensor:
        """Return the first `length` tokens of the dense tensor."""
        assert self.dense is not None
        if self.dense.shape[self.token_dim] == length:
            return self.dense
        return self.dense.narrow(self.token_dim, 0, length)

    @property
    def token_dim(self) -> int:
        """Dimension that counts tokens."""
        return self.store.token_dim

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor the cell owns."""
        return [self.anchor] if self.dense is None else [self.anchor, self.dense]
