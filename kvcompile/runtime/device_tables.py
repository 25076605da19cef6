"""What GPU kernels read of a store: addresses and counts on its device.

The host keeps the books in lists and small host tensors; before a launch what has changed since the
last one is copied. Tensors on the device keep their places as long as their sizes stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.page_table import HOLE

if TYPE_CHECKING:
    from kvcompile.runtime.page_table import PageTable


@dataclass
class _Copy:
    """A tensor on the device, and what it was made from."""

    source: object
    tensor: torch.Tensor


@dataclass
class DeviceTables:
    """The tables of one store.

    Attributes:
        device: Where kernels run.
    """

    device: torch.device
    _copies: dict[str, _Copy] = field(default_factory=dict)

    def addresses(self, name: str, table: PageTable) -> torch.Tensor:
        """Return int64[B, columns], the addresses of the pages of each row; 0 where is none."""
        source = table.version, table.block_table.shape
        copy = self._copies.get(name)
        if copy is not None and copy.source == source:
            return copy.tensor
        pages, arena = table.block_table.long(), table.arena
        slabs = arena.slab_table[(pages >> arena.shift).clamp(0, len(arena.slab_table) - 1)]
        in_slab = (pages & (1 << arena.shift) - 1) * arena.page_bytes
        found = torch.where((pages == HOLE) | (slabs == 0), 0, slabs + in_slab)
        return self._keep(name, source, found)

    def counts(self, name: str, host: torch.Tensor) -> torch.Tensor:
        """Return a small host tensor of the store, as it is now, on the device."""
        if self.device.type == "cpu":
            return host
        copy = self._copies.get(name)
        source = host.tolist()
        if copy is not None and copy.source == source:
            return copy.tensor
        return self._keep(name, source, host)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor."""
        return [copy.tensor for copy in self._copies.values()]

    def _keep(self, name: str, source: object, found: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.tensor.shape != found.shape:
            tensor = found.to(self.device, copy=True)
        else:
            tensor = copy.tensor.copy_(found)
        self._copies[name] = _Copy(source, tensor)
        return tensor


@lru_cache(maxsize=64)
def number_on(device: torch.device, value: int) -> torch.Tensor:
    """Return int64[1] on a device; the layers of a step share it."""
    return torch.tensor([value], device=device)
