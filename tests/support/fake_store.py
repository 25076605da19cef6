"""The smallest page store: what a kernel needs, every unused byte poisoned, pages anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch

from kvcompile.codegen.layout import RecordLayout

Role = Literal["k", "v"]
POISON = 0xFF
"""0xFFFF.. is NaN in fp32, bf16 and fp16."""


class FakeStore:
    """Pages of one layer in poisoned slabs, handed out in a shuffled order.

    Attributes:
        layout: Layout of the records.
        num_kv_heads: Records per page.
        dtype: Dtype of gathered tensors.
        batch: Rows.
        state: int64[8], what kernels read.
        slabs: uint8 tensors.
    """

    def __init__(
        self,
        layout: RecordLayout,
        *,
        num_kv_heads: int,
        dtype: torch.dtype,
        tokens: int,
        starts: Sequence[int] = (0,),
        seed: int = 0,
        first_slab: int = 0,
        slab_shift: int = 2,
    ) -> None:
        self.layout = layout
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.batch = len(starts)
        self.starts = torch.tensor(starts, dtype=torch.int32)
        columns = -(-tokens // layout.page_size) + 1
        pages = self.batch * columns
        num_slabs = -(-pages // (1 << slab_shift)) + 1
        page_bytes = layout.page_bytes(num_kv_heads)
        size = page_bytes << slab_shift
        self.slabs = [torch.full((size,), POISON, dtype=torch.uint8) for _ in range(num_slabs)]
        self.slab_table = torch.zeros(first_slab + num_slabs, dtype=torch.int64)
        self.slab_table[first_slab:] = torch.tensor([slab.data_ptr() for slab in self.slabs])
        ids = list(range(first_slab << slab_shift, (first_slab + num_slabs) << slab_shift))
        random.Random(seed).shuffle(ids)
        self.block_table = torch.tensor(ids[:pages], dtype=torch.int32).view(self.batch, columns)
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
        self._first_page = first_slab << slab_shift

    def record(self, row: int, page: int, head: int) -> torch.Tensor:
        """Return the record of a KV head in the `page`-th page of a row: a view of bytes."""
        place = int(self.block_table[row, page]) - self._first_page
        shift, page_bytes = int(self.state[4]), int(self.state[5])
        slab, in_slab = place >> shift, place & ((1 << shift) - 1)
        start = in_slab * page_bytes + head * self.layout.record_bytes
        return self.slabs[slab][start : start + self.layout.record_bytes]

    def records(self) -> torch.Tensor:
        """Return a copy of all records in logical order, uint8[B, pages, K, bytes]."""
        rows, columns = self.block_table.shape
        return torch.stack(
            [
                torch.stack(
                    [
                        torch.stack([self.record(b, p, h) for h in range(self.num_kv_heads)])
                        for p in range(columns)
                    ]
                )
                for b in range(rows)
            ]
        )
