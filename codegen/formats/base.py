"""What a cache format is: the bytes of one page of K or V of one KV head."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

Role = Literal["k", "v"]

TILE = 16
"""Tokens that lie side by side in K, so that a vector register holds tokens."""

CHANNEL_MULTIPLE = 8
PART_MULTIPLE = 64


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_channels(head_dim: int) -> int:
    """Return the channels a record holds for `head_dim`: pad channels are stored as zeros."""
    return round_up(head_dim, CHANNEL_MULTIPLE)


class Format(Protocol):
    """How one role (K or V) of one page of one KV head is stored."""

    @property
    def name(self) -> str:
        """Name used in specs and options."""
        ...

    @property
    def bits(self) -> int:
        """Bits per stored element, without scales."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type that holds every decoded value exactly."""
        ...

    def part_bytes(self, role: Role, page_size: int, head_dim: int) -> int:
        """Return the bytes of one part of a record, a multiple of 64."""
        ...

    def encode(self, role: Role, dense: torch.Tensor) -> torch.Tensor:
        """Store dense[..., P, D] as uint8[..., part_bytes]."""
        ...

    def decode(
        self, role: Role, stored: torch.Tensor, *, page_size: int, head_dim: int
    ) -> torch.Tensor:
        """Return uint8[..., part_bytes] as dense[..., P, D] of type `dtype`."""
        ...
