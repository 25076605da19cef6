"""The turning mean of K: what a page of keys is freed of before it is quantized.

A projection with a bias adds the same vector to every key, and rotary embedding (RoFormer,
https://arxiv.org/abs/2104.09864) turns it: each pair of channels by an angle per token that is its
own. What turns fast widens the range of its channels by twice the length of the bias. What hardly
moves within a page is taken in by the minimum of its channel, which is a bf16: rounding it widens
the range by up to 1/128 of the bias.

So the tokens of a page are turned back to its first token, pair by pair, and averaged. The means of
the pairs whose ranges shrink most without them are kept in the record, and each is turned forth
again and subtracted. What is left is quantized. A score is the product of the query with both, and
adding the mean back is as exact as any fp32 sum. Where there is no bias, or angles do not fit the
keys, ranges hardly shrink, and nothing is subtracted.

A mean is two fp32 numbers of 12 significant bits, like the cosines: their products are exact. The
number of the pair lies in the bits that are free. Means that are not needed are zeros, at the end.

Letters: P tokens of a page, D channels, R pairs that rotate, N pairs of which the mean is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.codegen.formats.grouped import tree_sum

MEANS = 16
"""Most pairs of a page of which a mean is kept."""

MEAN_BYTES = 8 * MEANS
FREE_BITS = 12
SMALLEST_MEAN = 2.0**-100
SMALLEST_COSINE = 2.0**-20
"""What is smaller counts as zero, lest a product be subnormal and rounded."""

LARGEST_MEAN = 2.0**127
"""Means that are larger, or no numbers, are none."""

MINIMUM_UNIT = 2.0**-7
"""By this part of a minimum its rounding may widen a range."""

LEAST_GAIN = 2.0**-2
"""By this part the squared ranges of a pair shrink at least, or its mean is not worth reading.

The mean of P keys without a bias is 1/sqrt(P) of one of them, and takes less than that off."""


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
        return self.pairs * 2 * page_size

    @property
    def symbol(self) -> str:
        """A short injective name."""
        return f"rot{self.size}"

    @property
    def size(self) -> str:
        """What the symbol ends in: the dimension, and an i if it is interleaved."""
        return f"{self.dim}{'i' if self.interleaved else ''}"

    @property
    def said(self) -> str:
        """What turns by which parameters of a kernel, for its glossary."""
        pairs = "2j and 2j + 1" if self.interleaved else f"j and j + {self.pairs}"
        return f"channels {pairs} turn together, the first {self.dim} of them; cos_BSR, sin_BSR"

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
        fp32, R times P cosines and P sines.
    """
    speeds = frequencies.detach().to(torch.float64)
    angles = torch.outer(speeds, torch.arange(page_size, dtype=torch.float64))
    turns = torch.stack([angles.cos(), angles.sin()], 1).to(torch.float32)
    return torch.where(turns.abs() < SMALLEST_COSINE, 0.0, shorten(turns)).flatten()


def shorten(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to 12 significant bits."""
    half = 1 << FREE_BITS - 1
    bits = x.contiguous().view(torch.int32) + half
    return bits.bitwise_and_(-(1 << FREE_BITS)).view(torch.float32)


def separate_mean(
    rotary: Rotary, table: torch.Tensor, dense: torch.Tensor, *, has_minimum: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split keys [..., P, D] into what is left of them, fp32, and the means.

    Args:
        rotary: How they rotate.
        table: The angles.
        dense: The keys.
        has_minimum: Whether the levels of a channel begin at a minimum, instead of at zero.

    Returns:
        [..., P, D], and uint8[..., MEAN_BYTES].
    """
    x = dense.to(torch.float32)
    cos, sin = _angles(rotary, table, x.shape[-2])
    channels = rotary.channels(torch.arange(rotary.pairs))
    a, b = (x[..., c].transpose(-1, -2) for c in channels)  # [..., R, P]
    averages = [tree_sum(y) / x.shape[-2] for y in (a * cos + b * sin, b * cos - a * sin)]
    first, second = (
        torch.where((m.abs() >= SMALLEST_MEAN) & (m.abs() <= LARGEST_MEAN), shorten(m), 0.0)
        for m in averages
    )
    forth = _turned(first[..., None], second[..., None], cos, sin)
    before, after = (
        _span(y, has_minimum=has_minimum) ** 2 + _span(z, has_minimum=has_minimum) ** 2
        for y, z in ((a, b), (a - forth[0], b - forth[1]))
    )
    gain = torch.where(before - after > LEAST_GAIN * before, before - after, 0.0)
    order = gain.sort(stable=True, dim=-1, descending=True).indices
    pairs = order[..., : rotary.means]
    kept = gain.gather(-1, pairs) > 0
    words = torch.stack(
        [torch.where(kept, m.gather(-1, pairs), 0.0) for m in (first, second)], -1
    )  # [..., N, 2]
    bits = words.view(torch.int32).clone()
    bits[..., 0] |= torch.where(kept, pairs, 0).to(torch.int32)
    stored = torch.zeros(*x.shape[:-2], MEANS, 2, dtype=torch.int32)
    stored[..., : rotary.means, :] = bits
    packed = stored.flatten(-2).view(torch.uint8)
    return _add_means(rotary, table, packed, x, sign=-1), packed


def add_means(
    rotary: Rotary, table: torch.Tensor, packed: torch.Tensor, left: torch.Tensor
) -> torch.Tensor:
    """Return keys fp32 [..., P, D], given what is left of them and their means."""
    return _add_means(rotary, table, packed, left, sign=1)


def _add_means(
    rotary: Rotary, table: torch.Tensor, packed: torch.Tensor, x: torch.Tensor, *, sign: int
) -> torch.Tensor:
    cos, sin = _angles(rotary, table, x.shape[-2])
    stored = packed.contiguous().view(torch.int32).unflatten(-1, (MEANS, 2))
    bits = stored[..., : rotary.means, :]
    pairs = bits[..., 0].bitwise_and((1 << FREE_BITS) - 1).long()
    means = bits.bitwise_and(-(1 << FREE_BITS)).view(torch.float32)
    turned = _turned(means[..., 0, None], means[..., 1, None], cos[pairs], sin[pairs])
    # Channels without a mean keep their bits: adding 0 would turn -0 into 0.
    kept = means.ne(0).any(-1)[..., None]
    x = x.transpose(-1, -2)
    for channels, part in zip(rotary.channels(pairs), turned, strict=True):
        index = channels[..., None].expand_as(part)
        x = x.scatter_add(-2, index, torch.where(kept, sign * part, -0.0))
    return x.transpose(-1, -2)


def _turned(
    first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both channels of means, turned by angles."""
    return first * cos - second * sin, second * cos + first * sin


def _span(x: torch.Tensor, *, has_minimum: bool) -> torch.Tensor:
    """Return what the levels of channels [..., P] have to span."""
    if not has_minimum:
        return x.abs().amax(-1)
    low = x.amin(-1)
    return x.amax(-1) - low + low.abs() * MINIMUM_UNIT


def _angles(
    rotary: Rotary, table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [R, P]."""
    turns = table.view(rotary.pairs, 2, page_size)
    return turns[:, 0], turns[:, 1]
