"""Buffers of a module that are to move into pages: handles at once, pages when a graph is known.

Which buffers are K and V, which of them belong together and how they are stored is known only once
a graph is compiled. Until then a handle stands for the very tensor that the module had, so that
whatever reads or writes it goes on as before; and a compiler sees a handle from the first trace on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from kvcompile.codegen.layout import RecordLayout
from kvcompile.passes.plan_formats import EXACT_FORMATS, EXACT_PAGE_SIZE
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.dense import DenseCell
from kvcompile.runtime.errors import CacheKindError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.notices import tell_still_held
from kvcompile.runtime.registry import ROLES, Role
from kvcompile.runtime.store import PagedStore


class UnplannedStore(PagedStore):
    """Stands for one dense buffer until a graph says how it is stored; holds no pages."""

    def __init__(self, dense: torch.Tensor) -> None:
        """Take over a tensor of four dimensions; which of them counts tokens is not known yet."""
        rows, second, third, dim = dense.shape
        name = EXACT_FORMATS[dense.dtype]
        layout = RecordLayout(name, name, dim, dim, EXACT_PAGE_SIZE)
        arena = Arena(layout.page_bytes(second), dense.device)
        super().__init__(
            layout, second, dense.dtype, dense.device, arena, batch=rows, capacity=third
        )
        self.kind = ("unplanned",)  # of no graph
        cell = self.cells["k"] = DenseCell(self, "k")
        cell.fill(dense)
        cell.mark_written()  # the tensor is right, whatever happens to it


def adopted(dense: torch.Tensor) -> KVTensor:
    """Return a handle that stands for a dense buffer; the buffer must not be used besides it."""
    return KVTensor.of(UnplannedStore(dense), "k")


class Moves:
    """Handles of static buffers that move to other stores, all of them or none."""

    def __init__(self) -> None:
        self._moves: list[tuple[KVTensor, PagedStore, Role]] = []

    def add(self, handles: Sequence[KVTensor], store: PagedStore) -> None:
        """Note that the handles of K and V move to a store with their values.

        Raises:
            CacheKindError: One of them has tokens in pages of another kind.
        """
        for handle, role in zip(handles, ROLES, strict=True):
            old = handle.store
            if old is None or not (_is_free(old) or old.kind == store.kind):
                raise CacheKindError(
                    f"{handle!r} was given where the graph writes into a static buffer of another "
                    "kind; give it the cache that this model's own prefill has made, or zero_() "
                    "its K and V if other options are to apply from now on"
                )
            self._moves.append((handle, store, role))

    def make(self) -> None:
        """Let every handle of the buffers stand for its new store; dense memory is released."""
        released: list[weakref.ref[torch.Tensor]] = []
        for handle, store, role in self._moves:
            old = handle.store
            assert old is not None
            cell = old.cells.pop(handle.role, None)
            if cell is not None and cell.dense is not None:
                released.append(weakref.ref(cell.dense))
            del cell
            for alias in [h for h in old.live_handles() if h.role == handle.role]:
                alias.rebind(store, role)
        if any(dense() is not None for dense in released):
            tell_still_held()


def _is_free(store: PagedStore) -> bool:
    """Whether nothing of a static buffer is in pages."""
    return store.capacity is not None and not (store.k_len or store.v_len)
