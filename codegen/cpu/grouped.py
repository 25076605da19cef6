"""The numbers of a grouped part of a record, which all its C++ texts share."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.formats import PartShape, Role
from kvcompile.codegen.formats.float8 import Float8Format
from kvcompile.codegen.formats.grouped import scale_bytes
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.spec import KernelSpec


@dataclass(frozen=True)
class Plane:
    """One packed part of the codes.

    Attributes:
        bits: Bits per field.
        low: The code's bit that is the lowest of the field.
        begin: First byte, from the beginning of the part.
    """

    bits: int
    low: int
    begin: int

    @property
    def fields(self) -> int:
        """Fields of a byte."""
        return 8 // self.bits


@dataclass(frozen=True)
class GroupedPart:
    """The numbers of one grouped part of a record."""

    format: IntegerFormat | Float8Format
    shape: PartShape

    @property
    def float8(self) -> Float8Format | None:
        """The format, if the codes are words of a floating-point type."""
        return self.format if isinstance(self.format, Float8Format) else None

    @property
    def is_float(self) -> bool:
        """Whether the codes are words of a floating-point type."""
        return self.float8 is not None

    @property
    def is_even(self) -> bool:
        """Whether the codes number evenly spaced levels, more than two of them."""
        return not self.is_float and self.format.bits > 1

    @property
    def largest(self) -> int:
        """What the code of the upper end stands for in units of the scale."""
        return (1 << self.format.bits) - 1 if self.float8 is None else int(self.float8.largest)

    @property
    def flipped(self) -> bool:
        """Whether a code is stored with its highest bit flipped."""
        return self.format.bits == 8 and not self.is_float and self.shape.role == "v"

    @property
    def channels(self) -> int:
        """Channels stored, pad channels included."""
        return self.format.channels(self.shape)

    @property
    def words(self) -> tuple[str, ...]:
        """What a group stores beside its codes."""
        return ("scale",) if self.is_float else ("scale", "minimum")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, behind which the scales begin."""
        return self.format.code_bytes(self.shape)

    @property
    def used_bytes(self) -> int:
        """Bytes of codes and scales; zeros fill up the part."""
        return self.code_bytes + scale_bytes(self.shape, self.channels, len(self.words))

    @property
    def part_bytes(self) -> int:
        """Bytes of the part."""
        return self.format.part_bytes(self.shape)

    def planes(self) -> list[Plane]:
        """Return the packed parts of the codes."""
        planes, low, begin = [], 0, 0
        for bits in self.format.planes if isinstance(self.format, IntegerFormat) else (8,):
            planes.append(Plane(bits, low, begin))
            low += bits
            begin += self.shape.page_size * self.channels * bits // 8
        return planes


def grouped_part(spec: KernelSpec, role: Role) -> GroupedPart | None:
    """Return the numbers of one part, or None if it stores plain words."""
    layout = record_layout(spec)
    format_ = layout.format(role)
    if isinstance(format_, IntegerFormat | Float8Format):
        return GroupedPart(format_, layout.part(role))
    return None


def float8_formats(*parts: GroupedPart | None) -> list[Float8Format]:
    """Return the floating-point types of the codes of some parts, each once."""
    found = (part.float8 for part in parts if part is not None)
    return list(dict.fromkeys(format_ for format_ in found if format_ is not None))


def part_channels(spec: KernelSpec, role: Role) -> int:
    """Return the channels of one part with its padding."""
    layout = record_layout(spec)
    return layout.format(role).channels(layout.part(role))
