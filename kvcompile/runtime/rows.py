"""Rows of pages: which pages hold a sequence, and the tensors that tell kernels so."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvcompile.runtime.arena import Arena


class PageRows:
    """The pages of each row of a store, reference-counted, and their block table.

    Attributes:
        arena: Where the pages come from.
        page_size: Tokens in a page.
        batch: B, number of rows.
        capacity: The most tokens of a row, or None.
        state: int64[8], what kernels get.
        block_table: int32[B, row capacity].
        starts: int32[B], virtual left-padding tokens of each row.
    """

    def __init__(
        self, arena: Arena, page_size: int, batch: int, capacity: int | None, key: int
    ) -> None:
        self.arena = arena
        self.page_size = page_size
        self.batch = batch
        self.capacity = capacity
        self.starts = torch.zeros(batch, dtype=torch.int32)
        self._starts = [0] * batch
        self._padded = False
        self._padding: torch.Tensor | None = None
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        # Tokens up to here can be written without looking at a page; 0 if a page may be shared.
        self._writable = 0
        self.state = torch.zeros(8, dtype=torch.int64)
        self._words = (ctypes.c_int64 * 8).from_address(self.state.data_ptr())
        columns = 4 if capacity is None else -(-capacity // page_size)
        self._set_block_table(torch.zeros(batch, columns, dtype=torch.int32))
        self._words[3] = self.starts.data_ptr()
        self._words[5] = arena.page_bytes
        self._words[6] = batch
        self._words[7] = key
        # Pages go back when the store dies, not when the interpreter ends.
        weakref.finalize(self, _release_rows, arena, self._rows).atexit = False

    @property
    def is_padded(self) -> bool:
        """Whether a row has virtual left padding."""
        return self._padded

    @property
    def padding(self) -> torch.Tensor:
        """Which tokens are virtual left padding: bool[B, 1, 1, longest padding]."""
        if self._padding is None:
            columns = torch.arange(max(self._starts, default=0))
            self._padding = columns < self.starts[:, None, None, None]
        return self._padding

    def start_list(self) -> list[int]:
        """Return the virtual left-padding tokens of each row."""
        return list(self._starts)

    def _filled_pages(self, kept: int) -> dict[int, int]:
        """Return the distinct pages and how many of the first `kept` tokens each holds."""
        size = self.page_size
        filled: dict[int, int] = {}
        for row, start in zip(self._rows, self._starts, strict=True):
            for number, page in enumerate(row):
                tokens = min(max(kept - start - number * size, 0), size)
                filled[page] = max(filled.get(page, 0), tokens)
        return filled

    def _pages_for(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page_size))

    def _own_pages(self, past_len: int, end: int) -> None:
        """Make every page that holds tokens from `past_len` to `end` exist and be ours alone."""
        shared: list[tuple[int, int]] = []
        missing: list[int] = []
        for b, (row, start) in enumerate(zip(self._rows, self._starts, strict=True)):
            first = max(past_len - start, 0) // self.page_size
            later = range(first, len(row))
            shared += [(b, n) for n in later if self.arena.references(row[n]) > 1]
            missing.append(max(self._pages_for(end - start) - len(row), 0))
        fresh = iter(self.arena.allocate(sum(missing)))
        for b, count in enumerate(missing):
            if count:
                self._rows[b] += [next(fresh) for _ in range(count)]
                self._write_row(b, len(self._rows[b]) - count)
        for b, n in shared:
            # Two rows may have shared the page with each other only; the first copy ends that.
            if self.arena.references(self._rows[b][n]) > 1:
                old, self._rows[b][n] = self._rows[b][n], self.arena.copy_page(self._rows[b][n])
                self.arena.release([old])
                self._write_row(b, n)
        self._point_to_slabs()
        reach = zip(self._rows, self._starts, strict=True)
        self._writable = min(
            (start + len(row) * self.page_size for row, start in reach), default=end
        )
        if self.capacity is not None:
            self._writable = min(self._writable, self.capacity)

    def _drop_pages(self, kept: int) -> None:
        """Give back the pages that hold no token below `kept`."""
        self._writable = 0
        dropped: list[int] = []
        for row, start in zip(self._rows, self._starts, strict=True):
            needed = self._pages_for(kept - start)
            dropped += row[needed:]
            del row[needed:]
        if dropped:
            self.arena.release(dropped)
        if any(start > kept for start in self._starts):
            # New tokens may take the place of padding: it is virtual only below the length.
            self._write_starts([min(start, kept) for start in self._starts])

    def _share(self, rows: Sequence[Sequence[int]], starts: Sequence[int], kept: int) -> None:
        """Hold the pages of `rows`, which others hold too, as far as they have `kept` tokens."""
        self._write_starts(list(starts))
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            pages = row[: self._pages_for(kept - start)]
            self.arena.retain(pages)
            self._rows[b] += pages
            self._write_row(b, 0)
        self._point_to_slabs()

    def _point_to_slabs(self) -> None:
        self._words[0] = self.arena.table_address
        self._words[4] = self.arena.shift

    def _write_starts(self, starts: list[int]) -> None:
        self._starts = starts
        self._padding = None
        self._padded = any(starts)
        (ctypes.c_int32 * self.batch).from_address(self.starts.data_ptr())[:] = [*starts]

    def _write_row(self, row: int, first: int) -> None:
        """Copy the page ids of a row, from index `first` on, to the block table."""
        pages = self._rows[row]
        columns = self.block_table.shape[1]
        if len(pages) > columns:
            wider = torch.zeros(self.batch, max(len(pages), columns * 2), dtype=torch.int32)
            wider[:, :columns] = self.block_table
            self._set_block_table(wider)
            columns = wider.shape[1]
        begin = row * columns
        self._table[begin + first : begin + len(pages)] = [*pages[first:]]

    def _set_block_table(self, table: torch.Tensor) -> None:
        self.block_table = table
        self._table = (ctypes.c_int32 * table.numel()).from_address(table.data_ptr())
        self._words[1] = table.data_ptr()
        self._words[2] = table.shape[1]


def _release_rows(arena: Arena, rows: list[list[int]]) -> None:
    arena.release([page for row in rows for page in row])
