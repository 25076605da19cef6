"""What the formats with shared scales have in common: their groups, and 16-bit scales.

K has one group per channel and page (KIVI, https://arxiv.org/abs/2402.02750), V one per token and
group of channels. A group stores a scale and, if the format has one, a minimum as bf16, which has
the range of fp32. They are rounded outwards, so that the levels reach from below the smallest to
above the largest element: no element is clamped, and none is further than half a step from its
level. All arithmetic is fp32, in the order the kernels use.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcompile.codegen.formats.base import PartShape, round_up

V_CHANNEL_MULTIPLE = 16
"""A vector of V holds 4 tokens of 16 channels."""

SCALE_BYTES = 2


def bf16_down(x: torch.Tensor) -> torch.Tensor:
    """Return the largest bf16 that is at most x, as fp32."""
    bits = x.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits + 0xFFFF, bits).bitwise_and_(-0x10000).view(torch.float32)


def bf16_up(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest bf16 that is at least x >= 0, as fp32."""
    return (x.contiguous().view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension in halves: x[:n/2] + x[n/2:], zeros filling up to a power of two."""
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = F.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def groups(shape: PartShape, dense: torch.Tensor) -> list[torch.Tensor]:
    """Return the groups of dense[..., P, D] along a last dimension, as fp32.

    K gives one tensor [..., D, P], V a tensor [..., P, channels] per group of channels.
    """
    dense = dense.to(torch.float32)
    if shape.role == "k":
        return [dense.transpose(-1, -2)]
    return [dense[..., c.start : c.stop] for c in shape.channel_groups()]


def ungroup(shape: PartShape, parts: list[torch.Tensor]) -> torch.Tensor:
    """Undo `groups`."""
    return parts[0].transpose(-1, -2) if shape.role == "k" else torch.cat(parts, dim=-1)


def pack_scales(shape: PartShape, channels: int, scales: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the scales of all groups as bytes: per group its scales, then its minima.

    Args:
        shape: The part.
        channels: Channels of K with their padding, whose scales are zero.
        scales: Per group a list of fp32 tensors that are bf16 numbers: K's [..., D], V's [..., P].
    """
    words = [
        F.pad(x, (0, channels - shape.head_dim)) if shape.role == "k" else x
        for group in scales
        for x in group
    ]
    return torch.cat(words, dim=-1).to(torch.bfloat16).contiguous().view(torch.uint8)


def unpack_scales(
    shape: PartShape, channels: int, stored: torch.Tensor, per_group: int
) -> list[list[torch.Tensor]]:
    """Undo `pack_scales`; `stored` begins with the scales."""
    length = channels if shape.role == "k" else shape.page_size
    count = 1 if shape.role == "k" else len(shape.channel_groups())
    used = stored[..., : scale_bytes(shape, channels, per_group)]
    words = used.contiguous().view(torch.bfloat16).to(torch.float32)
    words = words.unflatten(-1, (count, per_group, length))
    kept = shape.head_dim if shape.role == "k" else length
    return [[words[..., g, i, :kept] for i in range(per_group)] for g in range(count)]


def scale_bytes(shape: PartShape, channels: int, per_group: int) -> int:
    """Return the bytes of the scales of a part."""
    if shape.role == "k":
        return SCALE_BYTES * per_group * channels
    return SCALE_BYTES * per_group * shape.page_size * len(shape.channel_groups())


def pack_fields(shape: PartShape, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes[..., P, channels] of 1, 2, 4 or 8 bits into bytes.

    A byte holds F = 8 / bits fields. K is [P/16][channels/4F][16 tokens][4]: field f of byte j of
    quad i is channel f * channels/F + 4i + j, so that a vector holds 4 neighbouring channels of 16
    tokens. V is [P/4F][channels][4]: field f of byte j is token f * P/F + 4i + j.
    """
    lead, (tokens, channels) = codes.shape[:-2], codes.shape[-2:]
    fields = 8 // bits
    if shape.role == "k":
        quads = codes.unflatten(-1, (fields, channels // fields // 4, 4)).unflatten(-4, (-1, 16))
        # [..., tile, token, field, quad, 4] -> [..., field, tile, quad, token, 4]
        quads = quads.movedim(-3, -5).transpose(-3, -2)
    else:
        quads = codes.unflatten(-2, (fields, tokens // fields // 4, 4)).transpose(-1, -2)
    shifts = torch.arange(0, 8, bits).view(fields, *[1] * (quads.dim() - len(lead) - 1))
    packed: torch.Tensor = (quads.to(torch.int32) << shifts).sum(dim=len(lead)).to(torch.uint8)
    return packed.reshape(*lead, tokens * channels * bits // 8)


def unpack_fields(shape: PartShape, packed: torch.Tensor, channels: int, bits: int) -> torch.Tensor:
    """Undo `pack_fields`: int32 codes[..., P, channels]."""
    lead, tokens, fields = packed.shape[:-1], shape.page_size, 8 // bits
    if shape.role == "k":
        quads = packed.reshape(*lead, 1, tokens // 16, channels // fields // 4, 16, 4)
    else:
        quads = packed.reshape(*lead, 1, tokens // fields // 4, channels, 4)
    shifts = torch.arange(0, 8, bits).view(fields, *[1] * (quads.dim() - len(lead) - 1))
    codes = (quads.to(torch.int32) >> shifts) & (1 << bits) - 1
    if shape.role == "k":
        codes = codes.transpose(-3, -2).movedim(-5, -3)
        return codes.reshape(*lead, tokens, channels)
    return codes.transpose(-1, -2).reshape(*lead, tokens, channels)


def k_channels(head_dim: int, fields: int) -> int:
    """Return the channels of K with padding: whole vectors of scales, whole quads per field."""
    return round_up(head_dim, max(16, 4 * fields))


def v_channels(head_dim: int) -> int:
    """Return the channels of V with padding."""
    return round_up(head_dim, V_CHANNEL_MULTIPLE)
