"""Rows of several caches in one store, or a cache elsewhere: pages are shared, or copied."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.runtime import launch
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.registry import Half, Role
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


@dataclass(frozen=True)
class Rows:
    """Rows in pages.

    Attributes:
        store: The store.
        begin: Their first token, counted from the first one ever stored.
    """

    store: PagedStore
    begin: int

    @property
    def first(self) -> int:
        """The column of their first token."""
        return self.begin - self.store.origin


Part = Rows | torch.Tensor
"""Rows in pages, or dense rows [B, K, T, D]."""


def join(parts: Sequence[Part], role: Role, length: int) -> PagedStore | None:
    """Return a store with the rows of all parts, the same one for K and then for V.

    Dense rows have one role only: the other one is stored when it is joined in its turn, and
    pages are quantized then.

    Args:
        parts: At least one store; all of one dtype and device.
        role: The role that is joined.
        length: Tokens of each row.

    Returns:
        None if the parts cannot lie in one store.
    """
    paged = [part for part in parts if isinstance(part, Rows)]
    first, has_dense = paged[0].store, len(paged) < len(parts)
    if has_dense and first.capacity is not None:
        return None
    if not all(_goes_with(part, first, length) for part in paged):
        return None
    what = ("join", length, *map(_name, parts))
    at_least = 0 if has_dense else paged[0].first + length
    joined = first.derive(what, role, at_least, lambda: _joined(parts, first, role, length))
    if joined.role_length(role) < length:
        if joined.role_length(_other(role)) != length:  # somebody has gone on with it
            return _joined(parts, first, role, length)
        _add_role(joined, parts, role, length)
    return joined


def moved(store: PagedStore, arenas: Sequence[Arena]) -> PagedStore:
    """Return a store with the same tokens in some arenas, one for each of its page tables."""
    if arenas == [table.arena for table in page_tables(store)]:
        return store
    committed = store.fork()
    numbers = numbers_of(committed)
    image = describe(committed, numbers)
    return _placed_in(image, arenas, [number.content() for number in numbers], store)


def on_device(store: PagedStore, device: torch.device) -> PagedStore:
    """Return a store with the same tokens on another device, bit for bit.

    Records lie there as the kernels of the device read them. The layers of a cache, which move one
    by one, share arenas there if they do here.

    Raises:
        CacheFileError: The kernels of the device cannot read them.
    """
    committed = store.fork()
    numbers = numbers_of(committed)
    image = describe(committed, numbers)
    there = image.for_device(device)
    sizes = there.page_bytes
    arenas = [_twin(n.arena, device, size) for n, size in zip(numbers, sizes, strict=True)]
    content = [
        in_order(number.stacked(), layout, there.layout.order).to(device)
        for number, layout in zip(numbers, image.layouts, strict=True)
    ]
    return _placed_in(there, arenas, [list(pages) for pages in content], store)


def _placed_in(
    image: StoreImage,
    arenas: Sequence[Arena],
    content: Sequence[Sequence[torch.Tensor]],
    source: PagedStore,
) -> PagedStore:
    """Return a copy of a store that consists of these pages, copied to arenas."""
    angles = source.rotary_table
    angles = None if angles is None else angles.to(arenas[0].device)
    with placed(arenas, content) as pages:
        result = restore(image, arenas, pages, angles)
    result.materializations = source.materializations
    return result


_twins: weakref.WeakKeyDictionary[Arena, dict[object, weakref.ref[Arena]]] = (
    weakref.WeakKeyDictionary()
)


def _twin(arena: Arena, device: torch.device, page_bytes: int) -> Arena:
    """Return where the pages of an arena go on another device, the same one while it lives."""
    twins = _twins.setdefault(arena, {})
    ref = twins.get((device, page_bytes))
    found = None if ref is None else ref()
    if found is None:
        found = Arena(page_bytes, device)
        twins[device, page_bytes] = weakref.ref(found)
    return found


def _name(part: Part) -> tuple[object, ...]:
    if isinstance(part, torch.Tensor):
        return ("dense", len(part))
    return part.store.key, part.store.epoch, part.begin


def _goes_with(part: Rows, first: PagedStore, length: int) -> bool:
    store = part.store
    if (store.kind, store.capacity) != (first.kind, first.capacity):
        return False
    angles, expected = store.rotary_table, first.rotary_table
    if angles is not expected:
        # Equal layouts both have a table, or neither.
        assert angles is not None
        assert expected is not None
        if not torch.equal(angles, expected):
            return False
    lengths = store.k_len, store.v_len
    return (
        min(lengths) >= part.first + length
        if first.capacity is None
        else lengths == _lengths(first)
    )


def _other(role: Role) -> Half:
    return "v" if role == "k" else "k"


def _lengths(store: PagedStore) -> tuple[int, int]:
    return store.k_len, store.v_len


def _joined(parts: Sequence[Part], first: PagedStore, role: Role, length: int) -> PagedStore:
    sources: list[PagedStore] = []
    arenas = [table.arena for table in page_tables(first)]
    for part in parts:
        if isinstance(part, torch.Tensor):
            source = first.empty_like(len(part))
            if length:
                source.append(part if role == "k" else None, part if role == "v" else None, 0)
                source.commit(length, role)
        else:
            source = _as_they_are(part, length)
        sources.append(moved(source, arenas))
    joined = sources[0].joined(sources[1:])
    if any(isinstance(part, torch.Tensor) for part in parts):
        joined.truncate(0, _other(role))
    return joined


def _as_they_are(part: Rows, length: int) -> PagedStore:
    """Return a store of just these tokens, the first of them in column 0."""
    store = part.store
    if store.capacity is not None or (not part.first and max(_lengths(store)) <= length):
        return store
    fork = store.fork()
    fork.truncate(part.first + length)
    fork.look_from(part.begin)
    return fork


def _add_role(joined: PagedStore, parts: Sequence[Part], role: Role, length: int) -> None:
    """Store the dense rows of `role`; those of the other one are there, not quantized yet."""
    rows: list[tuple[PagedStore, int]] = []
    for part in parts:
        batch = part.store.batch if isinstance(part, Rows) else len(part)
        source = joined.select_rows(range(len(rows), len(rows) + batch))
        if isinstance(part, torch.Tensor):
            known = launch.gather(source, _other(role), 0, length)
            source = joined.empty_like(len(part))
            source.append(*((part, known) if role == "k" else (known, part)), 0)
            source.commit(length)
        rows += [(source, i) for i in range(source.batch)]
    origin = joined.origin
    joined.clear()
    joined.origin = origin
    joined.take_rows(rows, length, length)
