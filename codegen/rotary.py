"""The turning mean of K: what a page of keys is freed of before it is quantized.

A projection with a bias adds the same vector to every key, and rotary embedding (RoFormer,
https://arxiv.org/abs/2104.09864) turns it: each pair of channels by an angle per token that is its
own. What turns fast widens the range of its channels by twice the length of the bias. What hardly
moves within a page is taken in by the minimum of its channel, which is a bf16: rounding it widens
the range by up to 1/128 of the bias.

So the tokens of a page are turned back to its first token, pair by pair, and averaged; the means of
the pairs whose ranges they widen most are kept in the record, and the mean, turned forth again, is
subtracted. What is left is quantized. A score is the product of the query with both, and adding the
mean back is as exact as any fp32 sum. Angles that do not fit the keys cost quality, never
correctness: whatever was subtracted is what is added.

A mean is two fp32 numbers of 12 significant bits, like the cosines: their products are exact. The
number of the pair lies in the bits that are free.

Letters: P tokens of a page, D channels, R pairs that rotate, N pairs of which the mean is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcompile.codegen.formats.grouped import tree_sum

MEANS = 8
"""Most pairs of a page of which a mean is kept."""

MEAN_BYTES = 8 * MEANS
FREE_BITS = 12
SMALLEST_MEAN = 2.0**-100
SMALLEST_COSINE = 2.0**-20
"""What is smaller counts as zero, lest a product be subnormal and rounded."""

MINIMUM_UNIT = 2.0**-7


@dataclass(frozen=True)
class Rotary:
    """Which channels of a key rotary embedding turns together.

    Attributes:
        dim: 2R, the first channels, which rotate; those behind them stand still.
        interleaved: Whether pair j is the channels 2j and 2j + 1, instead of j and j + R.
    """

    dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Check the dimension.

        Raises:
            ValueError: It is not a positive even number, or has no room in the free bits.
        """
        if not 0 < self.dim <= 2 << FREE_BITS or self.dim % 2:
            raise ValueError(f"the channels that rotate must be an even number, not {self.dim}")

    @property
    def pairs(self) -> int:
        """R."""
        return self.dim // 2

    @property
    def means(self) -> int:
        """N."""
        return min(MEANS, self.pairs)

    def table_words(self, page_size: int) -> int:
        """Return the fp32 numbers of a `rotary_table`."""
        return self.pairs * (2 * page_size + 1)

    @property
    def symbol(self) -> str:
        """A short injective name."""
        return f"rot{self.dim}{'i' if self.interleaved else ''}"

    def channels(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the second channel of some pairs."""
        if self.interleaved:
            return 2 * pairs, 2 * pairs + 1
        return pairs, pairs + self.pairs


def rotary_table(frequencies: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the angles of a page in the form that kernels read.

    Args:
        frequencies: [R], radians per token.
        page_size: P.

    Returns:
        fp32, R times P cosines and P sines; then [R], the square of how much a mean of length 1
        widens the range of its channels: by its longest way between two tokens of a page, and by
        1/128, the rounding of a minimum.
    """
    speeds = frequencies.detach().to(torch.float64)
    angles = torch.outer(speeds, torch.arange(page_size, dtype=torch.float64))
    turns = torch.stack([angles.cos(), angles.sin()], 1).to(torch.float32)
    turns = torch.where(turns.abs() < SMALLEST_COSINE, 0.0, shorten(turns))
    half = (speeds.abs() * (page_size - 1) / 2).clamp(max=math.pi / 2)
    widening = (2 * half.sin() + MINIMUM_UNIT) ** 2
    return torch.cat([turns.flatten(), widening.to(torch.float32)])


def shorten(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to 12 significant bits."""
    half = 1 << FREE_BITS - 1
    bits = x.contiguous().view(torch.int32) + half
    return bits.bitwise_and_(-(1 << FREE_BITS)).view(torch.float32)


def separate_mean(
    rotary: Rotary, table: torch.Tensor, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split keys [..., P, D] into what is left of them, fp32, and the mean, uint8[..., 64]."""
    x = dense.to(torch.float32)
    cos, sin, widening = _tables(rotary, table, x.shape[-2])
    channels = rotary.channels(torch.arange(rotary.pairs))
    a, b = (x[..., c].transpose(-1, -2) for c in channels)  # [..., R, P]
    means = [tree_sum(y) / x.shape[-2] for y in (a * cos + b * sin, b * cos - a * sin)]
    first, second = (torch.where(m.abs() >= SMALLEST_MEAN, shorten(m), 0.0) for m in means)
    wide = (first * first + second * second) * widening
    order = torch.where(wide >= 0, wide, 0.0).sort(stable=True, dim=-1, descending=True).indices
    pairs = order[..., : rotary.means]
    words = torch.stack([x.gather(-1, pairs) for x in (first, second)], -1)  # [..., N, 2]
    bits = words.view(torch.int32).clone()
    bits[..., 0] |= pairs.to(torch.int32)
    stored = torch.zeros(*x.shape[:-2], MEANS, 2, dtype=torch.int32)
    stored[..., : rotary.means, :] = bits
    packed = stored.flatten(-2).view(torch.uint8)
    return x - turning_mean(rotary, table, packed, x.shape[-2:]), packed


def turning_mean(
    rotary: Rotary, table: torch.Tensor, packed: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Return the mean uint8[..., 64] as it is in every token of a page, fp32 [..., *shape]."""
    page_size, head_dim = shape
    cos, sin, _ = _tables(rotary, table, page_size)
    stored = packed.contiguous().view(torch.int32).unflatten(-1, (MEANS, 2))
    bits = stored[..., : rotary.means, :]
    pairs = bits[..., 0].bitwise_and((1 << FREE_BITS) - 1).long()
    means = bits.bitwise_and(-(1 << FREE_BITS)).view(torch.float32)
    first, second = means[..., 0, None], means[..., 1, None]
    c, s = cos[pairs], sin[pairs]
    turned = (first * c - second * s, second * c + first * s)  # [..., N, P]
    mean = torch.zeros(*packed.shape[:-1], head_dim, page_size, dtype=torch.float32)
    for channels, part in zip(rotary.channels(pairs), turned, strict=True):
        mean.scatter_(-2, channels[..., None].expand_as(part), part)
    return mean.transpose(-1, -2)


def _tables(
    rotary: Rotary, table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cosines and sines [R, P], and the squares of widenings [R]."""
    turns = table[: -rotary.pairs].view(rotary.pairs, 2, page_size)
    return turns[:, 0], turns[:, 1], table[-rotary.pairs :]
