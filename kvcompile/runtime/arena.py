"""Pages: one arena hands out fixed-size pages from slabs that never move.

Slabs are ordinary torch storages, so that the profiler sees every stored byte. A page id is
`slab << shift | page in slab`; kernels turn it into an address through the slab table.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch

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
        slab_table: int64[capacity], addresses of the slabs; see `table_address`.
    """

    def __init__(
        self,
        page_bytes: int,
        device: torch.device | str = "cpu",
        slab_bytes: int | None = None,
        *,
        stores: int = 1,
    ) -> None:
        """Make an empty arena.

        Args:
            page_bytes: Bytes of one page.
            device: Where the slabs live.
            slab_bytes: Bytes of every slab, rounded down to a power-of-two number of pages. By
                default the first slabs, of at most 32 MiB, hold exactly what the first
                reservation takes, made by each of the stores; later ones a 64th of what is there.
            stores: Stores (layers) that will make reservations like the first one.
        """
        self.page_bytes = page_bytes
        self.device = torch.device(device)
        self._slab_bytes = slab_bytes
        self._stores = stores
        self._shift: int | None = None
        self._slabs: list[torch.Tensor] = []
        self.slab_table = torch.zeros(64, dtype=torch.int64)
        # States made before the table grew still point to the older, shorter tables.
        self._outgrown_tables: list[torch.Tensor] = []
        self._counts: dict[int, int] = {}
        self._expected = 0
        self._free: list[int] = []
        # Pages come back from finalizers, which run at any bytecode, even inside `allocate`:
        # they only append here, and whoever holds the lock next takes them in.
        self._returned: deque[Sequence[int]] = deque()
        self._lock = threading.Lock()
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
    def allocated_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def used_pages(self) -> int:
        """Pages that somebody holds."""
        with self._lock:
            self._take_in()
            return len(self._counts) - len(self._free)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor the arena owns: slabs first, then slab tables."""
        return [*self._slabs, self.slab_table, *self._outgrown_tables]

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one reference each; their content is undefined.

        All or nothing: if memory runs out, no page is taken.
        """
        with self._lock:
            self._take_in()
            while len(self._free) < count:
                self._add_slab(count)
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

    def _add_slab(self, wanted_pages: int) -> None:
        if self._shift is None:
            self._shift = self._choose_shift(wanted_pages)
        pages = self._pages_of_next_slab(wanted_pages)
        slab = torch.empty(pages * self.page_bytes, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            _advise_huge_pages(slab)
        if self._poison:
            slab.fill_(POISON)
        number = len(self._slabs)
        if number == len(self.slab_table):
            self._outgrown_tables.append(self.slab_table)
            self.slab_table = torch.cat([self.slab_table, torch.zeros_like(self.slab_table)])
        self.slab_table[number] = slab.data_ptr()
        self._slabs.append(slab)
        first = number << self._shift
        fresh = range(first, first + pages)
        self._counts.update(dict.fromkeys(fresh, 0))
        # The list is a stack: lowest page on top, so that neighbours are handed out in order;
        # pages that were used before stay on top of fresh ones.
        self._free[:0] = reversed(fresh)

    def _choose_shift(self, wanted_pages: int) -> int:
        self._expected = wanted_pages * self._stores
        if self._slab_bytes is not None:
            return max(self._slab_bytes // self.page_bytes, 1).bit_length() - 1
        return max(LARGEST_SLAB_BYTES // self.page_bytes, 1).bit_length() - 1

    def _pages_of_next_slab(self, wanted_pages: int) -> int:
        most = 1 << self.shift
        if self._slab_bytes is not None:
            return most
        there = len(self._counts)
        missing = max(wanted_pages - len(self._free), 1)
        smallest = max(SMALLEST_SLAB_BYTES // self.page_bytes, 1)
        growth = max(there // GROWTH, smallest) if there else 0
        return min(max(self._expected - there, growth, missing), most)


_libc = ctypes.CDLL(None, use_errno=True)


def _advise_huge_pages(slab: torch.Tensor) -> None:
    """Ask for 2 MiB memory pages; a refusal only costs speed."""
    if slab.nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-slab.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (slab.data_ptr() + slab.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
