"""Which pages hold each row of a store: reference-counted ids, mirrored in the kernels' table."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvcompile.codegen.state import StateWords
    from kvcompile.runtime.arena import Arena

HOLE = -1
"""An entry without a page: tokens that were quantized without ever having lain there."""


class PageTable:
    """The pages of each row, in order.

    Attributes:
        arena: Where the pages come from.
        rows: Page ids of each row; change them only through the methods.
        block_table: int32[B, columns], the same for kernels.
        version: Counts the changes of the table.
    """

    def __init__(
        self,
        arena: Arena,
        batch: int,
        columns: int,
        state: ctypes.Array[ctypes.c_int64],
        words: StateWords,
    ) -> None:
        self.arena = arena
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.version = 0
        self._state = state
        self._words = words
        self._set_block_table(torch.zeros(batch, columns, dtype=torch.int32))
        state[words.page_bytes] = arena.page_bytes
        # Pages go back when the store dies, not when the interpreter ends.
        weakref.finalize(self, _release_rows, arena, self.rows).atexit = False

    def extend(
        self, missing: Sequence[int], *, holes_from: int = 0, holes: Sequence[int] | None = None
    ) -> None:
        """Add `missing[b]` fresh pages to each row; if memory runs out, no row has changed.

        Args:
            missing: Pages to add.
            holes_from: First number that a hole can have.
            holes: Entries without a page that come once `holes_from` is reached.
        """
        fresh = iter(self.arena.allocate(sum(missing)))
        for b, count in enumerate(missing):
            empty = holes[b] if holes else 0
            if count or empty:
                row, first = self.rows[b], len(self.rows[b])
                before = min(max(holes_from - first, 0), count) if empty else count
                row += [next(fresh) for _ in range(before)]
                row += [HOLE] * empty
                row += [next(fresh) for _ in range(count - before)]
                self.write_row(b, first)
        self.point_to_slabs()

    def is_shared(self, row: int, number: int) -> bool:
        """Whether somebody else holds a page of a row too."""
        page = self.rows[row][number]
        return page != HOLE and self.arena.references(page) > 1

    def is_own(self, row: int, number: int) -> bool:
        """Whether a row holds a page that nobody else holds."""
        page = self.rows[row][number]
        return page != HOLE and self.arena.references(page) == 1

    def own(self, shared: Sequence[tuple[int, int]]) -> None:
        """Replace shared pages, given as (row, number), by copies.

        If memory runs out, some are replaced and the others still shared: no token has changed.
        """
        try:
            for b, n in shared:
                # Two rows may have shared the page with each other only; the first copy ends that.
                if self.is_shared(b, n):
                    old, self.rows[b][n] = self.rows[b][n], self.arena.copy_page(self.rows[b][n])
                    self.arena.release([old])
                    self.write_row(b, n)
        finally:
            self.point_to_slabs()

    def cut(self, needed: Sequence[int]) -> None:
        """Give back the pages of each row from number `needed[b]` on."""
        dropped: list[int] = []
        for row, kept in zip(self.rows, needed, strict=True):
            dropped += row[kept:]
            del row[kept:]
        self._release(dropped)

    def remove(self, row: int, first: int, count: int) -> None:
        """Give back `count` pages of a row from number `first` on; later ones move up."""
        dropped = self.rows[row][first : first + count]
        del self.rows[row][first : first + count]
        self._release(dropped)
        self.write_row(row, first)

    def share(self, row: int, pages: Sequence[int]) -> None:
        """Append pages that somebody else holds to a row."""
        self.arena.retain(pages)
        self.rows[row] += pages
        self.write_row(row, 0)

    def point_to_slabs(self) -> None:
        """Bring the state's view of the arena up to date."""
        self._state[self._words.slab_table] = self.arena.table_address
        self._state[self._words.slab_shift] = self.arena.shift

    def write_row(self, row: int, first: int) -> None:
        """Copy the page ids of a row, from number `first` on, to the block table."""
        self.version += 1
        pages = self.rows[row]
        batch, columns = self.block_table.shape
        if len(pages) > columns:
            wider = torch.zeros(batch, max(len(pages), columns * 2), dtype=torch.int32)
            wider[:, :columns] = self.block_table
            self._set_block_table(wider)
            columns = wider.shape[1]
        begin = row * columns
        self._table[begin + first : begin + len(pages)] = [*pages[first:]]

    def _release(self, pages: list[int]) -> None:
        if pages:
            self.arena.release([page for page in pages if page != HOLE])

    def _set_block_table(self, table: torch.Tensor) -> None:
        self.block_table = table
        self._table = (ctypes.c_int32 * table.numel()).from_address(table.data_ptr())
        self._state[self._words.block_table] = table.data_ptr()
        self._state[self._words.row_stride] = table.shape[1]


def _release_rows(arena: Arena, rows: list[list[int]]) -> None:
    arena.release([page for row in rows for page in row if page != HOLE])
