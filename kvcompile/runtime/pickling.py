"""Handles in pickles and in files of `torch.save`: their stores, byte for byte.

K and V of a layer name one store, and the layers of a cache name arenas, so that what was shared
is shared again; pages that several rows share are written once. Importing this module, which
`kvcompile.runtime` does, lets `torch.load(weights_only=True)` make handles.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheFileError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.registry import Role
from kvcompile.runtime.store import PagedStore
from kvcompile.runtime.store_image import (
    StoreImage,
    describe,
    in_order,
    numbers_of,
    page_tables,
    placed,
    restore,
)


class LoadedArenas:
    """The arenas that the pages of one saved arena come to, by device."""

    def __init__(self) -> None:
        """Begin without any; a device is known once pages are loaded."""
        self._arenas: dict[tuple[int, torch.device], Arena] = {}

    def on(self, device: torch.device, page_bytes: int) -> Arena:
        """Return the arena on a device for pages of this size."""
        key = page_bytes, device
        if key not in self._arenas:
            self._arenas[key] = Arena(page_bytes, device)
        return self._arenas[key]


def rebuild_arenas() -> LoadedArenas:
    """Return what stands for a saved arena while stores are loaded."""
    return LoadedArenas()


def rebuild_store(
    fields: Mapping[str, Any],
    pages: Sequence[torch.Tensor],
    arenas: Sequence[LoadedArenas],
    rotary_table: torch.Tensor | None,
) -> PagedStore:
    """Return a saved store.

    Args:
        fields: What it is.
        pages: The bytes of the pages of each table, uint8[pages, page_bytes].
        arenas: Where they lay.
        rotary_table: The angles that K turns by, or None.

    Raises:
        CacheFileError: They do not go together.
    """
    saved = StoreImage.of_fields(fields)
    image = saved.for_device(pages[0].device)
    sizes = [(page.dtype, page.shape[1:]) for page in pages]
    if sizes != [(torch.uint8, (size,)) for size in saved.page_bytes] or len(arenas) != len(sizes):
        raise CacheFileError(f"the pages of a saved cache are not those of {saved.layout.symbol}")
    places = [
        arena.on(page.device, size)
        for arena, page, size in zip(arenas, pages, image.page_bytes, strict=True)
    ]
    content = [
        list(in_order(page, layout, image.layout.order))
        for page, layout in zip(pages, saved.layouts, strict=True)
    ]
    with placed(places, content) as ids:
        return restore(image, places, ids, rotary_table)


def rebuild_handle(store: object, role: Role, tokens: int, first: int = 0) -> KVTensor:
    """Return a saved handle of `tokens` tokens from column `first` of its store on.

    Raises:
        CacheFileError: Its store does not hold its tokens.
    """
    if not isinstance(store, PagedStore) or role not in store.anchors:
        raise CacheFileError("a saved KV handle names no store; the file is damaged or foreign")
    stored = range(-store.hidden, store.role_length(role))
    wanted = range(first, first + tokens)
    if store.capacity is None and not (
        tokens >= 0 and stored.start <= wanted.start and wanted.stop <= stored.stop
    ):
        raise CacheFileError(f"a saved KV handle has tokens in {wanted} and its store in {stored}")
    return KVTensor.of(store, role, tokens, store.origin + first)


def reduce_handle(handle: KVTensor) -> tuple[Any, ...]:
    """Return how to make a handle again that was not written."""
    return rebuild_handle, (handle.store, handle.role, handle.tokens, handle.first)


def _reduce_store(store: PagedStore) -> tuple[Any, ...]:
    committed = store.fork()
    numbers = numbers_of(committed)
    fields = describe(committed, numbers).as_fields()
    pages = [number.stacked() for number in numbers]
    arenas = [table.arena for table in page_tables(store)]
    return rebuild_store, (fields, pages, arenas, store.rotary_table)


def _send_handle(handle: KVTensor) -> tuple[Any, ...]:
    """Reduce a handle for another process; as bytes, because it is sent tensors as shared memory.

    That would have to outlive the copies made here, which nobody holds.
    """
    if handle.is_written or handle.store is None:
        return pickle.loads, (pickle.dumps(handle),)
    return reduce_handle(handle)


def _send_store(store: PagedStore) -> tuple[Any, ...]:
    _, (fields, pages, arenas, angles) = _reduce_store(store)
    return _receive_store, (pickle.dumps((fields, pages, angles)), arenas)


def _receive_store(sent: bytes, arenas: Sequence[LoadedArenas]) -> PagedStore:
    fields, pages, angles = pickle.loads(sent)
    return rebuild_store(fields, pages, arenas, angles)


def _reduce_arena(arena: Arena) -> tuple[Any, ...]:
    return rebuild_arenas, ()


for _store in (PagedStore, QuantizedStore):
    copyreg.pickle(_store, _reduce_store)
    ForkingPickler.register(_store, _send_store)
ForkingPickler.register(KVTensor, _send_handle)
copyreg.pickle(Arena, _reduce_arena)
torch.serialization.add_safe_globals([rebuild_arenas, rebuild_store, rebuild_handle])
