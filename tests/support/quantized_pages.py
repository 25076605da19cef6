"""The smallest store with quantized pages, sinks and a ring, every unused byte poisoned.

It keeps the books as a runtime has to: the caller says how many pages are quantized, lets the
append kernel run, and settles: the exact pages that are no longer needed are poisoned and reused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.layout import RecordLayout
from tests.support.fake_store import POISON

SLAB_SHIFT = 1


class PagePool:
    """Pages anywhere in one memory, handed out in a shuffled order.

    Attributes:
        memory: All pages, uint8[pages, K, record bytes].
        table: Page ids, int32[B, columns]; where a row has no page, a page of poison.
        words: slab table, block table, row stride, slab shift, page bytes.
    """

    def __init__(
        self,
        layout: RecordLayout,
        num_kv_heads: int,
        batch: int,
        columns: int,
        *,
        seed: int,
        first_byte: int,
    ) -> None:
        pages = batch * columns + 1
        page_bytes = layout.page_bytes(num_kv_heads)
        self.memory = torch.full((pages, num_kv_heads, layout.record_bytes), POISON).byte()
        self._first = first_byte // page_bytes
        slabs = torch.arange((self._first + pages >> SLAB_SHIFT) + 1)
        # The pages below the first do not exist: their addresses lie before the memory.
        base = self.memory.data_ptr() - self._first * page_bytes
        self._slab_table = base + slabs * (page_bytes << SLAB_SHIFT)
        self._free = list(range(self._first, self._first + pages))
        random.Random(seed).shuffle(self._free)
        self._nowhere = self._free.pop()
        self.table = torch.full((batch, columns), self._nowhere, dtype=torch.int32)
        addresses = [self._slab_table.data_ptr(), self.table.data_ptr()]
        self.words = [*addresses, columns, SLAB_SHIFT, page_bytes]

    def index(self, row: int, column: int) -> int:
        """Return where in the memory a page of a row is."""
        return int(self.table[row, column]) - self._first

    def take(self, row: int, column: int) -> None:
        """Give a row a page unless it has one there."""
        if self.table[row, column] == self._nowhere:
            self.table[row, column] = self._free.pop()

    def drop(self, row: int, first: int, count: int) -> None:
        """Take pages from the middle of a row; those behind them move up."""
        columns = self.table[row].tolist()
        for page in columns[first : first + count]:
            if page != self._nowhere:
                self.memory[page - self._first] = POISON
                self._free.insert(0, page)
        kept = columns[:first] + columns[first + count :]
        self.table[row] = torch.tensor(kept + [self._nowhere] * (len(columns) - len(kept)))


class QuantizedPages:
    """Quantized pages, sinks and ring of one layer.

    Attributes:
        layout: Layout of the quantized records, with its window.
        num_kv_heads: Records per page.
        dtype: Dtype of the model.
        batch: Rows.
        hidden: Tokens before column 0; none.
        starts: Left-padding tokens per row, int32[B].
        quantized: Quantized pages per row, int32[B].
        ring_from: The page whose first token has the ring's first slot, int32[B].
        rotary_table: The angles that K turns by, if its turning mean is kept.
        state: int64[16], what kernels read.
    """

    hidden = 0

    def __init__(
        self,
        layout: RecordLayout,
        *,
        num_kv_heads: int,
        dtype: torch.dtype,
        tokens: int,
        starts: Sequence[int] = (0,),
        seed: int = 0,
        first_byte: int = 0,
        rotary_table: torch.Tensor | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            layout: Layout of the quantized records.
            num_kv_heads: Records per page.
            dtype: Dtype of the model.
            tokens: Tokens that must fit into a row.
            starts: Left-padding tokens per row.
            seed: Decides where the pages lie.
            first_byte: How many bytes of each kind of pages come before those of this store.
            rotary_table: The angles that K turns by, if its turning mean is kept.
        """
        assert layout.window is not None
        self.layout = layout
        self.window = layout.window
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.batch = len(starts)
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.quantized = torch.zeros(self.batch, dtype=torch.int32)
        self.ring_from = torch.zeros(self.batch, dtype=torch.int32)
        columns = -(-tokens // layout.page_size) + 1
        exact_columns = -(-tokens // TILE) + self.window.sink_pages + 1
        self.pages, self.exact = (
            PagePool(pool, num_kv_heads, self.batch, width, seed=number, first_byte=first_byte)
            for pool, width, number in (
                (layout, columns, seed),
                (layout.exact, exact_columns, seed + 1),
            )
        )
        slabs, blocks, stride, shift, page_bytes = self.pages.words
        first = [slabs, blocks, stride, self.starts.data_ptr(), shift, page_bytes, self.batch, 0]
        self.rotary_table = rotary_table
        angles = 0 if rotary_table is None else rotary_table.data_ptr()
        last = [self.quantized.data_ptr(), self.ring_from.data_ptr(), angles]
        self.state = torch.tensor([*first, *self.exact.words, *last])

    def record(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the records of a page of k, v [K, P, D]."""
        return self.layout.pack(k, v, self.rotary_table)

    def stored_tokens(self, row: int, length: int) -> int:
        """Return how many of `length` logical tokens a row stores."""
        return max(0, length - int(self.starts[row]))

    def exact_slot(self, row: int, token: int) -> tuple[int, int]:
        """Return page and slot of an exact token."""
        if token < self.window.num_sink_tokens:
            return divmod(token, TILE)
        ring = self.window.num_sink_tokens + int(self.ring_from[row]) * self.layout.page_size
        page, slot = divmod(token - ring, TILE)
        return self.window.sink_pages + page, slot

    def ring_token(self, row: int) -> int:
        """Return the first token behind the quantized pages of a row."""
        return self.window.num_sink_tokens + int(self.quantized[row]) * self.layout.page_size

    def advance(self, length: int) -> None:
        """Count as quantized what has to be at `length` logical tokens."""
        for row in range(self.batch):
            full = self.window.full_pages(self.stored_tokens(row, length), self.layout.page_size)
            for page in range(int(self.quantized[row]), full):
                self.pages.take(row, page)
                self.quantized[row] = page + 1

    def reserve(self, length: int) -> None:
        """Give the exact tokens below `length` their pages."""
        for row in range(self.batch):
            for token in self.exact_tokens(row, length):
                self.exact.take(row, self.exact_slot(row, token)[0])

    def exact_tokens(self, row: int, length: int) -> list[int]:
        """Return the tokens of a row that are stored exactly."""
        stored = self.stored_tokens(row, length)
        sinks = range(min(self.window.num_sink_tokens, stored))
        return [*sinks, *range(self.ring_token(row), stored)]

    def settle(self) -> None:
        """Drop the exact pages of quantized tokens."""
        tiles = self.layout.page_size // TILE
        for row in range(self.batch):
            pages = int(self.quantized[row] - self.ring_from[row])
            self.exact.drop(row, self.window.sink_pages, pages * tiles)
        self.ring_from.copy_(self.quantized)

    def expected(
        self, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what both memories of a settled store hold once k, v [B, K, T, D] are appended.

        Every byte: those that no token owns are poison.
        """
        pages = torch.full_like(self.pages.memory, POISON)
        exact = torch.full_like(self.exact.memory, POISON)
        exact_layout = self.layout.exact
        dims = {role: -(-getattr(exact_layout, role) // 8) * 8 for role in DIMS}
        marks = replace(exact_layout, **dims)
        word = torch.int32 if self.dtype is torch.float32 else torch.int16
        for row, page, tokens in self.quantized_pages():
            record = self.record(k[row, :, tokens], v[row, :, tokens])
            pages[self.pages.index(row, page)] = record
        for row in range(self.batch):
            start = int(self.starts[row])
            slots: dict[int, list[tuple[int, int]]] = {}
            for token in self.exact_tokens(row, length):
                page, slot = self.exact_slot(row, token)
                slots.setdefault(page, []).append((slot, start + token))
            for page, owned in slots.items():
                into, source = (list(column) for column in zip(*owned, strict=True))
                dense = [torch.zeros(*x.shape[1:2], TILE, x.shape[3]) for x in (k, v)]
                owner = [torch.zeros(1, TILE, dim) for dim in dims.values()]
                for target, x in zip(dense, (k, v), strict=True):
                    target[:, into] = x[row, :, source].float()
                for target in owner:
                    target[:, into] = 1
                mask = marks.pack(*owner).view(word).ne(0).repeat_interleave(word.itemsize, -1)
                exact[self.exact.index(row, page)] = torch.where(
                    mask, exact_layout.pack(*dense), POISON
                )
        return pages, exact

    def quantized_pages(self) -> Iterator[tuple[int, int, slice]]:
        """Yield row, page and logical tokens of all quantized pages."""
        size = self.layout.page_size
        for row, (pages, start) in enumerate(zip(self.quantized, self.starts, strict=True)):
            for page in range(int(pages)):
                first = int(start) + self.window.num_sink_tokens + page * size
                yield row, page, slice(first, first + size)

    def decoded(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Return k and v [B, K, T, D] in fp32 as they are stored, padding as zeros."""
        back = [x.to(torch.float32, copy=True) for x in (k, v)]
        for x in back:
            for row, start in enumerate(self.starts.tolist()):
                x[row, :, :start] = 0
        for row, _, tokens in self.quantized_pages():
            record = self.record(k[row, :, tokens], v[row, :, tokens])
            for x, dense in zip(back, self.layout.unpack(record, self.rotary_table), strict=True):
                x[row, :, tokens] = dense
        return back


DIMS = ("head_dim_qk", "head_dim_vo")
