"""The exact formats: floating-point words, reordered for kernels and nothing else.

On a GPU both K and V are [P][D']. For vector registers K holds tiles of 16 tokens,
[P/16][D'/w][16][w]: a register of K holds 16 tokens of one channel. V holds [P/w][D'][w]: a
register of V holds neighbouring channels of one token. w is 2 for bf16, whose pairs split into two
fp32 registers by one shift and one mask; else 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcompile.codegen.formats.base import TILE, Coded, PartShape, padded_channels, round_up


@dataclass(frozen=True)
class ExactFormat:
    """Words of a floating-point type.

    Attributes:
        name: Name used in specs and options.
        dtype: The type of a word.
        interleave: Neighbours stored together: channels in K, tokens in V.
    """

    name: str
    dtype: torch.dtype
    interleave: int

    @property
    def bits(self) -> int:
        """Bits per stored element."""
        return self.dtype.itemsize * 8

    @property
    def is_grouped(self) -> bool:
        """Every word stands for itself."""
        return False

    @property
    def has_minimum(self) -> bool:
        """There are no levels."""
        return False

    @property
    def smallest_page(self) -> int:
        """Fewest tokens of a page."""
        return TILE

    def channels(self, shape: PartShape) -> int:
        """Return the channels stored, pad channels included."""
        return padded_channels(shape.head_dim)

    def part_bytes(self, shape: PartShape) -> int:
        """Return the bytes of one part of a record, a multiple of `byte_multiple`."""
        words = shape.page_size * self.channels(shape)
        return round_up(words * self.dtype.itemsize, shape.byte_multiple)

    def quantize(self, shape: PartShape, dense: torch.Tensor) -> Coded:
        """Return the words of dense[..., P, D] (any floating type, rounded once)."""
        return Coded(dense.to(self.dtype), [])

    def dequantize(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Return the words as they are."""
        return coded.codes

    def join(self, shape: PartShape, coded: Coded) -> torch.Tensor:
        """Lay words [..., P, D] out as uint8[..., part_bytes]."""
        lead = coded.codes.shape[:-2]
        channels, pair = self.channels(shape), self.interleave
        words = F.pad(coded.codes, (0, channels - shape.head_dim))
        if shape.order == "gpu16":
            pass
        elif shape.role == "k":
            words = words.reshape(*lead, shape.page_size // TILE, TILE, channels // pair, pair)
            words = words.transpose(-3, -2)
        else:
            words = words.reshape(*lead, shape.page_size // pair, pair, channels).transpose(-2, -1)
        stored = words.reshape(*lead, shape.page_size * channels).contiguous().view(torch.uint8)
        return F.pad(stored, (0, self.part_bytes(shape) - stored.shape[-1]))

    def split(self, shape: PartShape, stored: torch.Tensor) -> Coded:
        """Undo `join`, bit for bit."""
        lead = stored.shape[:-1]
        channels, pair = self.channels(shape), self.interleave
        used = shape.page_size * channels * self.dtype.itemsize
        words = stored[..., :used].contiguous().view(self.dtype)
        if shape.order == "gpu16":
            pass
        elif shape.role == "k":
            words = words.reshape(*lead, shape.page_size // TILE, channels // pair, TILE, pair)
            words = words.transpose(-3, -2)
        else:
            words = words.reshape(*lead, shape.page_size // pair, channels, pair).transpose(-2, -1)
        return Coded(words.reshape(*lead, shape.page_size, channels)[..., : shape.head_dim], [])


FP32 = ExactFormat("fp32", torch.float32, 1)
BF16 = ExactFormat("bf16", torch.bfloat16, 2)
FP16 = ExactFormat("fp16", torch.float16, 1)
