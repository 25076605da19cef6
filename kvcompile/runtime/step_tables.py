"""Tables of all layers of a decode step that keep their places and sizes from step to step.

A recorded step reads them where it read them when it was recorded; whichever caches it is replayed
for, the host writes their pages and counts there first. One copy brings all lengths to the device,
another one all counts, a third one all addresses; the latter two only where something has changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.device_tables import CountName, NumberName, TableName, page_addresses
from kvcompile.runtime.quantized_store import QuantizedStore

if TYPE_CHECKING:
    from kvcompile.runtime.page_table import PageTable
    from kvcompile.runtime.store import PagedStore

ALIGNMENT = 16
"""Bytes. Kernels are compiled anew for a pointer that is aligned otherwise."""

COUNTS: tuple[CountName, ...] = ("starts", "quantized", "ring_from")
NUMBERS: tuple[NumberName, ...] = ("past_len", "kv_len")


class _Block:
    """A tensor in main memory and its copy on the device, cut into named parts."""

    def __init__(
        self,
        parts: dict[tuple[int, str], tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make room for parts of [rows, columns] numbers."""
        step = ALIGNMENT // dtype.itemsize
        offset, offsets = 0, {}
        for key, (rows, columns) in parts.items():
            offsets[key] = offset
            offset += -(-rows * columns // step) * step
        self._host = torch.zeros(offset, dtype=dtype)
        self._device = torch.zeros(offset, dtype=dtype, device=device)
        self.host = {k: _cut(self._host, offsets[k], sizes) for k, sizes in parts.items()}
        self.device = {k: _cut(self._device, offsets[k], sizes) for k, sizes in parts.items()}

    def send(self) -> None:
        """Bring the device's copy up to date; nothing waits for it."""
        self._device.copy_(self._host, non_blocking=True)


def _cut(flat: torch.Tensor, offset: int, sizes: tuple[int, int]) -> torch.Tensor:
    return flat[offset : offset + sizes[0] * sizes[1]].view(sizes)


class StepTables:
    """The tables of the stores of one step.

    Attributes:
        streams: What each store is lent for the step.
    """

    def __init__(self, stores: Sequence[PagedStore], new_len: int) -> None:
        """Make room for stores of these sizes.

        Args:
            stores: Static stores in the order of the streams.
            new_len: Tokens that a step appends.
        """
        device, batch = stores[0].device, stores[0].batch
        pages: dict[tuple[int, str], tuple[int, int]] = {}
        for i, store in enumerate(stores):
            assert store.capacity is not None
            pages[i, "pages"] = batch, -(-store.capacity // store.page_size)
            if isinstance(store, QuantizedStore):
                pages[i, "exact"] = batch, store.most_exact_pages(new_len)
        self._addresses = _Block(pages, torch.int64, device)
        counts: dict[tuple[int, str], tuple[int, int]] = {
            (i, name): (1, batch) for i in range(len(stores)) for name in COUNTS
        }
        self._counts = _Block(counts, torch.int32, device)
        # Two numbers apart, so that each is aligned.
        self._lengths = torch.zeros(len(stores), len(NUMBERS), 2, dtype=torch.int64)
        self._numbers = self._lengths.to(device, copy=True)
        self._loaded_pages: list[object] = [None] * len(stores)
        self._loaded_counts: list[object] = [None] * len(stores)
        self.streams = [
            StreamTables(
                {name: part for (n, name), part in self._addresses.device.items() if n == i},
                {name: self._counts.device[i, name][0] for name in COUNTS},
                {name: self._numbers[i, n, :1] for n, name in enumerate(NUMBERS)},
                capacity,
                -(-new_len // store.page_size),
            )
            for i, store in enumerate(stores)
            if (capacity := store.capacity) is not None
        ]

    def load(self, stores: Sequence[PagedStore], lengths: Sequence[tuple[int, int]]) -> None:
        """Write what the next step reads.

        Args:
            stores: Stores of the sizes that room was made for; their pages are there.
            lengths: Of each store, the tokens before the new ones, and those to attend to.
        """
        written = [n for pair in lengths for number in pair for n in (number, 0)]
        (ctypes.c_int64 * len(written)).from_address(self._lengths.data_ptr())[:] = [*written]
        self._numbers.copy_(self._lengths, non_blocking=True)
        try:
            new_counts = [self._load_counts(i, store) for i, store in enumerate(stores)]
            if any(new_counts):
                self._counts.send()
            new_pages = [self._load_pages(i, store) for i, store in enumerate(stores)]
            if any(new_pages):
                self._addresses.send()
        except BaseException:
            # What is written here may not have been sent.
            self._loaded_pages = [None] * len(stores)
            self._loaded_counts = [None] * len(stores)
            raise

    def _load_counts(self, i: int, store: PagedStore) -> bool:
        """Write the counts of a store if they are others; return whether they are."""
        counts = store.row_counts()
        if self._loaded_counts[i] == counts:
            return False
        for name, numbers in counts.items():
            self._counts.host[i, name].copy_(torch.tensor([numbers], dtype=torch.int32))
        self._loaded_counts[i] = counts
        return True

    def _load_pages(self, i: int, store: PagedStore) -> bool:
        """Write the pages of a store if they are others; return whether they are."""
        tables: dict[str, PageTable] = {"pages": store.pages}
        if isinstance(store, QuantizedStore):
            tables["exact"] = store.exact
        now = store.key, [table.version for table in tables.values()]
        if self._loaded_pages[i] == now:
            return False
        for name, table in tables.items():
            room, found = self._addresses.host[i, name], page_addresses(table)
            columns = min(room.shape[1], found.shape[1])
            room[:, :columns] = found[:, :columns]
        self._loaded_pages[i] = now
        return True


@dataclass(frozen=True)
class StreamTables:
    """The tables of one store, always in the same places and of the same sizes; see `Tables`.

    Attributes:
        pages: Addresses by name.
        small: Counts by name.
        numbers: Lengths by name.
        capacity: Tokens of the static buffer.
        new_pages: Pages of a row that one step can quantize.
    """

    pages: dict[str, torch.Tensor]
    small: dict[CountName, torch.Tensor]
    numbers: dict[NumberName, torch.Tensor]
    capacity: int
    new_pages: int

    def addresses(self, name: TableName, table: PageTable) -> torch.Tensor:
        """Return int64[B, columns], the addresses of the pages of each row; 0 where is none."""
        del table
        return self.pages[name]

    def counts(self, name: CountName, host: torch.Tensor) -> torch.Tensor:
        """Return a count of each row."""
        del host
        return self.small[name]

    def number(self, name: NumberName, value: int) -> torch.Tensor:
        """Return a length as int64[1]."""
        del value
        return self.numbers[name]

    def most_tokens(self, kv_len: int) -> int:
        """Return the capacity: the programs are the same for all lengths."""
        return max(kv_len, self.capacity)

    def most_quantized(self, count: int) -> int:
        """Return as many pages as a step can quantize."""
        return max(count, self.new_pages)
