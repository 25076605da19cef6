"""The fragment that turns q and new K on their way in: rotary embedding, in fp32 and rounded once.

A program loads the channels of a row, their partners, and cosines and sines of the row's token. The
result is rounded to the model's dtype where operators store theirs. Products of bf16 or fp16
numbers are exact in fp32, contracted or not; with fp32 numbers a contraction saves one rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompile.codegen.gpu.shape import TRITON_TYPE

if TYPE_CHECKING:
    from kvcompile.codegen.spec import KernelSpec

TURNED = """@triton.jit
def turned(x, row, c, cos_row, sin_row, live):
    # x * cos + rotate(x) * sin, for the channels c of a row, of which x are loaded already
    turns = live & (c < {dim})
    partner = tl.load(row + {partner}, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(cos_row + c, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(sin_row + c, mask=turns, other=0.0).to(tl.float32)
    sum = x.to(tl.float32) * cos + tl.where({is_first}, -partner, partner) * sin
    return tl.where(turns, sum.to({dtype}), x)
"""

PARAMETERS = "cos_BSR, cos_sb, cos_ss, sin_BSR, sin_sb, sin_ss,"


def turned_text(spec: KernelSpec) -> list[str]:
    """Return the function that turns channels, if any turn."""
    rope = spec.rope
    if rope is None:
        return []
    half = rope.pairs
    return [
        TURNED.format(
            dim=rope.dim,
            partner="(c ^ 1)"
            if rope.interleaved
            else f"tl.where(c < {half}, c + {half}, c - {half})",
            is_first="c % 2 == 0" if rope.interleaved else f"c < {half}",
            dtype=TRITON_TYPE[spec.dtype],
        )
    ]


def angle_rows(spec: KernelSpec, token: str) -> list[str]:
    """Return the lines that name cosines and sines of new tokens, along the rows; none if unturned.

    Args:
        spec: The kernel.
        token: Numbers of the new tokens, one per row.
    """
    if spec.rope is None:
        return []
    return [
        f"{name}_row = ({name}_BSR + b * {name}_sb + {token} * {name}_ss)[:, None]"
        for name in ("cos", "sin")
    ]


def turn(spec: KernelSpec, x: str, row: str, begin: int, columns: str, live: str) -> list[str]:
    """Return the line that turns loaded channels; none if they do not turn.

    Args:
        spec: The kernel.
        x: Name of what is loaded.
        row: Pointer to the first channel, along the rows.
        begin: The first of the channels.
        columns: The channels, along the columns.
        live: Condition on the rows.
    """
    if spec.rope is None or begin >= spec.rope.dim:
        return []
    return [f"{x} = turned({x}, {row}, {columns}, cos_row, sin_row, {live})"]


def rope_line(spec: KernelSpec) -> list[str]:
    """Return the line of the glossary that says what turns, if anything does."""
    return [] if spec.rope is None else [f"rope       {spec.rope.said} {spec.dtype}"]
