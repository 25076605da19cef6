"""The smallest page store: what a kernel needs, every unused byte poisoned, pages anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch

from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.spec import Compute

Role = Literal["k", "v"]
POISON = 0xFF
"""0xFFFF.. is NaN in fp32, bf16 and fp16."""


class FakeStore:
    """Pages of one layer, poisoned and handed out in a shuffled order.

    Attributes:
        layout: Layout of the records.
        compute: None: the pages are exact.
        num_kv_heads: Records per page.
        dtype: Dtype of gathered tensors.
        batch: Rows.
        hidden: Tokens before column 0; none.
        state: int64[8], what kernels read.
        memory: All pages, uint8[pages, K, record bytes], in the order of their ids.
    """

    hidden = 0
    extra_roundings = 0
    """Of an element, on the way from its word to a product: see `Problem.bound`."""

    def __init__(
        self,
        layout: RecordLayout,
        *,
        num_kv_heads: int,
        dtype: torch.dtype,
        tokens: int,
        starts: Sequence[int] = (0,),
        seed: int = 0,
        first_page: int = 0,
        slab_shift: int = 2,
    ) -> None:
        """Make an empty store.

        Args:
            layout: Layout of the records.
            num_kv_heads: Records per page.
            dtype: Dtype of gathered tensors.
            tokens: Tokens that must fit into a row.
            starts: Left-padding tokens per row.
            seed: Decides where the pages lie.
            first_page: Lowest page id. The pages below it are never touched and do not exist:
                the addresses of their slabs are zero, or lie before the memory that is there.
            slab_shift: log2(pages per slab).
        """
        self.layout = layout
        self.compute: Compute | None = None
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.batch = len(starts)
        self.starts = torch.tensor(starts, dtype=torch.int32)
        columns = -(-tokens // layout.page_size) + 1
        pages = self.batch * columns + 3
        page_bytes = layout.page_bytes(num_kv_heads)
        self.memory = torch.full((pages, num_kv_heads, layout.record_bytes), POISON).byte()
        base = self.memory.data_ptr() - first_page * page_bytes
        slabs = range((first_page >> slab_shift), (first_page + pages >> slab_shift) + 1)
        self.slab_table = torch.zeros(slabs.stop, dtype=torch.int64)
        for slab in slabs:
            self.slab_table[slab] = base + (slab << slab_shift) * page_bytes
        ids = list(range(first_page, first_page + pages))
        random.Random(seed).shuffle(ids)
        self.block_table = torch.tensor(ids[:-3], dtype=torch.int32).view(self.batch, columns)
        self.state = torch.tensor(
            [
                self.slab_table.data_ptr(),
                self.block_table.data_ptr(),
                columns,
                self.starts.data_ptr(),
                slab_shift,
                page_bytes,
                self.batch,
                0,
            ]
        )
        self._first_page = first_page

    def records(self) -> torch.Tensor:
        """Return a copy of all records in logical order, uint8[B, pages, K, bytes]."""
        return self.memory[self.block_table.long() - self._first_page]

    def stored(self, role: Role, tokens: int) -> torch.Tensor:
        """Return the tokens below `tokens` of one role as [B, K, T, D], left padding as zeros."""
        dense = self.layout.unpack(self.records())[role == "v"].transpose(1, 2).flatten(2, 3)
        shifted = torch.zeros(*dense.shape[:2], tokens, dense.shape[3], dtype=dense.dtype)
        for row, start in enumerate(self.starts.tolist()):
            shifted[row, :, start:] = dense[row, :, : max(tokens - start, 0)]
        return shifted

    def terms(self, role: Role, tokens: int) -> torch.Tensor:
        """Return the sum of the magnitudes that each element is computed from: itself."""
        return self.stored(role, tokens).abs()
