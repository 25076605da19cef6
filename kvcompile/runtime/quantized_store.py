"""A page store whose pages are quantized, with the first and the most recent tokens exact.

Each row is sinks, then quantized pages, then the ring (see `codegen.layout.Window`). Sinks and ring
lie in exact pages of 16 tokens from an arena of their own; a page of the ring is quantized once,
when enough tokens follow it, and its exact pages are given back. A quantized page is never changed,
so shared ones need no copy. How many pages are quantized depends on the length alone: the same
tokens give the same bytes, appended at once or one by one.

An append quantizes what it makes old enough, but `commit` gives the exact pages back. Until then
the step can be repeated from the very same past.

A chunk of more than 16 tokens that a compiled graph appends attends to what was stored before it
and to itself exactly, as a prompt fed at once does: read after the append, most of what its first
queries need most would be quantized already. Where kernels attend to a chunk in pages, it lies in
the ring until `commit` quantizes it; elsewhere attention gets a dense past, the chunk behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.spec import MOST_QUERIES
from kvcompile.codegen.state import EXACT_PAGES, QUANTIZED, RING_FROM, ROTARY
from kvcompile.runtime import launch
from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.notices import tell_cut_inside_a_page
from kvcompile.runtime.page_table import HOLE, PageTable
from kvcompile.runtime.rows import Holding, PageRows
from kvcompile.runtime.store import New, PagedStore

if TYPE_CHECKING:
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.runtime.arena import Arena
    from kvcompile.runtime.device_tables import CountName
    from kvcompile.runtime.registry import Role
    from kvcompile.runtime.rope import Rope


class QuantizedStore(PagedStore):
    """K and V of one layer in quantized pages, sinks and ring.

    Attributes:
        exact: Exact pages of each row: those of the sinks, then those of the ring.
        quantized: int32[B], quantized pages of each row.
        ring_from: int32[B], the page whose first token begins the ring's first exact page. It is
            less than `quantized` between an append and its commit.
    """

    def __init__(  # noqa: PLR0913 - what a PagedStore takes, and the angles
        self,
        layout: RecordLayout,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        arenas: tuple[Arena, Arena],
        *,
        batch: int,
        capacity: int | None = None,
        token_dim: int = 2,
        rotary_table: torch.Tensor | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            layout: How a record stores tokens; it has a window.
            num_kv_heads: K.
            dtype: Dtype of the dense K and V it stands for.
            device: Device of pages and handles.
            arenas: Where quantized pages and where exact pages come from.
            batch: Rows.
            capacity: Tokens of a static buffer, or None for a cache that grows.
            token_dim: Dimension of the dense K and V that counts tokens.
            rotary_table: The angles that K turns by, see `codegen.rotary`, if the layout keeps its
                turning mean.
        """
        arena, exact_arena = arenas
        super().__init__(
            layout,
            num_kv_heads,
            dtype,
            device,
            arena,
            batch=batch,
            capacity=capacity,
            token_dim=token_dim,
        )
        assert layout.window is not None
        assert (layout.rotary is None) == (rotary_table is None)
        self.rotary_table = rotary_table
        self._window = layout.window
        self.exact = PageTable(exact_arena, batch, 16, self._words, EXACT_PAGES)
        self.quantized = torch.zeros(batch, dtype=torch.int32)
        self.ring_from = torch.zeros(batch, dtype=torch.int32)
        self._words[QUANTIZED] = self.quantized.data_ptr()
        self._words[RING_FROM] = self.ring_from.data_ptr()
        if rotary_table is not None:
            self._words[ROTARY] = rotary_table.data_ptr()
        self._quantized = [0] * batch
        self._ring_from = [0] * batch
        self._seen_by_chunk: tuple[torch.Tensor, torch.Tensor] | None = None
        self._quantizes_at_commit = False

    keeps_later_tokens = False
    """Writing at a position drops the tokens behind it, in a static buffer too."""

    def append(
        self, k: New, v: New, past_len: int, *, attends: bool = False, rope: Rope | None = None
    ) -> None:
        """Write tokens from `past_len` on; see `PagedStore.append`."""
        seen = None
        if self._prepared is None:
            self._forget_last_append()
        if attends and k is not None and v is not None and k.shape[2] > MOST_QUERIES:
            if launch.reads_pages(self, k.shape[2]):
                self._quantizes_at_commit = True
            else:
                seen = self._with_past(k, v, past_len)
        super().append(k, v, past_len, attends=attends, rope=rope)
        self._seen_by_chunk = seen

    def _with_past(
        self, k: torch.Tensor, v: torch.Tensor, past_len: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the past and a chunk behind it; None for what the append is going to refuse."""
        if past_len > self.length or k.shape[0] != self.batch:
            return None
        if not past_len:  # a static buffer that is filled anew
            return k, v
        past_k, past_v = super().dense_for_chunk(past_len)
        return torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)

    def dense_for_chunk(self, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, K, `stored`, D] as the chunk sees them that was just appended."""
        seen, self._seen_by_chunk = self._seen_by_chunk, None
        return super().dense_for_chunk(stored) if seen is None else seen

    def commit(self, length: int, role: Role | None = None) -> None:
        """Declare the tokens below `length` stored, and give back what was quantized.

        Raises:
            CacheGapError: If they were not appended.
        """
        super().commit(length, role)
        self._seen_by_chunk = None
        is_late, self._quantizes_at_commit = self._quantizes_at_commit, False
        if is_late or (role is not None and self.k_len == self.v_len):
            # Eager code appends K and V one after the other; pages are quantized once both are in.
            self._own_pages(length, length, both=True)
            if self._quantized != self._ring_from:
                launch.flush(self, length)
        if self._quantized != self._ring_from:
            self._release_quantized()

    def abandon(self) -> None:
        """Forget what was appended since the last commit: the step that did it has failed."""
        self._forget_last_append()
        self._forget_uncommitted()
        self.slide_back()

    def _forget_last_append(self) -> None:
        self._prepared = self._seen_by_chunk = None
        is_late, self._quantizes_at_commit = self._quantizes_at_commit, False
        if is_late or self._quantized != self._ring_from:
            self._forget_uncommitted()

    def row_counts(self) -> dict[CountName, list[int]]:
        """Return what kernels must know of each row."""
        counts = super().row_counts()
        return counts | {"quantized": list(self._quantized), "ring_from": list(self._ring_from)}

    def most_exact_pages(self, new_len: int) -> int:
        """Return the most entries of the exact table that a row needs in a step of new tokens."""
        return self._window.most_exact_pages(self.page_size, new_len)

    def holdings(self) -> list[Holding]:
        """Return the distinct pages, quantized ones first, and how many tokens each holds."""
        kept, tokens_in = max(self.k_len, self.v_len), self._window.tokens_in_exact_page
        filled: dict[int, int] = {}
        exact: dict[int, int] = {}
        for b, start in enumerate(self._starts):
            stored = max(kept - start, 0)
            for number, page in enumerate(self.pages.rows[b]):
                if number < self._ring_from[b]:
                    filled[page] = self.page_size
                else:
                    filled.setdefault(page, 0)
            for number, page in enumerate(self.exact.rows[b]):
                tokens = tokens_in(number, stored, self._ring_from[b], self.page_size)
                if page != HOLE:
                    exact[page] = max(exact.get(page, 0), tokens)
        return [
            Holding(self.arena, self.page_size, filled),
            Holding(self.exact.arena, TILE, exact),
        ]

    def _own_pages(self, past_len: int, end: int, *, both: bool) -> None:
        """Make room for tokens from `past_len` to `end`, and decide which pages to quantize.

        Raises:
            CacheGapError: Tokens were to be written into a page that is quantized already.
        """
        if self._quantized != self._ring_from:
            self._forget_uncommitted()
        sinks, size = self._window.num_sink_tokens, self.page_size
        for start, full in zip(self._starts, self._quantized, strict=True):
            if sinks <= max(past_len - start, 0) < sinks + full * size:
                raise CacheGapError(
                    f"tokens at position {past_len} were to be written into a quantized page; "
                    "truncate K and V of the cache to that position first"
                )
        self._make_room(past_len, end, both=both and not self._quantizes_at_commit)

    def _make_room(self, past_len: int, end: int, *, both: bool) -> None:
        window, size = self._window, self.page_size
        quantized, missing, missing_exact, holes = [], [], [], []
        shared: list[tuple[int, int]] = []
        for b, start in enumerate(self._starts):
            stored, ring_from = max(end - start, 0), self._ring_from[b]
            due = max(window.full_pages(stored, size), ring_from)
            full = due if both else ring_from
            quantized.append(full)
            # A commit must not run out of memory: other layers may have committed before.
            pages = due if self._quantizes_at_commit else full
            missing.append(max(pages - len(self.pages.rows[b]), 0))
            # Entries of the exact table: whatever of the pages to quantize is not there already
            # is quantized straight from the new tokens, and needs no exact page.
            have, need = len(self.exact.rows[b]), window.exact_pages(stored, ring_from, size)
            ring_entry = window.sink_pages + (full - ring_from) * size // TILE
            skipped = max(min(ring_entry, need) - max(have, window.sink_pages), 0)
            first = window.exact_page_of(max(past_len - start, 0), ring_from, size)
            shared += [(b, n) for n in range(first, have) if self.exact.is_shared(b, n)]
            holes.append(skipped)
            missing_exact.append(max(need - have, 0) - skipped)
        try:
            self.pages.extend(missing)
            self.exact.extend(missing_exact, holes_from=window.sink_pages, holes=holes)
            self.exact.own(shared)
        except BaseException:
            self._forget_uncommitted()
            raise
        self.set_quantized(quantized, self._ring_from)
        self._set_writable()

    def _set_writable(self) -> None:
        """Note how far tokens can be appended without a new page and without quantizing one."""
        self._writable = 0
        if self._quantized != self._ring_from:
            return
        window, size = self._window, self.page_size
        reach = [] if self.capacity is None else [self.capacity]
        for b, start in enumerate(self._starts):
            entries, full = len(self.exact.rows[b]), self._ring_from[b]
            room = min(entries * TILE, window.num_sink_tokens)
            if entries > window.sink_pages:
                room = window.num_sink_tokens + full * size + (entries - window.sink_pages) * TILE
            still_exact = window.num_sink_tokens + window.residual_length + (full + 1) * size - 1
            reach.append(start + min(room, still_exact))
        self._writable = min(reach, default=0)

    def _release_quantized(self) -> None:
        """Give back the exact pages of tokens that are quantized now."""
        for b, (full, ring_from) in enumerate(zip(self._quantized, self._ring_from, strict=True)):
            if full != ring_from:
                count = (full - ring_from) * self.page_size // TILE
                self.exact.remove(b, self._window.sink_pages, count)
        self.set_quantized(self._quantized, self._quantized)
        self._set_writable()

    def _forget_uncommitted(self) -> None:
        """Go back to the pages of the last commit."""
        self._writable = 0
        self.set_quantized(self._ring_from, self._ring_from)
        self.pages.cut(self._quantized)
        kept = max(self.k_len, self.v_len)
        needed = zip(self._starts, self._ring_from, strict=True)
        pages = self._window.exact_pages
        self.exact.cut([pages(kept - start, full, self.page_size) for start, full in needed])

    def _drop_pages(self, kept: int) -> None:
        """Give back the pages without a token below `kept`.

        Tokens of a page that is cut in two become part of the ring again, as they were decoded.
        """
        self._forget_last_append()
        window, size = self._window, self.page_size
        full = [
            min(have, max(kept - start - window.num_sink_tokens, 0) // size)
            for start, have in zip(self._starts, self._quantized, strict=True)
        ]
        decoded = self._decode_cut_pages(kept, full)
        needed = []
        for start, f, have in zip(self._starts, full, self._quantized, strict=True):
            entries = window.exact_pages(kept - start, f, size)
            # Where a page is cut, the whole ring behind it goes.
            needed.append(min(entries, window.sink_pages) if f < have else entries)
        # Before anything is given back: what was decoded must find room again.
        missing = 0 if decoded is None else self._missing_after_cut(kept, full)
        room = self.exact.arena.allocate(missing)
        self.set_quantized(full, full)
        self.pages.cut(full)
        self.exact.cut(needed)
        self.exact.arena.release(room)
        if decoded is not None:
            first, k, v = decoded
            self._make_room(first, kept, both=False)
            launch.append(self, k, v, first)
        self._writable = 0
        self._limit_starts(kept)

    def _missing_after_cut(self, kept: int, full: Sequence[int]) -> int:
        """Return at most how many exact pages sinks and ring take beyond those held alone."""
        pages, size = self._window.exact_pages, self.page_size
        needed = sum(pages(kept - s, f, size) for s, f in zip(self._starts, full, strict=True))
        rows = enumerate(self.exact.rows)
        return max(needed - sum(self.exact.is_own(b, n) for b, r in rows for n in range(len(r))), 0)

    def _decode_cut_pages(
        self, kept: int, full: Sequence[int]
    ) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """Return the tokens that lie in quantized pages which do not stay whole.

        Returns:
            First position, and K and V [B, K, S, D] from there to `kept`; None if there are none.
        """
        sinks, size = self._window.num_sink_tokens, self.page_size
        firsts = [
            start + sinks + f * size
            for start, f, have in zip(self._starts, full, self._quantized, strict=True)
            if f < have and kept > start + sinks + f * size
        ]
        if not firsts:
            return None
        tell_cut_inside_a_page()
        first = min(firsts)
        return first, launch.gather(self, "k", first, kept), launch.gather(self, "v", first, kept)

    def _drop_front(self, column: int) -> list[int]:
        counts = super()._drop_front(column)
        numbers = zip(self._quantized, self._ring_from, counts, strict=True)
        left = [(full - gone, ring_from - gone) for full, ring_from, gone in numbers]
        self.set_quantized(*(list(column) for column in zip(*left, strict=True)))
        return counts

    def _front_pages(self, row: int, tokens: int) -> int:
        pages = super()._front_pages(row, tokens - self._window.num_sink_tokens)
        return min(pages, self._ring_from[row])  # sinks stay, out of sight

    def set_quantized(self, quantized: list[int], ring_from: list[int]) -> None:
        """Note the quantized pages of each row, and the page that its ring begins with."""
        self._quantized, self._ring_from = list(quantized), list(ring_from)
        for tensor, numbers in ((self.quantized, quantized), (self.ring_from, ring_from)):
            (ctypes.c_int32 * self.batch).from_address(tensor.data_ptr())[:] = [*numbers]

    def _share_rows(self, sources: Sequence[tuple[PageRows, int]], kept: int) -> None:
        # What was committed: another thread may be in the middle of a step on a source.
        stores = [store for store, _ in sources if isinstance(store, QuantizedStore)]
        self._write_starts([store._starts[i] for store, i in sources])
        full = [store._ring_from[i] for store, (_, i) in zip(stores, sources, strict=True)]
        for b, (store, (_, i)) in enumerate(zip(stores, sources, strict=True)):
            needed = self._window.exact_pages(kept - self._starts[b], full[b], self.page_size)
            self.pages.share(b, store.pages.rows[i][: full[b]])
            self.exact.share(b, store.exact.rows[i][:needed])
        self.pages.point_to_slabs()
        self.exact.point_to_slabs()
        self.set_quantized(full, full)

    def _same_rows(self, other: PageRows) -> bool:
        return (
            isinstance(other, QuantizedStore)
            and super()._same_rows(other)
            and self.exact.arena is other.exact.arena
            and self.exact.rows == other.exact.rows
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor outside its arenas; the table of angles is shared by all layers."""
        return [*super().tensors(), *([] if self.rotary_table is None else [self.rotary_table])]

    def _tables(self) -> list[torch.Tensor]:
        return [*super()._tables(), self.exact.block_table, self.quantized, self.ring_from]

    def _new(self, batch: int) -> PagedStore:
        return QuantizedStore(
            self.layout,
            self.num_kv_heads,
            self.dtype,
            self.device,
            (self.arena, self.exact.arena),
            batch=batch,
            capacity=self.capacity,
            token_dim=self.token_dim,
            rotary_table=self.rotary_table,
        )
