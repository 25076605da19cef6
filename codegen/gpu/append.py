"""append: writes new K and V into their pages, and quantizes the pages that are old enough.

A program writes 16 tokens of a KV head to exact words, or quantizes one page of it. The tokens of
such a page that are new are read from where they come from, not from the ring: other programs may
be writing them there at the same time.
"""

from __future__ import annotations

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu import quantize, rope
from kvcompile.codegen.gpu.fragments import channels, place, point_to_record, within
from kvcompile.codegen.gpu.glossary import append_glossary
from kvcompile.codegen.gpu.shape import (
    ROLES,
    TRITON_TYPE,
    GpuShape,
    Part,
    Piece,
    supports_records,
)
from kvcompile.codegen.gpu.text import Writer, jit
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec


class AppendGenerator:
    """Prints append kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        return supports_records(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        shape = GpuShape(spec)
        w = Writer()
        w(*append_glossary(shape), "", "import triton", "import triton.language as tl", "", "")
        for text in (*quantize.helpers(shape), *rope.turned_text(spec)):
            w(*text.splitlines(), "", "")
        varying = ["k_len", "v_len", "page_stride"]
        varying += ["exact_stride", "exact_programs"] if spec.is_grouped else []
        w(jit(varying), f"def {spec.symbol}(")
        w("    k_BKSD, k_sb, k_sh, k_st, k_len,", "    v_BKSD, v_sb, v_sh, v_st, v_len,")
        if spec.rope is not None:
            w(f"    {rope.PARAMETERS}")
        w("    page_BN, page_stride, starts_B, past_len,")
        if spec.is_grouped:
            w("    quantized_B, ring_from_B, exact_BN, exact_stride, exact_programs,")
        with w.block("):"):
            _body(w, shape)
        return KernelSource(spec, w.text)


def _body(w: Writer, shape: GpuShape) -> None:
    w(
        "program = tl.program_id(0)",
        "h = tl.program_id(1).to(tl.int64)",
        "b = tl.program_id(2).to(tl.int64)",
        "before = (tl.load(past_len) - tl.load(starts_B + b)).to(tl.int32)  # tokens of this row",
        "k_row = k_BKSD + b * k_sb + h * k_sh",
        "v_row = v_BKSD + b * v_sb + h * v_sh",
    )
    if not shape.spec.is_grouped:
        _write_tokens(w, shape)
        return
    window = shape.layout.window
    assert window is not None
    w(
        "quantized = tl.load(quantized_B + b)",
        "ring_from = tl.load(ring_from_B + b)",
        f"ring_slot = {window.sink_pages * TILE - window.num_sink_tokens} - ring_from * "
        f"{shape.spec.page_size}",
    )
    with w.block("if program < exact_programs:"):
        _write_tokens(w, shape)
        w("return")
    w("number = ring_from + program - exact_programs")
    with w.block("if number < quantized:"):
        quantize.page(w, shape)


def _write_tokens(w: Writer, shape: GpuShape) -> None:
    """Write 16 new tokens where they belong, unless that is a quantized page."""
    spec, beside = shape.spec, shape.spec.is_grouped
    w(
        f"s = program * {TILE} + tl.arange(0, {TILE})",
        "token = before + s  # left padding, which is below 0, is not stored",
    )
    size, table = spec.page_size, "page_BN + b * page_stride"
    if beside:
        assert shape.layout.window is not None
        sinks, size = shape.layout.window.num_sink_tokens, TILE
        table = "exact_BN + b * exact_stride"
        ring = f"{sinks} + quantized * {spec.page_size}"
        w(
            f"live = (token >= 0) & ((token < {sinks}) | (token >= {ring}))",
            f"slot = tl.where(token < {sinks}, token, ring_slot + token)",
        )
    else:
        w("live = token >= 0", "slot = token")
    w(
        f"page = tl.load({table} + slot // {size}, mask=live & (s < tl.maximum(k_len, v_len)), "
        "other=0)"
    )
    point_to_record(w, shape, exact=beside)
    w(*rope.angle_rows(spec, "s"))
    for role in ROLES:
        part = shape.part(role, exact=beside)
        pointer = place(part.name, part.offset)
        w(f"{role}_words = ({pointer})[:, None] + (slot % {size})[:, None] * {part.channels}")
        for piece in part.pieces:
            _copy(w, spec, part, piece)


def _copy(w: Writer, spec: KernelSpec, part: Part, piece: Piece) -> None:
    role, dim = part.role, part.shape.head_dim
    live = f"(live & (s < {role}_len))[:, None]"
    inside, stored = within(piece, dim), within(piece, part.channels)
    w(
        f"x = tl.load({role}_row + s[:, None] * {role}_st + {channels(piece)}, "
        f"mask={live}{f' & {inside}' if inside else ''}, other=0.0)",
    )
    if role == "k":
        row = "k_row + s[:, None] * k_st"
        w(*rope.turn(spec, "x", row, piece.offset, channels(piece), live))
    w(
        f"tl.store({role}_words + {channels(piece)}, x.to({TRITON_TYPE[part.name]}), "
        f"mask={live}{f' & {stored}' if stored else ''})",
    )
