"""Integers with a scale and a minimum per group: x is stored as the code c of scale * c + minimum.

With b > 1 bits the levels are evenly spaced from the smallest to the largest element of the group,
as KIVI does. With one bit they are the mean -+ the mean absolute deviation: the two ends would be
far from everything in between. 3 bits are a part of 2-bit fields followed by one of 1-bit fields.

For a CPU, V of 8 bits is stored as c - 128, which is what the dot product of unsigned and signed
bytes takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcompile.codegen.formats import planes
from kvcompile.codegen.formats.base import TILE, Coded, PartShape, round_up
from kvcompile.codegen.formats.grouped import (
    bf16_down,
    bf16_up,
    groups,
    k_channels,
    pack_fields,
    pack_scales,
    scale_bytes,
    tree_sum,
    ungroup,
    unpack_fields,
    unpack_scales,
    v_channels,
)


@dataclass(frozen=True)
class IntegerFormat:
    """Codes of `bits` bits.

    Attributes:
        bits: 1, 2, 3, 4 or 8.
    """

    bits: int

    @property
    def name(self) -> str:
        """Name used in specs and options."""
        return f"int{self.bits}"

    @property
    def dtype(self) -> torch.dtype:
        """Type of decoded values: products of a code and a bf16 scale are exact in it."""
        return torch.float32

    @property
    def is_grouped(self) -> bool:
        """Elements share scales."""
        return True

    @property
    def has_minimum(self) -> bool:
        """A group stores its minimum."""
        return True

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per field of the packed parts of a code, lowest bits first."""
        return (2, 1) if self.bits == 3 else (self.bits,)

    @property
    def largest_code(self) -> int:
        """The code of the upper end."""
        return (1 << self.bits) - 1

    @property
    def smallest_page(self) -> int:
        """Fewest tokens of a page."""
        return max(TILE, 4 * self._fields)

    @property
    def _fields(self) -> int:
        return 8 // min(self.planes)

    def channels(self, shape: PartShape) -> int:
        """Return the channels stored, pad channels included."""
        if shape.role == "v":
            return v_channels(shape.head_dim)
        return k_channels(shape.head_dim, self._fields)

    def code_bytes(self, shape: PartShape) -> int:
        """Return the bytes of the codes; the scales follow them."""
        return shape.page_size * self.channels(shape) * self.bits // 8

    def part_bytes(self, shape: PartShape) -> int:
        """Return the bytes of one part of a record, a multiple of `byte_multiple`."""
        if shape.order == "gpu16":
            return planes.part_bytes(shape, self.channels(shape), self.planes, 2)
        scales = scale_bytes(shape, self.channels(shape), 2)
        return round_up(self.code_bytes(shape) + scales, shape.byte_multiple)

    def quantize(self, shape: PartShape, dense: torch.Tensor) -> Coded:
        """Return the numbers that stand for dense[..., P, D]."""
        quantized = [self._quantize(group) for group in groups(shape, dense)]
        codes = ungroup(shape, [codes for codes, _ in quantized])
        codes = F.pad(codes, (0, self.channels(shape) - shape.head_dim))
        return Coded(codes, [scales for _, scales in quantized])

    def dequantize(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Return the numbers as fp32 [..., P, D]."""
        parts = groups(shape, coded.codes[..., : shape.head_dim])
        return ungroup(
            shape,
            [
                c * s[..., None] + m[..., None]
                for c, (s, m) in zip(parts, coded.scales, strict=True)
            ],
        )

    def join(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Lay numbers out as uint8[..., part_bytes]."""
        channels, codes = self.channels(shape), coded.codes
        if shape.order == "gpu16":
            return planes.join(shape, channels, self.planes, coded)
        if self._is_signed(shape):
            codes = codes ^ 128
        parts, low = [], 0
        for bits in self.planes:
            parts.append(pack_fields(shape, codes >> low & (1 << bits) - 1, bits))
            low += bits
        parts.append(pack_scales(shape, channels, coded.scales))
        stored = torch.cat(parts, dim=-1)
        return F.pad(stored, (0, self.part_bytes(shape) - stored.shape[-1]))

    def split(self, shape: PartShape, stored: torch.Tensor) -> Coded:
        """Undo `join`."""
        channels = self.channels(shape)
        if shape.order == "gpu16":
            return planes.split(shape, channels, self.planes, 2, stored)
        codes: torch.Tensor | int = 0
        begin, low = 0, 0
        for bits in self.planes:
            end = begin + shape.page_size * channels * bits // 8
            codes = codes | unpack_fields(shape, stored[..., begin:end], channels, bits) << low
            begin, low = end, low + bits
        assert isinstance(codes, torch.Tensor)
        if self._is_signed(shape):
            codes = codes ^ 128
        return Coded(codes, unpack_scales(shape, channels, stored[..., begin:], 2))

    def _is_signed(self, shape: PartShape) -> bool:
        return self.bits == 8 and shape.role == "v"

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return int32 codes and [scale, minimum] of groups along the last dimension."""
        if self.bits == 1:
            size = x.shape[-1]
            mean = tree_sum(x) / size
            deviation = tree_sum((x - mean[..., None]).abs()) / size
            minimum = bf16_down(mean - deviation)
            scale = bf16_up((mean + deviation) - minimum)
            codes = (x > minimum[..., None] + scale[..., None] * 0.5).to(torch.int32)
            return codes, [scale, minimum]
        # Adding 0 turns -0 into 0: which of the two a reduction returns depends on its order.
        minimum = bf16_down(x.amin(dim=-1) + 0.0)
        scale = bf16_up((x.amax(dim=-1) + 0.0 - minimum) / self.largest_code)
        steps = (x - minimum[..., None]) / torch.where(scale == 0, 1.0, scale)[..., None]
        return steps.round().clamp(max=self.largest_code).to(torch.int32), [scale, minimum]


INT8 = IntegerFormat(8)
INT4 = IntegerFormat(4)
INT3 = IntegerFormat(3)
INT2 = IntegerFormat(2)
INT1 = IntegerFormat(1)
