"""The numbers of a GPU kernel: tiles of tokens, pieces of channels, and where a record has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import PartShape, Role, get_format
from kvcompile.codegen.formats.float8 import Float8Format
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.formats.planes import (
    HEADER_BYTES,
    Chunk,
    PlaneShape,
    chunks,
    plane_shape,
    scale_offset,
)
from kvcompile.codegen.layout import DEFAULT_GROUP_SIZE, RecordLayout, Window
from kvcompile.codegen.source import Supported, Unsupported
from kvcompile.codegen.spec import MOST_QUERIES, DTypeName, KernelSpec

TRITON_TYPE: dict[str, str] = {"fp32": "tl.float32", "bf16": "tl.bfloat16", "fp16": "tl.float16"}
POINTER_TYPE = {**TRITON_TYPE, "int16": "tl.int16", "int32": "tl.int32"}
TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int16": 2, "int32": 4}
ROLES: tuple[Role, Role] = ("k", "v")
LEAST_ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""

MOST_BLOCK_ROWS = 64
LOWEST_SCORE = -1e30
"""The running maximum begins here, and an additive mask takes no score further: tokens of the
lowest finite masks are seen if nothing else is, all alike, as in eager attention."""

LOWEST_LSE = -1e25
"""Times the sum of its weights, what a split says whose scores are all lowest: beside -1e30 the
logarithm of that sum would be lost."""

LEAST_TILE = 16
"""Tokens of the smallest tile: as many as tensor cores contract."""

EXACT_TILE = 32
"""Tokens of a tile of the exact pages beside quantized ones: two of them."""

MOST_EXACT_TILE = 64
"""Tokens of the largest tile of a page of exact words, so that three of them fit on a chip."""

MOST_NUMBERS_OF_A_WARP = 64 * 128
"""Numbers of K, or of V, of a quantized page that one warp multiplies without spilling."""


@dataclass(frozen=True)
class Piece:
    """Channels that are one tile: a plane of a chunk, or a chunk of words.

    Attributes:
        name: What its tensors are called by.
        offset: The first channel.
        width: How many, a power of two.
        group: The group of channels whose scale it has.
    """

    name: str
    offset: int
    width: int
    group: int


@dataclass(frozen=True)
class Part:
    """K or V of a record.

    Attributes:
        role: Which.
        shape: What it holds.
        name: Name of its format.
        channels: Channels stored.
        offset: Byte in the record where it begins.
    """

    role: Role
    shape: PartShape
    name: str
    channels: int
    offset: int

    @property
    def is_grouped(self) -> bool:
        """Whether its numbers share scales."""
        return get_format(self.name).is_grouped

    @property
    def float8(self) -> Float8Format | None:
        """Its format, if its codes are floating-point numbers of 8 bits."""
        format_ = get_format(self.name)
        return format_ if isinstance(format_, Float8Format) else None

    @property
    def is_float(self) -> bool:
        """Whether its codes are floating-point numbers of 8 bits."""
        return self.float8 is not None

    @property
    def unit_bits(self) -> int:
        """By 2 to this power numbers that are unpacked as fp16 are smaller than what they say."""
        return 0 if self.float8 is None else self.float8.fp16_exponent

    @property
    def types(self) -> list[str]:
        """The types of what lies in it."""
        if not self.is_grouped:
            return [self.name]
        return ["int16", self.scale_type]

    @property
    def scale_type(self) -> str:
        """The type of its scales: a word of scale and minimum, or a scale alone."""
        return "bf16" if self.is_float else "int32"

    @property
    def scale_name(self) -> str:
        """What its scales are called when they are loaded."""
        return "scale" if self.is_float else "words"

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the fields of each part of its codes."""
        format_ = get_format(self.name)
        return format_.planes if isinstance(format_, IntegerFormat) else (8,)

    @cached_property
    def planes(self) -> PlaneShape:
        """The planes of its codes."""
        return plane_shape(self.shape, self.channels, self.widths)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Its chunks of channels; the last one of exact words may reach beyond them."""
        if self.is_grouped:
            return self.planes.chunks
        return tuple(chunks(-(-self.channels // LEAST_TILE) * LEAST_TILE))

    @cached_property
    def pieces(self) -> list[Piece]:
        """Its pieces, in the order of the channels."""
        across = self.planes.across if self.is_grouped else 1
        found: list[Piece] = []
        for chunk in self.chunks:
            width = chunk.width // across
            for plane in range(across):
                offset = chunk.offset + plane * width
                group = offset // self.shape.group_size if self.role == "v" else 0
                found.append(Piece(f"{len(found)}", offset, width, group))
        return found

    @property
    def groups(self) -> int:
        """Groups of channels that have a scale of their own."""
        return len(self.shape.channel_groups()) if self.role == "v" else 1

    @property
    def codes_offset(self) -> int:
        """Byte in the record where its codes begin, or its words."""
        return self.offset + (HEADER_BYTES if self.is_grouped else 0)

    @property
    def scales_offset(self) -> int:
        """Byte in the record where its scales begin."""
        return self.offset + scale_offset(self.shape, self.channels, self.widths)

    @property
    def token_planes(self) -> int:
        """The most planes of tokens of its words."""
        return max(p.tokens for p in self.planes.planes) if self.is_grouped else 1


def supports_records(spec: KernelSpec) -> Supported | Unsupported:
    """Say whether the records of `spec` can be printed, and if not, why."""
    try:
        get_format(spec.k_format)
        get_format(spec.v_format)
        _ = GpuShape(spec).layout
    except (UnsupportedKernelError, ValueError) as error:
        return Unsupported(str(error), "Choose sizes that go with the formats.")
    if spec.rotary is not None:
        return Unsupported("a turning mean of K on a GPU", "Leave separate_k_bias off.")
    return Supported()


def fills_tiles(layout: RecordLayout) -> bool:
    """Whether the pages of a layout have tokens enough for tensor cores.

    Words of few channels hold several tokens of each, which are in tiles of their own.
    """
    tiles = max(_part(layout, role).token_planes for role in ROLES)
    return layout.page_size // tiles >= LEAST_TILE


def _part(layout: RecordLayout, role: Role) -> Part:
    shape, format_ = layout.part(role), layout.format(role)
    offset = layout.k_offset if role == "k" else layout.v_offset
    return Part(role, shape, format_.name, format_.channels(shape), offset)


@dataclass(frozen=True)
class GpuShape:
    """What follows from a spec."""

    spec: KernelSpec

    @cached_property
    def layout(self) -> RecordLayout:
        """Layout of the records."""
        spec = self.spec
        window = None
        if spec.is_grouped:
            assert spec.num_sink_tokens is not None
            # How much is quantized is read from the store, so the residual length has no say here.
            window = Window(spec.dtype, spec.num_sink_tokens, 0)
        return RecordLayout(
            spec.k_format,
            spec.v_format,
            spec.head_dim_qk,
            spec.head_dim_vo,
            spec.page_size,
            spec.q_group_size or DEFAULT_GROUP_SIZE,
            window,
            order="gpu16",
        )

    def part(self, role: Role, *, exact: bool = False) -> Part:
        """Return K or V of a record, or of one of the exact pages beside quantized ones."""
        return _part(self.layout.exact if exact else self.layout, role)

    @cached_property
    def k(self) -> Part:
        """K of a record."""
        return self.part("k")

    @cached_property
    def v(self) -> Part:
        """V of a record."""
        return self.part("v")

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.spec.head_dim_vo

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        assert self.spec.q_heads_per_kv_head is not None
        return self.spec.q_heads_per_kv_head

    @property
    def is_one(self) -> bool:
        """Whether there is one query token."""
        return self.spec.queries == "one"

    @property
    def block_rows(self) -> int:
        """Rows of a program."""
        if self.spec.queries == "many":
            return MOST_BLOCK_ROWS
        most = self.group if self.is_one else self.group * MOST_QUERIES
        return min(max(LEAST_ROWS, 1 << (most - 1).bit_length()), MOST_BLOCK_ROWS)

    @property
    def has_blocks(self) -> bool:
        """Whether the rows of a KV head may be more than those of a program."""
        return not self.is_one or self.group > self.block_rows

    @property
    def tiles(self) -> int:
        """Tiles of tokens whose scores are computed one by one."""
        return max(self.k.token_planes, self.v.token_planes)

    @property
    def tile_names(self) -> list[str]:
        """What the names of the numbers of each tile end in."""
        return [f"_{i}" if self.tiles > 1 else "" for i in range(self.tiles)]

    @property
    def block_tokens(self) -> int:
        """Tokens of an iteration: a page, or a part of one of exact words alone."""
        if self.spec.is_grouped:
            return self.spec.page_size
        return min(self.spec.page_size, MOST_EXACT_TILE)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return self.block_tokens // self.tiles

    @property
    def has_dots(self) -> bool:
        """Whether tensor cores multiply; tiles too small for them are multiplied one by one."""
        return self.tile_tokens >= LEAST_TILE

    @property
    def is_fp16(self) -> bool:
        """Whether quantized numbers are multiplied as fp16."""
        return self.spec.compute == "fp16"

    @property
    def is_raw(self) -> bool:
        """Whether codes of K are multiplied as they lie in the mantissa of fp16 numbers.

        What they have too much, 1024 each, is the same for all tokens of a page. It takes 7 of the
        24 bits of the sums, and leaves more than the 11 of the products.
        """
        part = self.k
        single = part.is_grouped and not part.is_float and len(part.widths) == 1
        return self.is_fp16 and self.spec.isa == "ptx" and single and part.token_planes == 1

    @property
    def weight_bits(self) -> int:
        """How many bits weights are larger than 1: fp16 holds more of small ones then.

        With scales of V that are below 4, with those of e4m3 below 1024, they stay below 65504.
        """
        if self.product_type("v") != "fp16":
            return 0
        return min(12, 13 - self.v.unit_bits)

    @property
    def has_unit(self) -> bool:
        """Whether the output is added up in units that change with the scales of V."""
        return self.is_fp16 and self.v.is_grouped

    @property
    def has_minima(self) -> bool:
        """Whether the minima of V are added up beside its codes."""
        return self.has_unit and not self.v.is_float

    @property
    def is_one_warp(self) -> bool:
        """Whether a program is one warp: its registers hold an iteration over quantized pages.

        Numbers of 32 bits and the output of many rows take too many. Words of two codes count
        twice: 20 registers and more spill where words of four codes leave some.
        """
        if self.spec.isa != "ptx" or not self.is_fp16 or self.block_rows > LEAST_ROWS:
            return False
        numbers = self.block_tokens * max(self.k.channels, self.v.channels)
        doubled = 2 if 8 in (*self.k.widths, *self.v.widths) else 1
        return numbers * doubled <= MOST_NUMBERS_OF_A_WARP

    @property
    def has_minimum_columns(self) -> bool:
        """Whether the minima of V are columns of the sums, and not products of their own.

        These need fewer instructions and registers in one warp, whose operands stay in registers.
        With several, each operand goes through shared memory.
        """
        return self.has_minima and not self.is_one_warp

    @property
    def has_sums(self) -> bool:
        """Whether weights are added up by tensor cores: one narrow product more per tile."""
        return self.product_type("v") != "fp32"

    @property
    def minimum_groups(self) -> int:
        """Groups of V, up to a power of two."""
        return 1 << (self.v.groups - 1).bit_length()

    @property
    def sum_columns(self) -> int:
        """Columns of the sums: with minima among them, the first half adds weights."""
        return max(8, 2 * self.minimum_groups) if self.has_minimum_columns else 8

    def product_type(self, role: Role, *, exact: bool = False) -> DTypeName:
        """Return the type in which K or V is multiplied."""
        part = self.part(role, exact=exact)
        if part.is_grouped:
            return "fp16" if self.is_fp16 else "fp32"
        return self.spec.dtype if part.name == self.spec.dtype else "fp32"
