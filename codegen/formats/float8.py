"""8-bit floating point, e4m3 without infinities, with a scale per group.

Codes lie as those of 8-bit integers do. The scale takes the largest magnitude of the group to 448,
the largest number of the type (https://arxiv.org/abs/2209.05433).
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

LARGEST = 448.0


@dataclass(frozen=True)
class Float8Format:
    """e4m3 words with a scale per group."""

    name: str = "fp8"
    bits: int = 8
    dtype: torch.dtype = torch.float32
    is_grouped: bool = True
    has_minimum: bool = False
    smallest_page: int = TILE

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
            scale = bf16_up(x.abs().amax(dim=-1) / LARGEST)
            scaled = x / torch.where(scale == 0, 1.0, scale)[..., None]
            words.append(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
            scales.append([scale])
        codes = F.pad(ungroup(shape, words), (0, self.channels(shape) - shape.head_dim))
        return Coded(codes.to(torch.int32), scales)

    def dequantize(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Return the numbers as fp32 [..., P, D]."""
        codes = coded.codes[..., : shape.head_dim]
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
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


FP8 = Float8Format()
