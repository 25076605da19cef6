"""RecordLayout: where the bytes of one page of one KV head lie, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import torch

from kvcompile.codegen.formats import TILE, Format, PartShape, Role, get_format

PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_GROUP_SIZE = 64


class LayoutFields(TypedDict):
    """What a `KernelSpec` says about the records."""

    k_format: str
    v_format: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_group_size: int | None
    num_sink_tokens: int | None


@dataclass(frozen=True)
class Window:
    """The tokens of a row that are stored exactly although its pages are quantized.

    Token i of a row is a *sink* if i < num_sink_tokens. The others fill pages in order; a page is
    quantized once `residual_length` tokens follow it, and until then its tokens are in the *ring*.
    Sinks and ring lie in small exact pages: first those of the sinks, then those of the ring.

    Attributes:
        exact_format: Format of the exact pages.
        num_sink_tokens: First tokens that are never quantized (IntactKV,
            https://arxiv.org/abs/2403.01241).
        residual_length: Most recent tokens that are never quantized (KIVI).
    """

    exact_format: str
    num_sink_tokens: int
    residual_length: int

    def full_pages(self, stored: int, page_size: int) -> int:
        """Return how many pages of a row of `stored` tokens are quantized."""
        return max(0, (stored - self.num_sink_tokens - self.residual_length) // page_size)

    @property
    def sink_pages(self) -> int:
        """Exact pages that hold the sinks."""
        return -(-self.num_sink_tokens // TILE)


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a record: [K part | V part] of one page of one KV head.

    Attributes:
        k_format: Name of the format of K.
        v_format: Name of the format of V.
        head_dim_qk: Channels of a key.
        head_dim_vo: Channels of a value.
        page_size: Tokens in a page.
        q_group_size: Channels of V that share a scale.
        window: What is stored exactly beside the pages; None if and only if both formats are exact.
    """

    k_format: str
    v_format: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_group_size: int = DEFAULT_GROUP_SIZE
    window: Window | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UnsupportedKernelError: A format is unknown.
            ValueError: `page_size`, `q_group_size` or a head dimension is out of range, or the
                window does not go with the formats.
        """
        formats = (get_format(self.k_format), get_format(self.v_format))
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}")
        for format_ in formats:
            if self.page_size < format_.smallest_page:
                raise ValueError(
                    f"page_size must be at least {format_.smallest_page} for {format_.name}, "
                    f"not {self.page_size}"
                )
        if min(self.head_dim_qk, self.head_dim_vo) < 1:
            raise ValueError("head dimensions must be positive")
        if self.q_group_size < 16 or self.q_group_size % 16:
            raise ValueError(f"q_group_size must be a multiple of 16, not {self.q_group_size}")
        if any(format_.is_grouped for format_ in formats) != (self.window is not None):
            raise ValueError("a window goes with quantized formats, and only with them")

    @cached_property
    def symbol(self) -> str:
        """A short injective name, kept as one string so that it is a cheap dictionary key."""
        name = (
            f"k{self.k_format}_v{self.v_format}"
            f"_d{self.head_dim_qk}v{self.head_dim_vo}_p{self.page_size}"
        )
        if self.window is None:
            return name
        w = self.window
        return (
            f"{name}_c{self.q_group_size}_{w.exact_format}_s{w.num_sink_tokens}r{w.residual_length}"
        )

    @cached_property
    def exact(self) -> RecordLayout:
        """Layout of the exact pages of sinks and ring.

        Raises:
            ValueError: There are none.
        """
        if self.window is None:
            raise ValueError(f"{self.symbol} has no window")
        name = self.window.exact_format
        return replace(self, k_format=name, v_format=name, page_size=TILE, window=None)

    def spec_fields(self) -> LayoutFields:
        """Return the fields of the specs of kernels that read or write such records."""
        window = self.window
        return LayoutFields(
            k_format=self.k_format,
            v_format=self.v_format,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size,
            q_group_size=None if window is None else self.q_group_size,
            num_sink_tokens=None if window is None else window.num_sink_tokens,
        )

    def format(self, role: Role) -> Format:
        """Return the format of one part."""
        return get_format(self.k_format if role == "k" else self.v_format)

    def part(self, role: Role) -> PartShape:
        """Return what one part holds."""
        return PartShape(role, self.page_size, self.head_dim(role), self.q_group_size)

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of the K part."""
        return self.format("k").part_bytes(self.part("k"))

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of the V part."""
        return self.format("v").part_bytes(self.part("v"))

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
        k_part = self.format("k").encode(self.part("k"), k)
        v_part = self.format("v").encode(self.part("v"), v)
        return torch.cat([k_part, v_part], dim=-1)

    def unpack(self, record: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8[..., record_bytes] as k[..., P, Dk] and v[..., P, Dv]."""
        k_part, v_part = record[..., : self.v_offset], record[..., self.v_offset :]
        k = self.format("k").decode(self.part("k"), k_part)
        v = self.format("v").decode(self.part("v"), v_part)
        return k, v
