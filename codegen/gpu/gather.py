"""gather: copies stored K and V out of their pages into dense tensors.

A program reads 16 tokens of a KV head, each from the page that has it. It is made to be simple:
every element finds its own word, field and scale.
"""

from __future__ import annotations

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu.fragments import channels, place, point_to_record, within
from kvcompile.codegen.gpu.glossary import gather_glossary
from kvcompile.codegen.gpu.helpers import LOWER, MANTISSA, UPPER, unit_factor
from kvcompile.codegen.gpu.shape import (
    ROLES,
    GpuShape,
    Part,
    Piece,
    supports_records,
)
from kvcompile.codegen.gpu.text import Writer, jit
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec


class GatherGenerator:
    """Prints gather kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        return supports_records(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        shape = GpuShape(spec)
        w = Writer()
        w(*gather_glossary(shape), "", "import triton", "import triton.language as tl", "", "")
        if any(part.is_grouped and not part.is_float for part in (shape.k, shape.v)):
            for text in (UPPER, LOWER):
                w(*text.splitlines(), "", "")
        varying = ["k_sb", "k_sh", "k_end", "v_sb", "v_sh", "v_end", "page_stride", "begin"]
        varying += ["exact_stride"] if spec.is_grouped else []
        w(jit(varying), f"def {spec.symbol}(")
        w("    k_BKTD, k_sb, k_sh, k_st, k_end,", "    v_BKTD, v_sb, v_sh, v_st, v_end,")
        w("    page_BN, page_stride, starts_B, begin,")
        if spec.is_grouped:
            w("    quantized_B, ring_from_B, exact_BN, exact_stride,")
        with w.block("):"):
            _body(w, shape)
        return KernelSource(spec, w.text)


def _body(w: Writer, shape: GpuShape) -> None:
    spec = shape.spec
    w(
        "h = tl.program_id(1).to(tl.int64)",
        "b = tl.program_id(2).to(tl.int64)",
        f"t = begin + tl.program_id(0) * {TILE} + tl.arange(0, {TILE})",
        "token = t - tl.load(starts_B + b)  # left padding, which is below 0, is zeros",
        "asked = t < tl.maximum(k_end, v_end)",
    )
    if not spec.is_grouped:
        w(f"slot = token % {spec.page_size}", "here = asked & (token >= 0)")
        _point(w, shape, "page_BN + b * page_stride", f"token // {spec.page_size}", exact=False)
        for role in ROLES:
            _load_words(w, shape, shape.part(role), "slot", "x")
            _store(w, shape.part(role), "x")
        return
    window = shape.layout.window
    assert window is not None
    sinks, size = window.num_sink_tokens, spec.page_size
    ring_slot = window.sink_pages * TILE - sinks
    w(
        f"ring = {sinks} + tl.load(quantized_B + b) * {size}",
        f"ring_slot = {ring_slot} - tl.load(ring_from_B + b) * {size}",
        f"is_exact = (token < {sinks}) | (token >= ring)",
        "here = asked & (token >= 0) & is_exact",
        f"slot = tl.where(token < {sinks}, token, ring_slot + token)",
    )
    _point(w, shape, "exact_BN + b * exact_stride", f"slot // {TILE}", exact=True)
    for role in ROLES:
        _load_words(w, shape, shape.part(role, exact=True), f"slot % {TILE}", f"exact_{role}")
    w("here = asked & (token >= 0) & (is_exact == 0)", f"n = (token - {sinks}) % {size}")
    page = f"(token - {sinks}) // {size}"
    _point(w, shape, "page_BN + b * page_stride", page, exact=False)
    for role in ROLES:
        part = shape.part(role)
        if part.is_grouped:
            _load_codes(w, part)
        else:
            _load_words(w, shape, part, "n", "x")
        for piece in part.pieces:
            x = f"x{piece.name}"
            w(
                f"{x} = tl.where(is_exact[:, None], exact_{role}{piece.name}.to(tl.float32), "
                f"{x}.to(tl.float32))"
            )
        _store(w, part, "x")


def _point(w: Writer, shape: GpuShape, table: str, number: str, *, exact: bool) -> None:
    w(f"page = tl.load({table} + {number}, mask=here, other=0)")
    point_to_record(w, shape, exact=exact)


def _load_words(w: Writer, shape: GpuShape, part: Part, slot: str, name: str) -> None:
    """Load exact words, in the pieces of what is stored beside them."""
    w(f"words = ({place(part.name, part.offset)})[:, None] + ({slot})[:, None] * {part.channels}")
    for piece in shape.part(part.role).pieces:
        inside = within(piece, part.channels)
        seen = f"here[:, None] & {inside}" if inside else "here[:, None]"
        w(f"{name}{piece.name} = tl.load(words + {channels(piece)}, mask={seen}, other=0.0)")


def _load_codes(w: Writer, part: Part) -> None:
    scales = place(part.scale_type, part.scales_offset)
    for piece in part.pieces:
        _find_codes(w, part, piece)
        if part.role == "k":
            at = f"({scales})[:, None] + {channels(piece)}"
        else:
            begin = f"{piece.group * part.shape.page_size} + " if piece.group else ""
            at = f"({scales} + {begin}n)[:, None]"
        w(f"scale = tl.load({at}, mask=here[:, None], other=0)")
        if part.is_float:
            w(f"x{piece.name} = code * scale.to(tl.float32)")
        else:
            w(f"x{piece.name} = code.to(tl.float32) * upper(scale) + lower(scale)")


def _find_codes(w: Writer, part: Part, piece: Piece) -> None:
    across = part.planes.across
    number = int(piece.name)
    chunk, f = part.chunks[number // across], number % across
    offset, low = part.codes_offset, 0
    for planes in part.planes.planes:
        rows = part.shape.page_size // planes.tokens
        begin = chunk.offset // across
        columns = (
            f"{begin} + tl.arange(0, {piece.width})" if begin else f"tl.arange(0, {piece.width})"
        )
        w(
            f"words = ({place('int16', offset)} + n % {rows} * {part.channels // across})[:, None]",
            f"words = tl.load(words + ({columns})[None, :], mask=here[:, None], other=0)",
            f"field = (words.to(tl.int32) >> (n // {rows} * {across * planes.bits} + "
            f"{f * planes.bits})[:, None]) & {(1 << planes.bits) - 1}",
        )
        w(f"code = code | (field << {low})" if low else "code = field")
        offset += part.shape.page_size * part.channels * planes.bits // 8
        low += planes.bits
    if part.float8 is not None:
        shift = MANTISSA - part.float8.mantissa_bits
        w(
            f"bits = (((code & 0x7F) << {shift}) | ((code & 0x80) << 8)).to(tl.int16)",
            f"code = bits.to(tl.float16, bitcast=True).to(tl.float32){unit_factor(part)}",
        )


def _store(w: Writer, part: Part, name: str) -> None:
    role = part.role
    w(f"rows = {role}_BKTD + b * {role}_sb + h * {role}_sh + (t - begin)[:, None] * {role}_st")
    for piece in part.pieces:
        inside = within(piece, part.shape.head_dim)
        seen = f"(t < {role}_end)[:, None]" + (f" & {inside}" if inside else "")
        w(
            f"tl.store(rows + {channels(piece)}, "
            f"{name}{piece.name}.to({role}_BKTD.dtype.element_ty), mask={seen})"
        )
