"""Rotary embedding for tests: angles, and biases that turn by them."""

from __future__ import annotations

import torch

from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import Rotary, rotary_table


def frequencies(rotary: Rotary) -> torch.Tensor:
    """Return radians per token, from 1 down, as models have them."""
    return 10000.0 ** -(torch.arange(rotary.pairs) / rotary.pairs)


def angles(rotary: Rotary | None, page_size: int) -> torch.Tensor | None:
    """Return the table that kernels read, or None without rotary embedding."""
    return None if rotary is None else rotary_table(frequencies(rotary), page_size)


def turning(rotary: Rotary, tokens: int, head_dim: int, first: int = 7) -> torch.Tensor:
    """Return a vector of length 1 in each of four pairs, turned by the position, [T, D]."""
    turned = torch.zeros(tokens, head_dim, dtype=torch.float64)
    speeds = frequencies(rotary).double()
    position = torch.arange(first, first + tokens)
    for pair in range(0, rotary.pairs, -(-rotary.pairs // 4)):
        a, b = rotary.channels(torch.tensor(pair))
        phase = speeds[pair] * position + pair
        turned[:, a], turned[:, b] = phase.cos(), phase.sin()
    return turned.float()


def gains(rotary: Rotary, speeds: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return by how much the squared ranges of each pair shrink without its mean, in float64.

    A pair of channels is one complex number here; a range is widened by 1/128 of its minimum.

    Args:
        rotary: The pairs.
        speeds: [R], radians per token.
        k: Keys of a page, [..., P, D].

    Returns:
        [..., R].
    """
    a, b = (k[..., c].double() for c in rotary.channels(torch.arange(rotary.pairs)))
    z = torch.complex(a, b)
    phase = torch.outer(torch.arange(k.shape[-2]), speeds.double())
    turn = torch.polar(torch.ones_like(phase), phase)
    squares = []
    for rest in (z, z - (z / turn).mean(-2, keepdim=True) * turn):
        x = torch.view_as_real(rest)
        low = x.amin(-3)
        squares.append((x.amax(-3) - low + low.abs() / 128).pow(2).sum(-1))
    return squares[0] - squares[1]


def mean_sizes(layout: RecordLayout, records: torch.Tensor) -> torch.Tensor:
    """Return |first| + |second| of the mean at each element of K that it is added to.

    Args:
        layout: Layout of the records.
        records: uint8[..., record_bytes].

    Returns:
        [..., P, D], zeros where K has no mean.
    """
    sizes = torch.zeros(*records.shape[:-1], layout.page_size, layout.head_dim_qk)
    if layout.rotary is None:
        return sizes
    stored = records[..., layout.mean_offset : layout.v_offset].contiguous().view(torch.int32)
    words = stored.unflatten(-1, (-1, 2))[..., : layout.rotary.means, :]
    size = (words & ~0xFFF).view(torch.float32).abs().sum(-1)
    for channel in layout.rotary.channels((words[..., 0] & 0xFFF).long()):
        index = channel[..., None, :].expand(*channel.shape[:-1], layout.page_size, -1)
        sizes.scatter_add_(-1, index, size[..., None, :].expand(index.shape))
    return sizes
