"""The smallest store of quantized pages: built from dense tensors, every unused byte poisoned."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from kvcompile.codegen.formats import TILE, Role
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import MEANS
from kvcompile.codegen.spec import Compute
from tests.support.fake_store import POISON
from tests.support.rotary import mean_sizes

SLAB_SHIFT = 2


class _Pool:
    """Pages of one kind, poisoned and handed out in a shuffled order."""

    def __init__(self, layout: RecordLayout, heads: int, pages: int, seed: int, first: int) -> None:
        self.memory = torch.full((pages + 3, heads, layout.record_bytes), POISON).byte()
        self.page_bytes = layout.page_bytes(heads)
        self._first = first // self.page_bytes
        end = self._first + pages + 3
        starts = torch.arange((end >> SLAB_SHIFT) + 1) * (self.page_bytes << SLAB_SHIFT)
        # The pages below the first do not exist: their addresses lie before the memory.
        self.slab_table = starts + self.memory.data_ptr() - self._first * self.page_bytes
        self._ids = list(range(self._first, end))
        random.Random(seed).shuffle(self._ids)
        # What a table says where no page is: a page of poison.
        self.nowhere = self._ids.pop()

    def place(self, record: torch.Tensor) -> int:
        """Store uint8[K, bytes] as a page and return its id."""
        page = self._ids.pop()
        self.memory[page - self._first] = record
        return page


class QuantizedFakeStore:
    """Sinks, quantized pages and ring of one layer.

    Attributes:
        layout: Layout of the records.
        num_kv_heads: Records per page.
        dtype: Dtype of the model.
        compute: How launched kernels multiply.
        batch: Rows.
        starts: int32[B], left padding.
        state: int64[16], what kernels read.
    """

    extra_roundings = 3
    """A scale is multiplied in, a minimum added, and the dense element is their rounded sum."""

    MEAN_ROUNDINGS = 2 * MEANS + 3
    """A query times a mean is rounded three times, and added with a cosine and a sine per mean."""

    def __init__(
        self,
        layout: RecordLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        starts: Sequence[int],
        quantized: Sequence[int],
        ring_from: Sequence[int] | None = None,
        seed: int = 0,
        first_byte: int = 0,
        rotary_table: torch.Tensor | None = None,
    ) -> None:
        """Store k, v [B, K, T, D].

        Args:
            layout: Layout of the records.
            k: Keys, of the dtype of the model.
            v: Values.
            starts: Left-padding tokens per row.
            quantized: Quantized pages of each row.
            ring_from: Quantized page at which the ring of each row begins; the tokens from there
                to the last quantized page have entries in the exact table, and no page. By
                default the ring begins behind the quantized pages.
            seed: Decides where the pages lie.
            first_byte: How many bytes of each kind of pages come before those of this store.
            rotary_table: The angles that K turns by, if its turning mean is kept.
        """
        assert layout.window is not None
        self.layout = layout
        self.rotary_table = rotary_table
        if rotary_table is not None:
            self.extra_roundings += self.MEAN_ROUNDINGS
        self.num_kv_heads = k.shape[1]
        self.dtype = k.dtype
        self.batch = len(starts)
        self.compute: Compute | None = "fp32"
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.quantized = torch.tensor(quantized, dtype=torch.int32)
        self.ring_from = torch.tensor(
            quantized if ring_from is None else ring_from, dtype=torch.int32
        )
        size, sinks, tokens = layout.page_size, layout.window.num_sink_tokens, k.shape[2]
        columns = max([*quantized, 0]) + 2
        exact_columns = layout.window.sink_pages + -(-tokens // TILE) + 2
        self._dense = {role: torch.zeros(x.shape) for role, x in self._roles(k, v)}
        self._terms = {role: torch.zeros(x.shape) for role, x in self._roles(k, v)}
        pages = _Pool(layout, self.num_kv_heads, sum(quantized), seed, first_byte)
        exact = _Pool(
            layout.exact, self.num_kv_heads, self.batch * exact_columns, seed + 1, first_byte
        )
        self.block_table = torch.full((self.batch, columns), pages.nowhere, dtype=torch.int32)
        self.exact_table = torch.full((self.batch, exact_columns), exact.nowhere, dtype=torch.int32)
        for b, start in enumerate(starts):
            first_exact = sinks + quantized[b] * size
            assert first_exact <= max(tokens - start, sinks), "quantized tokens must exist"
            for page in range(quantized[b]):
                first = start + sinks + page * size
                page_k, page_v = (x[b, :, first : first + size] for x in (k, v))
                record = layout.pack(page_k, page_v, rotary_table)
                self.block_table[b, page] = pages.place(record)
                self._note(b, first, layout, record)
            shift = layout.window.sink_pages - int(self.ring_from[b]) * size // TILE
            runs = [(0, min(sinks, tokens - start), 0), (first_exact, tokens - start, shift)]
            for begin, end, entries in runs:
                for first in range(begin, end, TILE):
                    last = min(first + TILE, end)
                    # The slots behind the last token are NaN.
                    parts = [
                        torch.full((self.num_kv_heads, TILE, x.shape[3]), math.nan) for x in (k, v)
                    ]
                    for part, x in zip(parts, (k, v), strict=True):
                        part[:, : last - first] = x[b, :, start + first : start + last]
                    record = layout.exact.pack(*parts)
                    entry = first // TILE if begin == 0 else (first - sinks) // TILE + entries
                    self.exact_table[b, entry] = exact.place(record)
                    self._note(b, start + first, layout.exact, record, last - first)
        self._pools = (pages, exact)
        self.state = torch.zeros(16, dtype=torch.int64)
        words = {
            **self._words(pages, self.block_table, (0, 1, 2, 4, 5)),
            **self._words(exact, self.exact_table, (8, 9, 10, 11, 12)),
            3: self.starts.data_ptr(),
            6: self.batch,
            13: self.quantized.data_ptr(),
            14: self.ring_from.data_ptr(),
            15: 0 if rotary_table is None else rotary_table.data_ptr(),
        }
        for place, word in words.items():
            self.state[place] = word

    def stored(self, role: Role, tokens: int) -> torch.Tensor:
        """Return the tokens below `tokens` as they are stored, [B, K, T, D], padding as zeros."""
        return self._dense[role][:, :, :tokens]

    def terms(self, role: Role, tokens: int) -> torch.Tensor:
        """Return |scale * code| + |minimum| of each element, or |x| if it is exact."""
        return self._terms[role][:, :, :tokens]

    @staticmethod
    def _roles(k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[Role, torch.Tensor], ...]:
        return ("k", k), ("v", v)

    def _note(
        self,
        row: int,
        first: int,
        layout: RecordLayout,
        record: torch.Tensor,
        count: int | None = None,
    ) -> None:
        """Remember what a record says of the tokens from `first` on."""
        decoded = layout.unpack(record, self.rotary_table)
        lowest = layout.unpack(_without_codes(layout, record), self.rotary_table)
        means = mean_sizes(layout, record)
        for (role, x), minimum in zip(self._roles(*decoded), lowest, strict=True):
            kept = x[:, :count].float()
            end = first + kept.shape[1]
            self._dense[role][row, :, first:end] = kept
            if layout.format(role).is_grouped:
                minimum = minimum[:, :count]
                size = (kept - minimum).abs() + minimum.abs()
                if role == "k" and layout.rotary is not None:
                    size = size + 2 * means[:, :count]
                self._terms[role][row, :, first:end] = size
            else:
                self._terms[role][row, :, first:end] = kept.abs()

    @staticmethod
    def _words(pool: _Pool, table: torch.Tensor, places: Sequence[int]) -> dict[int, int]:
        words = (
            pool.slab_table.data_ptr(),
            table.data_ptr(),
            table.shape[1],
            SLAB_SHIFT,
            pool.page_bytes,
        )
        return dict(zip(places, words, strict=True))


def _without_codes(layout: RecordLayout, record: torch.Tensor) -> torch.Tensor:
    """Return a record whose grouped parts hold code 0 everywhere: it decodes to the minima."""
    record = record.clone()
    roles: tuple[Role, Role] = ("k", "v")
    for role in roles:
        format_, shape = layout.format(role), layout.part(role)
        if format_.is_grouped:
            begin = layout.v_offset if role == "v" else 0
            codes = shape.page_size * format_.channels(shape) * format_.bits // 8
            # 8-bit codes of V are stored as c - 128.
            flipped = format_.name == "int8" and role == "v"
            record[..., begin : begin + codes] = 128 if flipped else 0
    return record
