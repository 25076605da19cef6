"""Pages: one arena hands out fixed-size pages from slabs that never move.

Slabs are ordinary torch storages, so that the profiler sees every stored byte. A page id is
`slab << shift | page in slab`; kernels turn it into an address through the slab table.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.errors import CacheBudgetError

if TYPE_CHECKING:
    from kvcompile.runtime.budget import Budget

SMALLEST_SLAB_BYTES = 64 << 10
LARGEST_SLAB_BYTES = 32 << 20
GROWTH = 64
"""A slab beyond what was expected is this part of what is there, so that little of it is unused."""
HUGE_PAGE_BYTES = 2 << 20
POISON = 0xFF  # every format reads 0xFF.. as NaN or as its largest code


class Arena:
    """Reference-counted pages of one size, shared by all layers of a cache.

    Attributes:
        page_bytes: Bytes of one page.
        device: Where the slabs live.
        allocated_bytes: Bytes of all slabs.
        budget: What limits the slabs of this arena and others, or None.
        slab_table: int64[capacity], addresses of the slabs; see `table_address`.
    """

    def __init__(
        self,
        page_bytes: int,
        device: torch.device | str = "cpu",
        slab_bytes: int | None = None,
        *,
        stores: int = 1,
        budget: Budget | None = None,
    ) -> None:
        """Make an empty arena.

        Args:
            page_bytes: Bytes of one page.
            device: Where the slabs live.
            slab_bytes: Bytes of every slab, rounded down to a power-of-two number of pages. By
                default the first slabs, of at most 32 MiB, hold exactly what the first
                reservation takes, made by each of the stores; later ones a 64th of what is there.
            stores: Stores (layers) that will make reservations like the first one.
            budget: What limits the slabs of this arena and others.
        """
        self.page_bytes = page_bytes
        self.device = torch.device(device)
        self._slab_bytes = slab_bytes
        self._stores = stores
        self._shift: int | None = None
        self._slabs: dict[int, torch.Tensor] = {}
        self.allocated_bytes = 0
        with torch.inference_mode(mode=False):  # tables and slabs are written to outside of it, too
            self.slab_table = torch.zeros(64, dtype=torch.int64)
        # States made before the table grew still point to the older, shorter tables.
        self._outgrown_tables: list[torch.Tensor] = []
        self._counts: dict[int, int] = {}
        self._expected = 0
        self._free: list[int] = []
        # Pages come back from finalizers, which run at any bytecode, even inside `allocate`:
        # they only append here, and whoever holds the lock next takes them in.
        self._returned: deque[Sequence[int]] = deque()
        self.budget = budget
        self._lock = threading.Lock() if budget is None else budget.lock
        self._poison = os.environ.get("KVCOMPILE_POISON") == "1"

    @property
    def shift(self) -> int:
        """log2 of the most pages of a slab; 0 before the first allocation."""
        return self._shift or 0

    @property
    def table_address(self) -> int:
        """Address of the slab table; changes when the table grows."""
        return self.slab_table.data_ptr()

    @property
    def used_pages(self) -> int:
        """Pages that somebody holds."""
        with self._lock:
            self._take_in()
            return len(self._counts) - len(self._free)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor the arena owns: slabs first, then slab tables."""
        return [*self._slabs.values(), self.slab_table, *self._outgrown_tables]

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one reference each; their content is undefined.

        All or nothing: if memory runs out, no page is taken and no slab is added.

        Raises:
            CacheBudgetError: The slabs that are missing exceed the budget.
        """
        with self._lock:
            self._take_in()
            if len(self._free) < count:
                self._grow_within_budget(count)
            pages = self._free[-count:][::-1] if count else []
            del self._free[len(self._free) - count :]
            for page in pages:
                self._counts[page] = 1
            return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page."""
        with self._lock:
            for page in pages:
                self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; a page without references is free again.

        Safe inside finalizers and garbage collection. The pages may be taken in only at the
        next allocation.
        """
        self._returned.append(pages)
        if self._lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._lock.release()

    def references(self, page: int) -> int:
        """Return how many references a page has."""
        if self._returned:
            with self._lock:
                self._take_in()
        return self._counts[page]

    def page(self, page: int) -> torch.Tensor:
        """Return the bytes of a page, uint8[page_bytes], as a view."""
        start = (page & ((1 << self.shift) - 1)) * self.page_bytes
        return self._slabs[page >> self.shift][start : start + self.page_bytes]

    def copy_page(self, page: int) -> int:
        """Return a new page with the same content and one reference."""
        (copy,) = self.allocate(1)
        self.page(copy).copy_(self.page(page))
        return copy

    def _take_in(self) -> None:
        while self._returned:
            for page in self._returned.popleft():
                self._counts[page] -= 1
                if not self._counts[page]:
                    self._free.append(page)
                    if self._poison:
                        self.page(page).fill_(POISON)

    def drop_empty_slabs(self) -> None:
        """Give back the slabs none of whose pages is held; the lock is held."""
        self._take_in()
        free = Counter(page >> self.shift for page in self._free)
        empty = {n for n, slab in self._slabs.items() if free[n] * self.page_bytes == slab.nbytes}
        if not empty:
            return
        self._expected = 0  # what the first cache needed says nothing about the next one
        self._free = [page for page in self._free if page >> self.shift not in empty]
        self._counts = {p: n for p, n in self._counts.items() if p >> self.shift not in empty}
        for number in empty:
            self.allocated_bytes -= self._slabs.pop(number).nbytes
            self.slab_table[number] = 0

    def _grow_within_budget(self, wanted_pages: int) -> None:
        """Add slabs until so many pages are free, or find pages of what nobody can reach."""
        try:
            self._grow(wanted_pages)
        except CacheBudgetError:
            gc.collect()  # a cache that died in a reference cycle still holds its pages
            self._take_in()
            if len(self._free) < wanted_pages:
                self._grow(wanted_pages)

    def _grow(self, wanted_pages: int) -> None:
        """Add slabs until `wanted_pages` are free."""
        if self._shift is None:
            self._shift = self._choose_shift(wanted_pages)
        sizes = self._sizes_of_new_slabs(wanted_pages - len(self._free))
        with torch.inference_mode(mode=False):
            # All of them before one is added: if memory runs out, nothing has changed.
            for slab in [self._new_slab(pages) for pages in sizes]:
                self._add(slab)

    def _new_slab(self, pages: int) -> torch.Tensor:
        slab = torch.empty(pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            _advise_huge_pages(slab)
        if self._poison:
            slab.fill_(POISON)
        return slab

    def _add(self, slab: torch.Tensor) -> None:
        number = next(n for n in range(len(self._slabs) + 1) if n not in self._slabs)
        if number == len(self.slab_table):
            self._outgrown_tables.append(self.slab_table)
            self.slab_table = torch.cat([self.slab_table, torch.zeros_like(self.slab_table)])
        self.slab_table[number] = slab.data_ptr()
        self._slabs[number] = slab
        self.allocated_bytes += slab.nbytes
        first = number << self.shift
        fresh = range(first, first + slab.nbytes // self.page_bytes)
        self._counts.update(dict.fromkeys(fresh, 0))
        # The list is a stack: lowest page on top, so that neighbours are handed out in order;
        # pages that were used before stay on top of fresh ones.
        self._free[:0] = reversed(fresh)

    def _choose_shift(self, wanted_pages: int) -> int:
        self._expected = wanted_pages * self._stores
        if self._slab_bytes is not None:
            return max(self._slab_bytes // self.page_bytes, 1).bit_length() - 1
        return max(LARGEST_SLAB_BYTES // self.page_bytes, 1).bit_length() - 1

    def _sizes_of_new_slabs(self, missing: int) -> list[int]:
        """Return the pages of each slab to add so that `missing` more are there.

        Raises:
            CacheBudgetError: The budget has no room for them.
        """
        sizes: list[int] = []
        while sum(sizes) < missing:
            there = len(self._counts) + sum(sizes)
            sizes.append(self._pages_of_next_slab(there, missing - sum(sizes)))
        if self.budget is not None:
            total, size = sum(sizes), self.page_bytes
            granted = self.budget.grant(self, missing * size, total * size) // size
            sizes[-1] -= total - granted
        return sizes

    def _pages_of_next_slab(self, there: int, missing: int) -> int:
        most = 1 << self.shift
        if self._slab_bytes is not None:
            return most
        smallest = max(SMALLEST_SLAB_BYTES // self.page_bytes, 1)
        growth = max(there // GROWTH, smallest) if there else 0
        if self.budget is not None:
            # The less is left, the less of it may lie unused where others could need it.
            growth = min(growth, self.budget.room // self.page_bytes // GROWTH)
        return min(max(self._expected - there, growth, missing), most)


_libc = ctypes.CDLL(None, use_errno=True)


def _advise_huge_pages(slab: torch.Tensor) -> None:
    """Ask for 2 MiB memory pages; a refusal only costs speed."""
    if slab.nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-slab.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (slab.data_ptr() + slab.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
