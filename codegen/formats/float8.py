"""8-bit floating point with a scale per group: e4m3, and e5m2 of more range and fewer bits.

Codes lie as those of 8-bit integers do. The scale takes the largest magnitude of the group to the
largest number of the type, 448 or 57344 (https://arxiv.org/abs/2209.05433). Nothing finite is
stored as an infinity, which e5m2 has and e4m3 has not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcompile.codegen.formats import planes
from kvcompile.codegen.formats.base import TILE, Coded, PartShape, round_up
from kvcompile.codegen.formats.grouped import (
    bf16_up,
    groups,
    k_channels,
    pack_fields,
    pack_scales,
    scale_bytes,
    ungroup,
    unpack_fields,
    unpack_scales,
    v_channels,
)

FP16_BIAS = 15


@dataclass(frozen=True)
class Float8Format:
    """Words of a floating-point type with a scale per group.

    Attributes:
        name: Name used in specs and options.
        exponent_bits: Bits of the exponent; the mantissa has those that it and the sign leave.
        largest: The largest finite number.
        word: Torch's type of the codes.
    """

    name: str
    exponent_bits: int
    largest: float
    word: torch.dtype
    bits: int = 8
    dtype: torch.dtype = torch.float32
    is_grouped: bool = True
    has_minimum: bool = False
    smallest_page: int = TILE

    @property
    def mantissa_bits(self) -> int:
        """Bits of the mantissa, without the hidden one."""
        return 7 - self.exponent_bits

    @property
    def bias(self) -> int:
        """What the exponent field of 1 is."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def type_name(self) -> str:
        """What the type is called."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    def fp16_exponent(self) -> int:
        """By 2 to this power a number is smaller whose fields are read as those of fp16."""
        return FP16_BIAS - self.bias

    def channels(self, shape: PartShape) -> int:
        """Return the channels stored, pad channels included."""
        if shape.role == "v":
            return v_channels(shape.head_dim)
        return k_channels(shape.head_dim, 1)

    def code_bytes(self, shape: PartShape) -> int:
        """Return the bytes of the codes; the scales follow them."""
        return shape.page_size * self.channels(shape)

    def part_bytes(self, shape: PartShape) -> int:
        """Return the bytes of one part of a record, a multiple of `byte_multiple`."""
        if shape.order == "gpu16":
            return planes.part_bytes(shape, self.channels(shape), (8,), 1)
        scales = scale_bytes(shape, self.channels(shape), 1)
        return round_up(self.code_bytes(shape) + scales, shape.byte_multiple)

    def quantize(self, shape: PartShape, dense: torch.Tensor) -> Coded:
        """Return the numbers that stand for dense[..., P, D]."""
        words, scales = [], []
        for x in groups(shape, dense):
            scale = bf16_up(x.abs().amax(dim=-1) / self.largest)
            scaled = x / torch.where(scale == 0, 1.0, scale)[..., None]
            words.append(scaled.to(self.word).view(torch.uint8))
            scales.append([scale])
        codes = F.pad(ungroup(shape, words), (0, self.channels(shape) - shape.head_dim))
        return Coded(codes.to(torch.int32), scales)

    def dequantize(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Return the numbers as fp32 [..., P, D]."""
        codes = coded.codes[..., : shape.head_dim]
        values = codes.to(torch.uint8).view(self.word).to(torch.float32)
        parts = groups(shape, values)
        return ungroup(
            shape, [c * s[..., None] for c, (s,) in zip(parts, coded.scales, strict=True)]
        )

    def join(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Lay numbers out as uint8[..., part_bytes]."""
        channels = self.channels(shape)
        if shape.order == "gpu16":
            return planes.join(shape, channels, (8,), coded)
        packed = pack_fields(shape, coded.codes, 8)
        stored = torch.cat([packed, pack_scales(shape, channels, coded.scales)], dim=-1)
        return F.pad(stored, (0, self.part_bytes(shape) - stored.shape[-1]))

    def split(self, shape: PartShape, stored: torch.Tensor) -> Coded:
        """Undo `join`."""
        channels, size = self.channels(shape), self.code_bytes(shape)
        if shape.order == "gpu16":
            return planes.split(shape, channels, (8,), 1, stored)
        codes = unpack_fields(shape, stored[..., :size], channels, 8)
        return Coded(codes, unpack_scales(shape, channels, stored[..., size:], 1))


FP8 = Float8Format("fp8", 4, 448.0, torch.float8_e4m3fn)
FP8_E5M2 = Float8Format("fp8_e5m2", 5, 57344.0, torch.float8_e5m2)
