"""RecordLayout: where the bytes of one page of one KV head lie, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict, cast

import torch

from kvcompile.codegen.formats import (
    TILE,
    Format,
    Order,
    PartShape,
    Role,
    decode,
    encode,
    get_format,
)
from kvcompile.codegen.rotary import MEAN_BYTES, Rotary, add_means, separate_mean

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
    rotary: Rotary | None
    layout: Order


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

    def exact_page_of(self, token: int, ring_from: int, page_size: int) -> int:
        """Return the entry of the exact table that a token lies in, were it not quantized.

        Args:
            token: Number of the token in its row.
            ring_from: Quantized pages before the ring's first exact page.
            page_size: Tokens of a quantized page.
        """
        if token < self.num_sink_tokens:
            return token // TILE
        ring = token - self.num_sink_tokens - ring_from * page_size
        return self.sink_pages + max(ring, 0) // TILE

    def exact_pages(self, stored: int, ring_from: int, page_size: int) -> int:
        """Return the exact pages of a row of `stored` tokens whose first pages are quantized.

        Args:
            stored: Tokens.
            ring_from: The pages before the ring.
            page_size: Tokens of each of them.
        """
        ring = stored - self.num_sink_tokens - ring_from * page_size
        if ring > 0:
            return self.sink_pages + -(-ring // TILE)
        return -(-min(stored, self.num_sink_tokens) // TILE) if stored > 0 else 0

    def tokens_in_exact_page(self, number: int, stored: int, ring_from: int, page_size: int) -> int:
        """Return how many of the `stored` tokens of a row lie in one of its exact pages."""
        if number < self.sink_pages:
            first, end = number * TILE, min(self.num_sink_tokens, stored)
        else:
            ring = self.num_sink_tokens + ring_from * page_size
            first, end = ring + (number - self.sink_pages) * TILE, stored
        return min(max(end - first, 0), TILE)

    def most_exact_pages(self, page_size: int, new_len: int) -> int:
        """Return the most exact pages that a row can have while `new_len` tokens are appended.

        Before them, less than `page_size` tokens more than `residual_length` are in the ring.
        """
        return self.sink_pages + -(-(self.residual_length + page_size - 1 + new_len) // TILE)


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
        rotary: How K rotates, if its turning mean is kept beside its codes: behind them, in the
            K part. Whoever encodes or decodes then needs the table of `codegen.rotary`.
        order: How the numbers of a part lie; `relayout` turns one order into the other.
    """

    k_format: str
    v_format: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    q_group_size: int = DEFAULT_GROUP_SIZE
    window: Window | None = None
    rotary: Rotary | None = None
    order: Order = "cpu16"

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
        if self.rotary is not None:
            if not formats[0].is_grouped:
                raise ValueError("a turning mean goes with quantized keys, and only with them")
            if self.rotary.dim > self.head_dim_qk:
                raise ValueError(f"{self.rotary.dim} of {self.head_dim_qk} channels cannot rotate")

    @cached_property
    def symbol(self) -> str:
        """A short name, kept as one string so that it is a cheap dictionary key.

        Layouts of one name store tokens alike: `q_group_size` counts for quantized ones only.
        """
        name = (
            f"k{self.k_format}_v{self.v_format}"
            f"_d{self.head_dim_qk}v{self.head_dim_vo}_p{self.page_size}"
        )
        if self.order != "cpu16":
            name += f"_{self.order}"
        if self.window is None:
            return name
        w = self.window
        name += f"_c{self.q_group_size}_{w.exact_format}_s{w.num_sink_tokens}r{w.residual_length}"
        return name if self.rotary is None else f"{name}_{self.rotary.symbol}"

    @cached_property
    def exact(self) -> RecordLayout:
        """Layout of the exact pages of sinks and ring.

        Raises:
            ValueError: There are none.
        """
        if self.window is None:
            raise ValueError(f"{self.symbol} has no window")
        name = self.window.exact_format
        return replace(self, k_format=name, v_format=name, page_size=TILE, window=None, rotary=None)

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
            rotary=self.rotary,
            layout=self.order,
        )

    def format(self, role: Role) -> Format:
        """Return the format of one part."""
        return get_format(self.k_format if role == "k" else self.v_format)

    def part(self, role: Role) -> PartShape:
        """Return what one part holds."""
        return PartShape(role, self.page_size, self.head_dim(role), self.q_group_size, self.order)

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of the K part: codes and scales, then the turning mean if there is one."""
        return self.mean_offset + (0 if self.rotary is None else MEAN_BYTES)

    @cached_property
    def mean_offset(self) -> int:
        """Offset of the turning mean of K."""
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

    def encode(
        self, role: Role, dense: torch.Tensor, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store dense[..., P, D] as one part of a record, uint8[..., part].

        Args:
            role: Which part.
            dense: K or V.
            table: The angles that K turns by, see `codegen.rotary`; if there is a turning mean.
        """
        format_, shape = self.format(role), self.part(role)
        if role == "v" or self.rotary is None:
            return encode(format_, shape, dense)
        assert table is not None
        has_minimum = format_.has_minimum
        left, mean = separate_mean(self.rotary, table, dense, has_minimum=has_minimum)
        return torch.cat([encode(format_, shape, left), mean], dim=-1)

    def decode(
        self, role: Role, stored: torch.Tensor, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one part of a record, uint8[..., part], as [..., P, D]; see `encode`."""
        format_, shape = self.format(role), self.part(role)
        if role == "v" or self.rotary is None:
            return decode(format_, shape, stored)
        assert table is not None
        left = decode(format_, shape, stored[..., : self.mean_offset])
        return add_means(self.rotary, table, stored[..., self.mean_offset :], left)

    def pack(
        self, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store k[..., P, Dk] and v[..., P, Dv] as uint8[..., record_bytes]."""
        return torch.cat([self.encode("k", k, table), self.encode("v", v)], dim=-1)

    def unpack(
        self, record: torch.Tensor, table: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8[..., record_bytes] as k[..., P, Dk] and v[..., P, Dv]."""
        k_part, v_part = record[..., : self.v_offset], record[..., self.v_offset :]
        return self.decode("k", k_part, table), self.decode("v", v_part)

    def reordered(self, order: Order) -> RecordLayout:
        """Return the layout that stores the same numbers in another order."""
        return replace(self, order=order)


def relayout(record: torch.Tensor, source: RecordLayout, order: Order) -> torch.Tensor:
    """Return records uint8[..., record_bytes] in another order: the same numbers, bit for bit."""
    target = source.reordered(order)
    parts = []
    for role, begin, end in (
        ("k", source.k_offset, source.mean_offset),
        ("v", source.v_offset, source.record_bytes),
    ):
        role = cast("Role", role)
        coded = source.format(role).split(source.part(role), record[..., begin:end])
        parts.append(target.format(role).join(target.part(role), coded))
    mean = record[..., source.mean_offset : source.k_bytes]
    return torch.cat([parts[0], mean, parts[1]], dim=-1)
