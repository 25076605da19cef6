"""The kernels' work in plain torch, for machines without a compiler: slow and right.

Everything is read through the state tensor, exactly as a kernel reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.formats import Role
from kvcompile.reference.attention import attention

if TYPE_CHECKING:
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.runtime.launch import Store


@dataclass(frozen=True)
class _Pages:
    """The pages of a store, found through its state tensor.

    Attributes:
        words: The eight words of the state.
        layout: Layout of the records.
        num_kv_heads: Records per page.
    """

    words: list[int]
    layout: RecordLayout
    num_kv_heads: int

    @property
    def batch(self) -> int:
        return self.words[6]

    def start(self, row: int) -> int:
        """Return the left-padding tokens of a row."""
        return ctypes.c_int32.from_address(self.words[3] + 4 * row).value

    def part(self, row: int, index: int, role: Role) -> torch.Tensor:
        """Return one part of the records of a row's `index`-th page: a view uint8[K, bytes]."""
        entry = self.words[1] + 4 * (row * self.words[2] + index)
        page = ctypes.c_int32.from_address(entry).value
        slab = ctypes.c_int64.from_address(self.words[0] + 8 * (page >> self.words[4])).value
        in_slab = page & ((1 << self.words[4]) - 1)
        size = self.words[5]
        buffer = (ctypes.c_uint8 * size).from_address(slab + in_slab * size)
        records = torch.frombuffer(buffer, dtype=torch.uint8).view(self.num_kv_heads, -1)
        offset = self.layout.v_offset
        return records[:, :offset] if role == "k" else records[:, offset:]

    def runs(self, row: int, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Split the tokens first..end-1 of a row by pages.

        Yields:
            (page index in the row, first slot, first token, tokens).
        """
        size, start = self.layout.page_size, self.start(row)
        token = max(first, start)
        while token < end:
            page, slot = divmod(token - start, size)
            count = min(size - slot, end - token)
            yield page, slot, token, count
            token += count


def _pages(store: Store) -> _Pages:
    return _Pages(store.state.tolist(), store.layout, store.num_kv_heads)


def append(store: Store, k: torch.Tensor | None, v: torch.Tensor | None, past_len: int) -> None:
    """Write k, v [B, K, S, D] as the tokens from `past_len` on; see `launch.append`."""
    pages, layout = _pages(store), store.layout
    roles: list[tuple[Role, torch.Tensor | None]] = [("k", k), ("v", v)]
    for role, new in roles:
        if new is None:
            continue
        format_, shape = layout.format(role), layout.part(role)
        for row in range(pages.batch):
            for page, slot, token, count in pages.runs(row, past_len, past_len + new.shape[2]):
                part = pages.part(row, page, role)
                dense = format_.decode(shape, part).clone()
                first = token - past_len
                dense[:, slot : slot + count] = new[row, :, first : first + count]
                part.copy_(format_.encode(shape, dense))


def gather(
    store: Store, role: Role, start: int, stop: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the tokens start..stop-1 of one role as [B, K, T, D]; see `launch.gather`."""
    pages, layout = _pages(store), store.layout
    format_, part = layout.format(role), layout.part(role)
    sizes = (pages.batch, store.num_kv_heads, stop - start, layout.head_dim(role))
    dense = torch.zeros(sizes, dtype=dtype or store.dtype)
    for row in range(pages.batch):
        for page, slot, token, count in pages.runs(row, start, stop):
            stored = format_.decode(part, pages.part(row, page, role))
            first = token - start
            dense[row, :, first : first + count] = stored[:, slot : slot + count]
    return dense


def attend(
    store: Store,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kv_len: int,
) -> torch.Tensor:
    """Return attention of q [B, H, S, Dk] over the stored tokens; see `launch.attend`."""
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
    out = attention(q.to(compute), k, v, mask=bias, scale=scale).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)
