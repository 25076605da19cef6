"""RecordLayout: where the bytes of one page of one KV head lie, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvcompile.codegen.formats import TILE, Role, get_format

PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a record: [K part | V part] of one page of one KV head.

    Attributes:
        k_format: Name of the format of K.
        v_format: Name of the format of V.
        head_dim_qk: Channels of a key.
        head_dim_vo: Channels of a value.
        page_size: Tokens in a page.
    """

    k_format: str
    v_format: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UnsupportedKernelError: A format is unknown.
            ValueError: `page_size` or a head dimension is out of range.
        """
        get_format(self.k_format)
        get_format(self.v_format)
        if self.page_size not in PAGE_SIZES or self.page_size % TILE:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}")
        if min(self.head_dim_qk, self.head_dim_vo) < 1:
            raise ValueError("head dimensions must be positive")

    @cached_property
    def symbol(self) -> str:
        """A short injective name, kept as one string so that it is a cheap dictionary key."""
        return (
            f"k{self.k_format}_v{self.v_format}"
            f"_d{self.head_dim_qk}v{self.head_dim_vo}_p{self.page_size}"
        )

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of the K part."""
        return get_format(self.k_format).part_bytes("k", self.page_size, self.head_dim_qk)

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of the V part."""
        return get_format(self.v_format).part_bytes("v", self.page_size, self.head_dim_vo)

    @property
    def k_offset(self) -> int:
        """Offset of the K part in a record."""
        return 0

    @property
    def v_offset(self) -> int:
        """Offset of the V part in a record."""
        return self.k_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.k_bytes + self.v_bytes

    def page_bytes(self, num_kv_heads: int) -> int:
        """Return the bytes of a page of `num_kv_heads` records."""
        return num_kv_heads * self.record_bytes

    def head_dim(self, role: Role) -> int:
        """Return the channels of a key or of a value."""
        return self.head_dim_qk if role == "k" else self.head_dim_vo

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k[..., P, Dk] and v[..., P, Dv] as uint8[..., record_bytes]."""
        k_part = get_format(self.k_format).encode("k", k)
        v_part = get_format(self.v_format).encode("v", v)
        return torch.cat([k_part, v_part], dim=-1)

    def unpack(self, record: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8[..., record_bytes] as k[..., P, Dk] and v[..., P, Dv], bit for bit."""
        k_part, v_part = record[..., : self.v_offset], record[..., self.v_offset :]
        k = get_format(self.k_format).decode(
            "k", k_part, page_size=self.page_size, head_dim=self.head_dim_qk
        )
        v = get_format(self.v_format).decode(
            "v", v_part, page_size=self.page_size, head_dim=self.head_dim_vo
        )
        return k, v
