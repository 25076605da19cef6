"""Tiles of exact words: those of exact pages, and those beside quantized pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcompile.codegen.formats import TILE, Role
from kvcompile.codegen.gpu.fragments import (
    EXACT_UNITS,
    accumulate,
    channels,
    finish_scores,
    mask,
    online_softmax,
    place,
    point_to_record,
    scores,
    within,
)
from kvcompile.codegen.gpu.shape import EXACT_TILE, TRITON_TYPE, GpuShape, Piece

if TYPE_CHECKING:
    from kvcompile.codegen.gpu.text import Writer


def exact_pages(w: Writer, shape: GpuShape, attend_tile: Callable[[str], None]) -> None:
    """Go over pages of exact words.

    Args:
        w: The module.
        shape: Its numbers.
        attend_tile: Prints what is done with a tile, given its slots in the page.
    """
    size, block = shape.spec.page_size, shape.block_tokens
    w("# the pages of this split")
    w(
        f"per_split = tl.cdiv(tl.cdiv(stored, {size}), splits) * {size}",
        "begin = split * per_split",
        "end = tl.minimum(begin + per_split, stored)",
        f"n = tl.arange(0, {block})",
    )
    if shape.spec.sliding_window is not None:
        w(f"begin = tl.maximum(begin, tl.maximum(first_seen, 0) // {block} * {block})")
    if shape.spec.slides:
        w(f"begin = tl.maximum(begin, hidden // {block} * {block})")
    table = "page_BN + b * page_stride"
    w(f"page = tl.load({table} + begin // {size}, mask=begin < end, other=0)")
    with w.block(f"for t in range(begin, end, {block}):"):
        point_to_record(w, shape)
        w(
            f"page = tl.load({table} + (t + {block}) // {size}, mask=t + {block} < end, other=0)"
            "  # one ahead"
        )
        slots = "n" if block == size else f"t % {size} + n"
        w("tokens = t + n", "live = tokens < end")
        attend_tile(f"({slots})[:, None]")


def attend_words(w: Writer, shape: GpuShape, slots: str, block: int, k_live: str) -> None:
    """Attend to a tile of exact words.

    Args:
        w: The module.
        shape: Its numbers.
        slots: The slots of the page, along the rows.
        block: Tokens of the tile.
        k_live: Condition on the tokens whose keys may be loaded, if not all may be.
    """
    load_words(w, shape, "k", slots, k_live)
    scores(w, shape, "q", "x", exact=True)
    units = finish_scores(w, shape, "x", EXACT_UNITS)
    mask(w, shape, "x", "tokens", "live")
    online_softmax(w, shape, ["x"], ["p"], units)
    load_words(w, shape, "v", slots, "live")
    accumulate(w, shape, block)


def window_pages(w: Writer, shape: GpuShape) -> None:
    """Go over sinks and ring, which lie in exact pages."""
    spec, size, block = shape.spec, TILE, EXACT_TILE
    window = shape.layout.window
    assert window is not None
    sinks, ring_slot = window.num_sink_tokens, window.sink_pages * TILE - window.num_sink_tokens
    w("# the exact pages: sinks, then the ring")
    w(
        f"sinks = tl.minimum(stored, {sinks})",
        f"quantized = tl.minimum(tl.load(quantized_B + b) * {spec.page_size}, stored - sinks)",
        f"ring_slot = {ring_slot} - tl.load(ring_from_B + b) * {spec.page_size}",
        f"j = tl.arange(0, {block})",
    )
    with w.block(f"for t in tl.range(0, stored - quantized, {block}, num_stages=1):"):
        w(
            "tokens = tl.where(t + j < sinks, t + j, t + j + quantized)",
            "live = tokens < stored",
            "slots = tl.where(t + j < sinks, tokens, ring_slot + tokens)",
            f"page = tl.load(exact_BN + b * exact_stride + slots // {size}, mask=live, other=0)",
        )
        point_to_record(w, shape, exact=True)
        attend_words(w, shape, f"(slots % {size})[:, None]", block, "live")


def load_words(
    w: Writer,
    shape: GpuShape,
    role: Role,
    slots: str,
    live: str,
    pieces: Sequence[Piece] | None = None,
) -> None:
    """Load a tile of exact words of K or V, in the pieces of its part.

    Args:
        w: The module.
        shape: Its numbers.
        role: K or V.
        slots: The slots of the page, along the rows.
        live: Condition on the tokens, if not all may be loaded.
        pieces: The pieces, if they are others.
    """
    beside = shape.spec.is_grouped
    part = shape.part(role, exact=beside)
    words, wanted = part.name, shape.product_type(role, exact=beside)
    pointer = place(words, part.offset)
    w(f"{role}_words = {f'({pointer})[:, None]' if beside else pointer}")
    cast = "" if wanted == words else f".to({TRITON_TYPE[wanted]})"
    for piece in pieces or (shape.k.pieces if role == "k" else shape.v.pieces):
        inside = within(piece, part.channels)
        seen = " & ".join(x for x in (f"{live}[:, None]" if live else "", inside) if x)
        masked = f", mask={seen}, other=0.0" if seen else ""
        w(
            f"{role}{piece.name} = tl.load({role}_words + {slots} * {part.channels} + "
            f"{channels(piece)}{masked}){cast}"
        )
