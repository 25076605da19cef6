"""The kernels' work in plain torch, for machines without a compiler: slow and right.

Everything is read through the state tensor, exactly as a kernel reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import TILE, Role
from kvcompile.codegen.state import (
    BATCH,
    EXACT_PAGES,
    PAGES,
    QUANTIZED,
    RING_FROM,
    ROTARY,
    STARTS,
)
from kvcompile.runtime.rope import Rope, rotate
from kvcompile.runtime.variant import PLAIN, Variant

if TYPE_CHECKING:
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.runtime.launch import Store


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens of a row that lie in one page.

    Attributes:
        exact: Whether the page is one of the exact pages beside quantized ones.
        page: Number of the page in its table.
        slot: Slot of the first token.
        token: Position of the first token, left padding included.
        count: Tokens.
    """

    exact: bool
    page: int
    slot: int
    token: int
    count: int


@dataclass(frozen=True)
class _Part:
    """One part of the records of a page.

    Attributes:
        layout: Layout of the records.
        role: Which part.
        stored: uint8[K, part].
        rotary_table: The angles that K turns by, if its turning mean is kept.
    """

    layout: RecordLayout
    role: Role
    stored: torch.Tensor
    rotary_table: torch.Tensor | None

    def read(self) -> torch.Tensor:
        """Return the page as [K, P, D]."""
        return self.layout.decode(self.role, self.stored, self.rotary_table)

    def write(self, dense: torch.Tensor) -> None:
        """Store the page [K, P, D]."""
        self.stored.copy_(self.layout.encode(self.role, dense, self.rotary_table))


@dataclass(frozen=True)
class _Pages:
    """The pages of a store, found through its state tensor.

    Attributes:
        words: The words of the state.
        layout: Layout of the records.
        num_kv_heads: Records per page.
        rotary_table: The angles that K turns by, if its turning mean is kept.
    """

    words: list[int]
    layout: RecordLayout
    num_kv_heads: int
    rotary_table: torch.Tensor | None

    @property
    def batch(self) -> int:
        return self.words[BATCH]

    def start(self, row: int) -> int:
        """Return the left-padding tokens of a row."""
        return self._count(STARTS, row)

    def quantized(self, row: int) -> range:
        """Return the pages that an append has to quantize: those from the ring's begin on."""
        return range(self._count(RING_FROM, row), self._count(QUANTIZED, row))

    def part(self, row: int, run: _Run, role: Role) -> _Part:
        """Return one part of the records of a page."""
        layout = self.layout.exact if run.exact else self.layout
        words = EXACT_PAGES if run.exact else PAGES
        entry = self.words[words.block_table] + 4 * (row * self.words[words.row_stride] + run.page)
        page = ctypes.c_int32.from_address(entry).value
        shift, size = self.words[words.slab_shift], self.words[words.page_bytes]
        slab = self.words[words.slab_table] + 8 * (page >> shift)
        in_slab = page & ((1 << shift) - 1)
        address = ctypes.c_int64.from_address(slab).value + in_slab * size
        buffer = (ctypes.c_uint8 * size).from_address(address)
        records = torch.frombuffer(buffer, dtype=torch.uint8).view(self.num_kv_heads, -1)
        offset = layout.v_offset
        part = records[:, :offset] if role == "k" else records[:, offset:]
        return _Part(layout, role, part, self.rotary_table)

    def runs(self, row: int, first: int, end: int) -> Iterator[_Run]:
        """Split the tokens first..end-1 of a row by pages."""
        start = self.start(row)
        token = max(first, start)
        while token < end:
            run = self._run_at(row, token - start, end - start)
            yield replace(run, token=token)
            token += run.count

    def _run_at(self, row: int, index: int, end: int) -> _Run:
        """Return the run that begins with the `index`-th stored token of a row."""
        window, size = self.layout.window, self.layout.page_size
        if window is None:
            return self._in_page(index, end, 0, size)
        sinks, pages = window.num_sink_tokens, window.sink_pages
        quantized = self.quantized(row)
        if index < sinks:
            return replace(self._in_page(index, min(end, sinks), 0, TILE), exact=True)
        if index < sinks + quantized.stop * size:
            return self._in_page(index, min(end, sinks + quantized.stop * size), sinks, size)
        run = self._in_page(index, end, sinks + quantized.start * size, TILE)
        return replace(run, exact=True, page=pages + run.page)

    @staticmethod
    def _in_page(index: int, end: int, first: int, size: int) -> _Run:
        page, slot = divmod(index - first, size)
        return _Run(False, page, slot, index, min(size - slot, end - index))

    def _count(self, word: int, row: int) -> int:
        return ctypes.c_int32.from_address(self.words[word] + 4 * row).value


def _pages(store: Store) -> _Pages:
    if store.device.type != "cpu":
        raise UnsupportedKernelError(
            f"the pages of a cache lie on {store.device}, where kernels alone can read them, and "
            "one cannot be had; kvcompile.notices() says why"
        )
    words, layout = store.state.tolist(), store.layout
    table = None
    if layout.rotary is not None:
        count = layout.rotary.table_words(layout.page_size)
        buffer = (ctypes.c_float * count).from_address(words[ROTARY])
        table = torch.frombuffer(buffer, dtype=torch.float32)
    return _Pages(words, layout, store.num_kv_heads, table)


def append(
    store: Store,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    past_len: int,
    rope: Rope | None = None,
) -> None:
    """Write k, v [B, K, S, D] as the tokens from `past_len` on; see `launch.append`."""
    if k is not None and rope is not None:
        k = rotate(k, rope)
    pages = _pages(store)
    new = k if k is not None else v
    end = past_len + (0 if new is None else new.shape[2])
    roles: list[tuple[Role, torch.Tensor | None]] = [("k", k), ("v", v)]
    for row in range(pages.batch):
        for role, given in roles:
            if given is None:
                continue
            for run in pages.runs(row, past_len, end):
                if store.layout.window is not None and not run.exact:
                    continue
                part = pages.part(row, run, role)
                dense = part.read().clone()
                first = run.token - past_len
                dense[:, run.slot : run.slot + run.count] = given[row, :, first : first + run.count]
                part.write(dense)
        if store.layout.window is not None:
            _quantize(pages, row, {"k": k, "v": v}, past_len)


def _quantize(pages: _Pages, row: int, new: dict[Role, torch.Tensor | None], past_len: int) -> None:
    """Fill the pages of a row that have become old enough, from the ring and the new tokens."""
    window, size = pages.layout.window, pages.layout.page_size
    assert window is not None
    todo = pages.quantized(row)
    ring_begin = window.num_sink_tokens + todo.start * size
    for page in todo:
        first = window.num_sink_tokens + page * size
        # Tokens before `old` are in the ring already.
        old = min(max(past_len - pages.start(row) - first, 0), size)
        for role, given in new.items():
            parts = []
            for index in range(first, first + old, TILE):
                entry = window.sink_pages + (index - ring_begin) // TILE
                count = min(TILE, first + old - index)
                parts.append(
                    pages.part(row, _Run(True, entry, 0, 0, count), role).read()[:, :count]
                )
            if old < size:
                assert given is not None
                begin = first + old + pages.start(row) - past_len
                parts.append(given[row, :, begin : begin + size - old])
            dense = torch.cat([p.to(torch.float32) for p in parts], dim=1)
            pages.part(row, _Run(False, page, 0, 0, size), role).write(dense)


def gather(
    store: Store, role: Role, start: int, stop: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the tokens start..stop-1 of one role as [B, K, T, D]; see `launch.gather`."""
    pages = _pages(store)
    sizes = (pages.batch, store.num_kv_heads, stop - start, store.layout.head_dim(role))
    dense = torch.zeros(sizes, dtype=dtype or store.dtype)
    for row in range(pages.batch):
        for run in pages.runs(row, start, stop):
            stored = pages.part(row, run, role).read()[:, run.slot : run.slot + run.count]
            first = run.token - start
            dense[row, :, first : first + run.count] = stored
    return dense


def attend(
    store: Store,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kv_len: int,
    rope: Rope | None = None,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """Return attention of q [B, H, S, Dk] over the stored tokens; see `launch.attend`."""
    if rope is not None:
        q = rotate(q, rope)
    pages = _pages(store)
    compute = torch.promote_types(q.dtype, torch.float32)
    k = gather(store, "k", 0, kv_len, compute)
    v = gather(store, "v", 0, kv_len, compute)
    starts = torch.tensor([pages.start(row) for row in range(pages.batch)])
    visible = (torch.arange(kv_len) >= starts[:, None])[:, None, None]
    if causal:
        visible = visible & torch.ones(q.shape[2], kv_len, dtype=torch.bool).tril()
    bias = torch.zeros((), dtype=compute).masked_fill(~visible, -torch.inf)
    if mask is not None:
        given = mask if mask.shape[-1] == 1 else mask[..., :kv_len]
        if given.dtype is torch.bool:
            bias = bias.masked_fill(~given, -torch.inf)
        else:
            bias = (bias + given.to(compute)).masked_fill(~visible, -torch.inf)
    return variant.attend(q, k, v, bias, False, scale)
