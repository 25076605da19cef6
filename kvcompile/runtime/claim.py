"""Who may append, who may read: a past used twice is truncated or forked, never overwritten."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.errors import (
    CacheBudgetError,
    CacheGapError,
    CacheInUseError,
    StaleHandleError,
)
from kvcompile.runtime.notices import tell_stale_view
from kvcompile.runtime.registry import Role, living
from kvcompile.runtime.store import PagedStore

if TYPE_CHECKING:
    from kvcompile.runtime.budget import Budget
    from kvcompile.runtime.handle import KVTensor


def claim(k: KVTensor, v: KVTensor) -> PagedStore:
    """Return the store to append to so that the two handles are its past.

    In place if the store ends where the handles end. If it is longer: truncated when no live
    handle needs the rest, else forked. If a handle was written, or K and V have drifted into
    different stores, their dense values are stored anew. A store that another step has claimed
    and not yet committed, or is reading, is forked.

    Raises:
        StaleHandleError: A handle belongs to a compiler's trace and has no store.
        CacheGapError: K and V have different lengths.
        CacheInUseError: Another step has claimed the static store, or is reading it.
    """
    store = k.store
    roles = k.role == "k" and v.role == "v"
    begin, length = k.begin, k.tokens
    whole = store is not None and store is v.store and k.cell is None and v.cell is None
    if store is not None and whole and roles and not (store.claimed or store.readers):
        if store.capacity is not None:
            if not store.cells:
                return store
        elif (begin, length) == (v.begin, v.tokens) and (
            begin + length - store.origin == store.k_len == store.v_len
        ):
            return store
    return _claim_slowly(k, v)


def show_from(store: PagedStore, begin: int) -> None:
    """Let column 0 of a store be the token `begin`, and give back pages that no handle needs.

    The store must be the caller's: what `claim` or `writable_store` returned.
    """
    store.look_from(begin)
    if store.hidden < store.page_size:
        return
    needed = _first_needed(store, begin)
    if needed < begin and _leftovers.is_set():
        # What Dynamo leaves of a compilation holds handles in reference cycles.
        _leftovers.clear()
        gc.collect()
        needed = _first_needed(store, begin)
    store.drop_before(needed - begin)


def _first_needed(store: PagedStore, begin: int) -> int:
    """Return the first token that a handle stands for, at most `begin`."""
    return min([begin, *(handle.begin for handle in store.live_handles())])


_leftovers = threading.Event()


def expect_leftovers() -> None:
    """Note that a graph was compiled: handles of its examples may be garbage for a long time."""
    _leftovers.set()


def lend(k: KVTensor, v: KVTensor) -> PagedStore:
    """Return a store of the tokens that the two handles stand for, to be read and nothing else.

    Their own store, if it holds just these tokens; any number of steps may read it. Otherwise a
    fork, or a store of their dense values, which is gone with the step.

    Raises:
        StaleHandleError: A handle belongs to a compiler's trace and has no store.
        CacheGapError: K and V have different lengths.
        CacheInUseError: Another step is writing to the static store.
    """
    store = _store_of(k)
    _check_lengths(k, v)
    if _is_stored_otherwise(k, v):
        return _store_anew(k, v, in_place=False)
    is_static = store.capacity is not None
    if is_static and store.claimed:
        raise CacheInUseError(_IN_USE)
    if store.claimed or not (is_static or (not k.first and k.end == store.k_len == store.v_len)):
        end, store = k.end, store.fork()
        store.truncate(end)
        store.look_from(k.begin)
    return store


def writable_store(past: KVTensor) -> PagedStore:
    """Return the store that ends, in what the handle shows of it, where the handle ends.

    One that a step of another thread is appending to or reading is forked.
    """
    store, role = _store_of(past), past.role
    length = past.end
    is_in_use = store.claimed or store.readers > 0
    ends = [store.k_len, store.v_len] if role == "kv" else [store.role_length(role)]
    if all(end == length for end in ends) and not is_in_use:
        return store
    # A quantized page holds both: whoever cuts it for K has cut it for V. So does whoever cuts
    # inside left padding, which new tokens take the place of.
    cuts_padding = any(start > length for start in store.start_list())
    is_apart = role != "kv" and store.layout.window is None
    cut = role if is_apart and not cuts_padding else None
    if not (is_in_use or _needed_beyond(store, length, (past,), cut)):
        store.truncate(length, cut)
        return store
    # K and V come one after the other: V goes where K has just gone.
    fork = store.derive(("append", length), role, length, store.fork)
    length += store.origin - fork.origin
    if fork.role_length(role) > length:
        fork.truncate(length, cut)
    return fork


def drop_cropped(budget: Budget) -> None:
    """Give back pages of tokens that no handle stands for any more, as the next claim would.

    Stores that a step has claimed or reads are left; nobody else may be claiming meanwhile.
    """
    for store in living():
        if not isinstance(store, PagedStore) or store.arena.budget is not budget:
            continue
        if store.claimed or store.readers:
            continue
        # Eager code that has appended K and not yet V has no handle of it yet.
        grows = store.capacity is None and store.k_len == store.v_len
        reach = [handle.end for handle in store.live_handles()] if grows else []
        if reach and store.length > max(reach):
            with contextlib.suppress(CacheBudgetError):  # a cut page becomes a longer ring
                store.truncate(max(reach))


def _claim_slowly(k: KVTensor, v: KVTensor) -> PagedStore:
    store = _store_of(k)
    _check_lengths(k, v)
    if store.capacity is not None and (store.claimed or store.readers):
        raise CacheInUseError(_IN_USE)
    if _is_stored_otherwise(k, v):
        return _store_anew(k, v, in_place=store.capacity is not None)
    if store.capacity is not None:
        if v.store is not store:
            v.rebind(store)
        # Unwritten copies made for views go stale with the next append.
        if any(cell.is_viewed for cell in store.cells.values()):
            tell_stale_view()
        store.cells.clear()
        return store
    length = k.end
    longer = max(store.k_len, store.v_len) > length
    if store.claimed or store.readers or (longer and _needed_beyond(store, length, (k, v))):
        # Another step is under way from the same past, or somebody needs the rest.
        store = store.fork()
    if longer:
        store.truncate(length)
    return store


_IN_USE = (
    "a static cache was given to two steps at once, or twice to one step; its buffer can take the "
    "tokens of one step only: copy the cache first"
)


def _check_lengths(k: KVTensor, v: KVTensor) -> None:
    if k.length != v.length and _store_of(k).capacity is None:
        raise CacheGapError(
            f"K has {k.length} past tokens and V has {v.length}; crop both to the same length"
        )


def _is_stored_otherwise(k: KVTensor, v: KVTensor) -> bool:
    """Whether no store holds the values of both handles as its K and its V."""
    store, other = _store_of(k), _store_of(v)
    swapped = k.role != "k" or v.role != "v"
    drifted = store is not other and not store.same_tokens(other)
    apart = k.first != v.first
    return swapped or drifted or apart or k.is_written or v.is_written


def _store_of(handle: KVTensor) -> PagedStore:
    if handle.store is None:
        raise StaleHandleError(
            "a KV handle of a compiler's trace has no store; pass the handle of a real cache"
        )
    return handle.store


def _needed_beyond(
    store: PagedStore, length: int, users: tuple[KVTensor, ...], role: Role | None = None
) -> bool:
    """Whether a live handle other than `users` stands for tokens from `length` on."""
    return any(
        handle.end > length and (role in (None, handle.role) or handle.role == "kv")
        for handle in store.live_handles()
        if not any(handle is user for user in users)
    )


def _store_anew(k: KVTensor, v: KVTensor, *, in_place: bool) -> PagedStore:
    """Store the dense values of both handles in a fresh store, or in place if static."""
    dense_k, dense_v = k.read("store anew"), v.read("store anew")
    store = _store_of(k)
    anew = store.empty_like()
    if store.capacity is None:
        append_dense(anew, dense_k, dense_v, k.length)
        return anew
    length = max(store.length, filled(store, dense_k, dense_v))
    append_dense(anew, dense_k, dense_v, length)
    if not in_place:
        return anew
    # Other handles stand for the same buffer: it takes the pages, now that all of them are there.
    store.truncate(0)
    store.cells.clear()
    store.take_rows([(anew, row) for row in range(store.batch)], length, length)
    if v.store is not store:
        v.rebind(store)
    return store


def append_dense(store: PagedStore, k: torch.Tensor, v: torch.Tensor, length: int) -> None:
    """Store the first `length` tokens of a dense K and V, laid out like the store's handles."""
    if length:
        new_k, new_v = (store.heads_first(dense)[:, :, :length] for dense in (k, v))
        store.append(new_k, new_v, 0)
        store.commit(length)


def filled(store: PagedStore, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the tokens of a dense K and V up to the last one that is not all zeros.

    Zeros at the end are what a static store shows for tokens that it does not hold.
    """
    return max(_last_nonzero(store.heads_first(dense)) for dense in (k, v))


def _last_nonzero(dense: torch.Tensor) -> int:
    """Return the tokens of [B, K, T, D] up to the last one that is not all zeros."""
    used = (dense != 0).any(dim=3).any(dim=1).any(dim=0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
