"""What a cache format is: the bytes of one page of K or V of one KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Role = Literal["k", "v"]

Order = Literal["cpu16", "gpu16"]
"""How numbers lie in a part: for vector registers of 16 tokens, or for tiles of 16-bit words."""

TILE = 16
"""Tokens that lie side by side in K, so that a vector register holds tokens."""

CHANNEL_MULTIPLE = 8


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_channels(head_dim: int) -> int:
    """Return the channels an exact part holds for `head_dim`: pad channels are zeros."""
    return round_up(head_dim, CHANNEL_MULTIPLE)


@dataclass(frozen=True)
class PartShape:
    """What one part of a record holds.

    Attributes:
        role: K or V.
        page_size: P, tokens.
        head_dim: D, channels.
        group_size: Channels of V that share a scale; the group of K is its page.
        order: How its numbers lie.
    """

    role: Role
    page_size: int
    head_dim: int
    group_size: int
    order: Order = "cpu16"

    @property
    def byte_multiple(self) -> int:
        """What the bytes of a part are a multiple of: a cache line, or the widest load of a GPU."""
        return 64 if self.order == "cpu16" else 16

    def channel_groups(self) -> list[range]:
        """Return the channels that share a scale within a token of V."""
        size = self.group_size
        return [range(c, min(c + size, self.head_dim)) for c in range(0, self.head_dim, size)]


@dataclass(frozen=True)
class Coded:
    """The numbers of a part, wherever they lie.

    Attributes:
        codes: int32[..., P, C] with the pad channels; of an exact format its words [..., P, D].
        scales: Per group of channels its scale and, if it has one, its minimum: fp32 tensors that
            are bf16 numbers, K's [..., D], V's [..., P].
    """

    codes: torch.Tensor
    scales: list[list[torch.Tensor]]


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
        """Type of decoded values."""
        ...

    @property
    def is_grouped(self) -> bool:
        """Whether elements share scales, so that a page is written once and as a whole."""
        ...

    @property
    def has_minimum(self) -> bool:
        """Whether the levels of a group begin at a minimum that is stored, instead of at zero."""
        ...

    @property
    def smallest_page(self) -> int:
        """Fewest tokens of a page: those whose codes fill the bytes of a vector."""
        ...

    def channels(self, shape: PartShape) -> int:
        """Return the channels stored, pad channels included."""
        ...

    def part_bytes(self, shape: PartShape) -> int:
        """Return the bytes of one part of a record, a multiple of `byte_multiple`."""
        ...

    def quantize(self, shape: PartShape, dense: torch.Tensor) -> Coded:
        """Return the numbers that stand for dense[..., P, D]."""
        ...

    def dequantize(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Return the numbers as dense[..., P, D] of type `dtype`."""
        ...

    def join(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Lay numbers out as uint8[..., part_bytes]."""
        ...

    def split(self, shape: PartShape, stored: torch.Tensor) -> Coded:
        """Undo `join`."""
        ...


def encode(format_: Format, shape: PartShape, dense: torch.Tensor) -> torch.Tensor:
    """Store dense[..., P, D] as uint8[..., part_bytes]."""
    return format_.join(shape, format_.quantize(shape, dense))


def decode(format_: Format, shape: PartShape, stored: torch.Tensor) -> torch.Tensor:
    """Return uint8[..., part_bytes] as dense[..., P, D] of the format's type."""
    return format_.dequantize(shape, format_.split(shape, stored))
