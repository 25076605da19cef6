"""Grouped parts as a GPU reads them: 16-bit words in rows, fields as planes of a tile.

    int32[4] exponent | per part of the codes int16[P/T][C/F] | scales

Loads of 16-bit words keep the layout that tensor cores multiply, so that codes are unpacked in
registers, and a field of every word of a tile is a tile again: no code is moved to its place. Field
t * F + f of word (r, j) is token t * P/T + r and channel f of F planes of channels. The channels
of each chunk, a power of two, are planes of their own: channel o + f * n/F + j of the chunk of n
channels from o on. A plane of K has 16 channels at least, which is the least that tensor cores
contract; one of V has 8, which is the least they are wide, and lies in one group of channels. What
fields are left go to tokens.

A scale and its minimum are one 32-bit word, bf16 each, the minimum in the lower half: K's [C], V's
[groups][P]. Four times in front of the codes is the biased exponent of the largest scale of the
part: whoever multiplies fp16 numbers divides by that power of two. The minima of V are divided by
it too, and their exponents count less 14, so that none is too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcompile.codegen.formats.base import Coded, PartShape, Role, round_up

WORD_BITS = 16
HEADER_WORDS = 4
HEADER_BYTES = 4 * HEADER_WORDS
LARGEST_EXPONENT = 253
"""The largest whose inverse power of two is a normal fp32 number, 2^-126."""

SMALLEST_EXPONENT = 16
"""The smallest: its inverse, 2^111, can be multiplied by 2^16 still. Zeros have this one."""

MINIMUM_UNIT = 2.0**-14
"""How a minimum of V counts beside the scales: 2^15 of their unit are an fp16 number."""

LEAST_PLANE: dict[Role, int] = {"k": 16, "v": 8}


@dataclass(frozen=True)
class Chunk:
    """Neighbouring channels, a power of two of them.

    Attributes:
        offset: The first one.
        width: How many.
    """

    offset: int
    width: int


def chunks(channels: int) -> list[Chunk]:
    """Split channels into chunks, the widest first."""
    found, offset = [], 0
    while offset < channels:
        width = 1 << (channels - offset).bit_length() - 1
        found.append(Chunk(offset, width))
        offset += width
    return found


@dataclass(frozen=True)
class Planes:
    """How the fields of the words of a part are told apart.

    Attributes:
        bits: Bits of a field.
        tokens: T, planes of tokens.
        channels: F, planes of channels.
    """

    bits: int
    tokens: int
    channels: int


@dataclass(frozen=True)
class PlaneShape:
    """The planes of a part.

    Attributes:
        chunks: The chunks of channels.
        planes: The planes of each part of the codes, lowest bits first; all have the same planes of
            channels.
    """

    chunks: tuple[Chunk, ...]
    planes: tuple[Planes, ...]

    @property
    def across(self) -> int:
        """F."""
        return self.planes[0].channels


def plane_shape(shape: PartShape, channels: int, widths: tuple[int, ...]) -> PlaneShape:
    """Return the planes of a part, given its channels and the bits of the fields of its codes."""
    found = chunks(channels)
    most = max(min(chunk.width for chunk in found) // LEAST_PLANE[shape.role], 1)
    across = min(WORD_BITS // max(widths), most)
    if shape.role == "v":
        found = [part for chunk in found for part in _within_groups(chunk, shape, across)]
    planes = tuple(Planes(bits, WORD_BITS // bits // across, across) for bits in widths)
    return PlaneShape(tuple(found), planes)


def _within_groups(chunk: Chunk, shape: PartShape, across: int) -> list[Chunk]:
    """Halve a chunk until each of its planes lies in one group."""
    width = chunk.width // across
    begins = range(chunk.offset, chunk.offset + chunk.width, width)
    if all(c // shape.group_size == (c + width - 1) // shape.group_size for c in begins):
        return [chunk]
    half = chunk.width // 2
    halves = [Chunk(chunk.offset, half), Chunk(chunk.offset + half, half)]
    return [part for each in halves for part in _within_groups(each, shape, across)]


def part_bytes(shape: PartShape, channels: int, widths: tuple[int, ...], per_group: int) -> int:
    """Return the bytes of a part, given the numbers that a group stores."""
    codes = shape.page_size * channels * sum(widths) // 8
    return round_up(HEADER_BYTES + codes + _scale_bytes(shape, channels, per_group), 16)


def scale_offset(shape: PartShape, channels: int, widths: tuple[int, ...]) -> int:
    """Return where the scales of a part begin."""
    return HEADER_BYTES + shape.page_size * channels * sum(widths) // 8


def join(shape: PartShape, channels: int, widths: tuple[int, ...], coded: Coded) -> torch.Tensor:
    """Lay numbers out as uint8[..., part_bytes]."""
    numbers = [group[0] for group in coded.scales]
    if shape.role == "v":
        numbers += [group[1].abs() * MINIMUM_UNIT for group in coded.scales if len(group) > 1]
    largest = torch.stack([x.amax(dim=-1) for x in numbers]).amax(dim=0)
    exponent = (largest.contiguous().view(torch.int32) >> 23).clamp(
        SMALLEST_EXPONENT, LARGEST_EXPONENT
    )
    parts = [exponent[..., None].expand(*exponent.shape, HEADER_WORDS)]
    found, low = [p.contiguous().view(torch.uint8) for p in parts], 0
    words = plane_shape(shape, channels, widths)
    for planes in words.planes:
        fields = coded.codes >> low & (1 << planes.bits) - 1
        found.append(_pack(words.chunks, planes, fields))
        low += planes.bits
    found.append(_pack_scales(shape, channels, coded.scales))
    stored = torch.cat(found, dim=-1)
    size = part_bytes(shape, channels, widths, len(coded.scales[0]))
    return F.pad(stored, (0, size - stored.shape[-1]))


def split(
    shape: PartShape,
    channels: int,
    widths: tuple[int, ...],
    per_group: int,
    stored: torch.Tensor,
) -> Coded:
    """Undo `join`."""
    codes = torch.zeros(*stored.shape[:-1], shape.page_size, channels, dtype=torch.int32)
    begin, low = HEADER_BYTES, 0
    words = plane_shape(shape, channels, widths)
    for planes in words.planes:
        end = begin + shape.page_size * channels * planes.bits // 8
        rows = stored[..., begin:end].contiguous().view(torch.int16)
        rows = rows.unflatten(-1, (shape.page_size // planes.tokens, channels // planes.channels))
        codes |= _unpack(words.chunks, planes, rows) << low
        begin, low = end, low + planes.bits
    return Coded(codes, _unpack_scales(shape, channels, per_group, stored[..., begin:]))


def _pack(found: Sequence[Chunk], planes: Planes, fields: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, WORD_BITS, planes.bits).view(planes.tokens, planes.channels)
    words = []
    for chunk in found:
        part = fields[..., chunk.offset : chunk.offset + chunk.width]
        # [..., T, P/T, F, n/F] -> [..., P/T, n/F, T, F]
        part = part.unflatten(-1, (planes.channels, -1)).unflatten(-3, (planes.tokens, -1))
        part = part.movedim(-4, -1).movedim(-3, -1)
        words.append((part << shifts).sum(dim=(-2, -1)))
    rows = torch.cat(words, dim=-1).to(torch.int32)
    low = (rows & 0xFFFF).where(rows & 0x8000 == 0, (rows & 0xFFFF) - 0x10000)
    return low.to(torch.int16).flatten(-2).contiguous().view(torch.uint8)


def _unpack(found: Sequence[Chunk], planes: Planes, words: torch.Tensor) -> torch.Tensor:
    rows = words.to(torch.int32) & 0xFFFF
    shifts = torch.arange(0, WORD_BITS, planes.bits).view(planes.tokens, planes.channels)
    parts = []
    for chunk in found:
        begin = chunk.offset // planes.channels
        part = rows[..., begin : begin + chunk.width // planes.channels]
        part = part[..., None, None] >> shifts & (1 << planes.bits) - 1
        part = part.movedim(-1, -3).movedim(-1, -4)
        parts.append(part.flatten(-4, -3).flatten(-2))
    return torch.cat(parts, dim=-1)


def _scale_bytes(shape: PartShape, channels: int, per_group: int) -> int:
    count = channels if shape.role == "k" else shape.page_size * len(shape.channel_groups())
    return 2 * per_group * count


def _pack_scales(shape: PartShape, channels: int, scales: list[list[torch.Tensor]]) -> torch.Tensor:
    words = []
    for group in scales:
        numbers = torch.stack(group[::-1], dim=-1)  # the minimum first, if there is one
        if shape.role == "k":
            numbers = F.pad(numbers, (0, 0, 0, channels - shape.head_dim))
        words.append(numbers.to(torch.bfloat16).flatten(-2).contiguous().view(torch.uint8))
    return torch.cat(words, dim=-1)


def _unpack_scales(
    shape: PartShape, channels: int, per_group: int, stored: torch.Tensor
) -> list[list[torch.Tensor]]:
    size = _scale_bytes(shape, channels, per_group)
    numbers = stored[..., :size].contiguous().view(torch.bfloat16).to(torch.float32)
    count = 1 if shape.role == "k" else len(shape.channel_groups())
    kept = shape.head_dim if shape.role == "k" else shape.page_size
    found = numbers.unflatten(-1, (count, -1, per_group))
    return [
        [found[..., g, :kept, per_group - 1 - i] for i in range(per_group)] for g in range(count)
    ]
