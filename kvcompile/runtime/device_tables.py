"""What GPU kernels read of a store: addresses and counts on its device.

The host keeps the books in lists and small host tensors; before a launch what has changed since the
last one is copied. Copies do not wait for the device: they come from ordinary memory, which a
driver reads before it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from kvcompile.runtime.page_table import HOLE

if TYPE_CHECKING:
    from kvcompile.runtime.page_table import PageTable

TableName = Literal["pages", "exact"]
CountName = Literal["starts", "quantized", "ring_from"]
NumberName = Literal["past_len", "kv_len"]


class Tables(Protocol):
    """Tables of one store, as launches take them."""

    def addresses(self, name: TableName, table: PageTable) -> torch.Tensor:
        """Return int64[B, columns], the addresses of the pages of each row; 0 where is none."""
        ...

    def counts(self, name: CountName, host: torch.Tensor) -> torch.Tensor:
        """Return a small host tensor of the store, as it is now, on the device."""
        ...

    def number(self, name: NumberName, value: int) -> torch.Tensor:
        """Return a length as int64[1] on the device."""
        ...

    def most_tokens(self, kv_len: int) -> int:
        """Return the tokens that the programs of an attention are chosen for."""
        ...

    def most_quantized(self, count: int) -> int:
        """Return the pages of a row that programs of an append are launched for."""
        ...


@dataclass
class _Copy:
    """A tensor on the device, and what it was made from."""

    source: object
    tensor: torch.Tensor


@dataclass
class DeviceTables:
    """The tables of one store, with the sizes that it has now; see `Tables`.

    Tensors on the device keep their places as long as their sizes stay.

    Attributes:
        device: Where kernels run.
    """

    device: torch.device
    _copies: dict[str, _Copy] = field(default_factory=dict)

    def addresses(self, name: TableName, table: PageTable) -> torch.Tensor:
        """Return int64[B, columns], the addresses of the pages of each row; 0 where is none."""
        source = table.version, table.block_table.shape
        copy = self._copies.get(name)
        if copy is not None and copy.source == source:
            return copy.tensor
        return self._keep(name, source, page_addresses(table))

    def counts(self, name: CountName, host: torch.Tensor) -> torch.Tensor:
        """Return a small host tensor of the store, as it is now, on the device."""
        if self.device.type == "cpu":
            return host
        copy = self._copies.get(name)
        source = host.tolist()
        if copy is not None and copy.source == source:
            return copy.tensor
        return self._keep(name, source, host)

    def number(self, name: NumberName, value: int) -> torch.Tensor:
        """Return a length as int64[1] on the device; the layers of a step share it."""
        del name
        return _number_on(self.device, value)

    def most_tokens(self, kv_len: int) -> int:
        """Return the tokens that there are."""
        return kv_len

    def most_quantized(self, count: int) -> int:
        """Return the pages that there are."""
        return count

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor."""
        return [copy.tensor for copy in self._copies.values()]

    def _keep(self, name: str, source: object, found: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.tensor.shape != found.shape:
            tensor = found.to(self.device, non_blocking=True, copy=True)
        else:
            tensor = copy.tensor.copy_(found, non_blocking=True)
        self._copies[name] = _Copy(source, tensor)
        return tensor


def page_addresses(table: PageTable) -> torch.Tensor:
    """Return int64[B, columns] in main memory: the address of each page, 0 where is none."""
    pages, arena = table.block_table.long(), table.arena
    slabs = arena.slab_table[(pages >> arena.shift).clamp(0, len(arena.slab_table) - 1)]
    in_slab = (pages & (1 << arena.shift) - 1) * arena.page_bytes
    return torch.where((pages == HOLE) | (slabs == 0), 0, slabs + in_slab)


@lru_cache(maxsize=64)
def _number_on(device: torch.device, value: int) -> torch.Tensor:
    return torch.tensor([value]).to(device, non_blocking=True)
