"""Rows of a store: their left padding, their pages, and the state tensor that kernels get."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.state import BATCH, KEY, PAGES, STARTS, STATE_WORDS
from kvcompile.runtime.page_table import PageTable

if TYPE_CHECKING:
    from kvcompile.runtime.arena import Arena


@dataclass(frozen=True)
class Holding:
    """The pages of one arena that a store holds.

    Attributes:
        arena: The arena.
        page_size: Tokens of a page.
        filled: Page id -> tokens in it.
    """

    arena: Arena
    page_size: int
    filled: dict[int, int]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens."""
        return sum(self.filled.values()) * self.arena.page_bytes // self.page_size

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages."""
        return len(self.filled) * self.arena.page_bytes


class PageRows:
    """The pages of each row of a store, and what kernels need to find them.

    Attributes:
        pages: The page table.
        page_size: Tokens in a page.
        batch: B, number of rows.
        capacity: The most tokens of a row, or None.
        state: int64[16], what kernels get.
        starts: int32[B], the column of each row's first stored token: virtual left-padding tokens,
            which own no page, or, below 0, how many stored tokens lie before column 0.
        origin: The token in column 0, counted from the first one ever stored. A sliding window
            moves it on; tokens before it are out of sight, and whole pages of them are given back.
        hidden: The most stored tokens that a row has before column 0.
        rotary_table: The angles that K turns by, if its turning mean is kept; rows that are read
            with other angles are not the same tokens.
    """

    rotary_table: torch.Tensor | None = None

    def __init__(
        self, arena: Arena, page_size: int, batch: int, capacity: int | None, key: int
    ) -> None:
        self.page_size = page_size
        self.batch = batch
        self.capacity = capacity
        self.starts = torch.zeros(batch, dtype=torch.int32)
        self._starts = [0] * batch
        self.origin = 0
        self.hidden = 0
        self._padded = False
        self._padding: torch.Tensor | None = None
        # Tokens up to here can be written without looking at a page; 0 if a page may be shared.
        self._writable = 0
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64)
        self._words = (ctypes.c_int64 * STATE_WORDS).from_address(self.state.data_ptr())
        columns = 4 if capacity is None else -(-capacity // page_size)
        self.pages = PageTable(arena, batch, columns, self._words, PAGES)
        self._words[STARTS] = self.starts.data_ptr()
        self._words[BATCH] = batch
        self._words[KEY] = key

    @property
    def arena(self) -> Arena:
        """Where the pages come from."""
        return self.pages.arena

    @property
    def block_table(self) -> torch.Tensor:
        """int32[B, columns], page ids."""
        return self.pages.block_table

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
        """Return the column of the first stored token of each row; see `starts`."""
        return list(self._starts)

    def _holdings(self, kept: int) -> list[Holding]:
        """Return the distinct pages and how many of the first `kept` tokens each holds."""
        size = self.page_size
        filled: dict[int, int] = {}
        for row, start in zip(self.pages.rows, self._starts, strict=True):
            for number, page in enumerate(row):
                tokens = min(max(kept - start - number * size, 0), size)
                filled[page] = max(filled.get(page, 0), tokens)
        return [Holding(self.arena, size, filled)]

    def _own_pages(self, past_len: int, end: int, *, both: bool) -> None:
        """Make every page that holds tokens from `past_len` to `end` exist and be ours alone.

        Args:
            past_len: First token to be written.
            end: Token behind the last one.
            both: Whether K and V will be written, or only one of them.
        """
        shared: list[tuple[int, int]] = []
        missing: list[int] = []
        for b, (row, start) in enumerate(zip(self.pages.rows, self._starts, strict=True)):
            first = max(past_len - start, 0) // self.page_size
            shared += [(b, n) for n in range(first, len(row)) if self.pages.is_shared(b, n)]
            missing.append(max(self._pages_for(end - start) - len(row), 0))
        self.pages.extend(missing)
        self.pages.own(shared)
        reach = zip(self.pages.rows, self._starts, strict=True)
        self._writable = min(
            (start + len(row) * self.page_size for row, start in reach), default=end
        )
        if self.capacity is not None:
            self._writable = min(self._writable, self.capacity)

    def _drop_pages(self, kept: int) -> None:
        """Give back the pages that hold no token below `kept`."""
        self._writable = 0
        self.pages.cut([self._pages_for(kept - start) for start in self._starts])
        self._limit_starts(kept)

    def _share_rows(self, sources: Sequence[tuple[PageRows, int]], kept: int) -> None:
        """Hold the pages of rows (store, number) of others, as far as they have `kept` tokens."""
        self._write_starts([store._starts[i] for store, i in sources])
        for b, (store, i) in enumerate(sources):
            self.pages.share(b, store.pages.rows[i][: self._pages_for(kept - self._starts[b])])
        self.pages.point_to_slabs()

    def _same_rows(self, other: PageRows) -> bool:
        """Whether another store of the same kind holds the same pages and padding."""
        return (
            self.arena is other.arena
            and self._starts == other._starts
            and self.pages.rows == other.pages.rows
        )

    def _pages_for(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page_size))

    def _limit_starts(self, kept: int) -> None:
        """New tokens may take the place of padding: it is virtual only below the length."""
        if any(start > kept for start in self._starts):
            self._write_starts([min(start, kept) for start in self._starts])

    def _write_starts(self, starts: list[int]) -> None:
        self._starts = starts
        self._padding = None
        self._padded = any(start > 0 for start in starts)
        self.hidden = max(0, -min(starts, default=0))
        (ctypes.c_int32 * self.batch).from_address(self.starts.data_ptr())[:] = [*starts]
