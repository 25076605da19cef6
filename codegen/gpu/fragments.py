"""The fragments of attention, named after the mathematics.

Letters of a program: M rows of queries, N tokens of a tile, W channels of a piece. Scores are in
units of log2, so that weights are powers of two. What no query sees has the score -inf; the running
maximum begins at a finite `LOWEST_SCORE`, so that the weight of what is not seen is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcompile.codegen.gpu import rope
from kvcompile.codegen.gpu.shape import (
    LOWEST_LSE,
    LOWEST_SCORE,
    POINTER_TYPE,
    ROLES,
    TRITON_TYPE,
    TYPE_BYTES,
    GpuShape,
    Piece,
)

if TYPE_CHECKING:
    from kvcompile.codegen.gpu.text import Writer

LOG2E = 1.4426950408889634


def parameters(shape: GpuShape) -> list[str]:
    """Return the lines of the parameters."""
    spec = shape.spec
    lines = ["q_BHSD, q_sb, q_sh, q_ss,"]
    lines += [rope.PARAMETERS] if spec.rope else []
    lines += ["page_BN, page_stride, starts_B, kv_len,"]
    if spec.is_grouped:
        lines.append("quantized_B, ring_from_B, exact_BN, exact_stride,")
    if spec.mask in ("bool", "additive"):
        lines.append("mask_BHST, m_sb, m_sh, m_ss, m_st,")
    lines.append("out_RND, lse_RN, scale_log2,")
    if shape.has_blocks:
        lines.append("num_kv_heads, query_len,")
    return [f"    {line}" for line in lines]


def varying(shape: GpuShape) -> list[str]:
    """Return the parameters that change from call to call."""
    spec = shape.spec
    found = ["page_stride"]
    found += ["exact_stride"] if spec.is_grouped else []
    found += ["m_sb", "m_sh", "m_ss"] if spec.mask in ("bool", "additive") else []
    found += ["query_len"] if shape.has_blocks else []
    return found


def rows(w: Writer, shape: GpuShape) -> None:
    """Say which rows, tokens and split a program has."""
    group, block = shape.group, shape.block_rows
    w(
        "split = tl.program_id(0)",
        "splits = tl.num_programs(0)",
        "b = tl.program_id(2).to(tl.int64)",
    )
    if shape.has_blocks:
        w("h = (tl.program_id(1) % num_kv_heads).to(tl.int64)")
        w(f"r = tl.program_id(1) // num_kv_heads * {block} + tl.arange(0, {block})")
        w(f"rows = {'' if shape.is_one else 'query_len * '}{group}")
    else:
        w("h = tl.program_id(1).to(tl.int64)", "num_kv_heads = tl.num_programs(1)")
        w(f"r = tl.arange(0, {block})", f"rows = {group}")
    w("live_rows = (r < rows)[:, None]")
    if shape.is_one:
        w(f"head = h * {group} + r")
    else:
        w(f"s = r // {group}  # query token", f"head = h * {group} + r % {group}")
    w(
        "start = tl.load(starts_B + b)",
        "stored = (tl.load(kv_len) - start).to(tl.int32)  # tokens of this row",
    )
    if shape.spec.slides:
        w("hidden = tl.maximum(-start, 0).to(tl.int32)  # tokens before column 0")
    window = shape.spec.sliding_window
    if window is not None and shape.is_one:
        w(f"first_seen = stored - {window}")
    elif window is not None:
        w(f"first_seen = stored - query_len - {window - 1}  # by the first query token")
    w("")


def load_query(w: Writer, shape: GpuShape) -> None:
    """Load the query, piece by piece of K."""
    step = "" if shape.is_one else " + s * q_ss"
    w("# load_query", f"q_row = (q_BHSD + b * q_sb + head * q_sh{step})[:, None]")
    w(*rope.angle_rows(shape.spec, "r * 0" if shape.is_one else "s"))
    for piece in shape.k.pieces:
        inside = within(piece, shape.spec.head_dim_qk)
        seen = f"live_rows & {inside}" if inside else "live_rows"
        w(f"q{piece.name} = tl.load(q_row + {channels(piece)}, mask={seen}, other=0.0)")
        turning = (f"q{piece.name}", "q_row", piece.offset, channels(piece), "live_rows")
        w(*rope.turn(shape.spec, *turning))
    w("")


def channels(piece: Piece) -> str:
    """Return the channels of a piece, along the columns of a tile."""
    begin = f"{piece.offset} + " if piece.offset else ""
    return (
        f"({begin}tl.arange(0, {piece.width}))[None, :]"
        if begin
        else (f"tl.arange(0, {piece.width})[None, :]")
    )


def within(piece: Piece, count: int) -> str:
    """Return the condition that a channel is one of the first `count`, or nothing."""
    return f"({channels(piece)} < {count})" if piece.offset + piece.width > count else ""


def begin(w: Writer, shape: GpuShape) -> None:
    """Begin with no weight."""
    block = shape.block_rows
    w(f"m = tl.full([{block}], {LOWEST_SCORE}, tl.float32)")
    if shape.has_sums:
        w(f"sums = tl.zeros([{block}, {shape.sum_columns}], tl.float32)")
        if shape.has_minimum_columns:
            w(f"column = tl.arange(0, {shape.sum_columns})[None, :]")
        elif shape.has_minima:
            for group in range(shape.v.groups):
                w(f"low_sums{group} = tl.zeros([{block}, 8], tl.float32)")
    else:
        w(f"l = tl.zeros([{block}], tl.float32)")
    for piece in shape.v.pieces:
        w(f"o{piece.name} = tl.zeros([{block}, {piece.width}], tl.float32)")
    if shape.has_unit:
        w("unit = tl.full((), 127, tl.int32)  # o counts in 2^(unit - 127)")
    w("")


def point_to_record(
    w: Writer, shape: GpuShape, *, exact: bool = False, header: bool = False
) -> None:
    """Name the record of a page, as a pointer to each type of what lies in it.

    Args:
        w: The module.
        shape: Its numbers.
        exact: Whether it is the record of an exact page beside quantized ones.
        header: Whether the headers of its parts are needed too.
    """
    layout = shape.layout.exact if exact else shape.layout
    w(f"record = page + h * {layout.record_bytes}")
    parts = [shape.part(role, exact=exact) for role in ROLES]
    types = dict.fromkeys(name for part in parts for name in part.types)
    if header:
        types["int32"] = None
    for name in types:
        w(f"as_{name} = tl.multiple_of(record.to(tl.pointer_type({POINTER_TYPE[name]})), 16)")


def place(name: str, offset: int) -> str:
    """Return the pointer to the byte `offset` of the record, as to a type."""
    words = offset // TYPE_BYTES[name]
    return f"as_{name} + {words}" if words else f"as_{name}"


def scores(
    w: Writer,
    shape: GpuShape,
    query: str,
    x: str,
    *,
    exact: bool,
    tile: str = "",
    beside: bool = True,
) -> None:
    """Multiply the query with a tile of K: x = q K^T, piece by piece.

    Args:
        w: The module.
        shape: Its numbers.
        query: What the pieces of the query are called by.
        x: Name of the result.
        exact: Whether K is words, whose product only lacks the scale.
        tile: What the tile's pieces end in.
        beside: Whether the words are those of exact pages beside quantized ones.
    """
    role_type = shape.product_type("k", exact=shape.spec.is_grouped and exact and beside)
    ieee = ', input_precision="ieee"' if role_type == "fp32" else ""
    cast = ".to(tl.float32)" if role_type == "fp32" and shape.spec.dtype != "fp32" else ""
    is_small = not shape.has_dots and not (exact and beside)
    for i, piece in enumerate(shape.k.pieces):
        name = piece.name
        if is_small:
            factors = f"{query}{name}[:, None, :].to(tl.float32) * k{name}{tile}[None, :, :]"
            w(f"{x} = {f'{x} + ' if i else ''}tl.sum({factors}.to(tl.float32), 2)")
            continue
        before = f", {x}" if i else ""
        w(f"{x} = tl.dot({query}{name}{cast}, k{name}{tile}.T{before}{ieee})")


@dataclass(frozen=True)
class Units:
    """How products become scores: product * factor + offset, the factor positive.

    Attributes:
        factor: One number; nothing is 1.
        row_factor: One number per row; nothing is 1.
        offset: One number per row; nothing is 0.
    """

    factor: str = ""
    row_factor: str = ""
    offset: str = ""

    def of(self, x: str) -> str:
        """Return the scores of products along the columns of a tile."""
        return f"{self.scaled(x)}{f' + {self.offset}[:, None]' if self.offset else ''}"

    def scaled(self, x: str) -> str:
        """Return the scores without the offset."""
        rows = f"{self.row_factor}[:, None]" if self.row_factor else ""
        return " * ".join(name for name in (x, self.factor, rows) if name)

    def of_row(self, x: str) -> str:
        """Return the scores of one product per row."""
        scaled = " * ".join(name for name in (x, self.factor, self.row_factor) if name)
        return f"{scaled} + {self.offset}" if self.offset else scaled


EXACT_UNITS = Units("scale_log2")
"""Units of the products of words."""


def finish_scores(w: Writer, shape: GpuShape, x: str, units: Units) -> Units:
    """Turn products into scores where something is done with these; return the units left."""
    if shape.spec.softcap is None and shape.spec.mask != "additive":
        return units
    w(f"{x} = {units.of(x)}")
    cap(w, shape, x)
    return Units()


def cap(w: Writer, shape: GpuShape, x: str) -> None:
    """Bound scores: cap * tanh(score / cap)."""
    softcap = shape.spec.softcap
    if softcap is not None:
        # tanh(y) = 1 - 2 / (1 + e^2y), and e^2y = 2^(x * 2 / cap) for a score x in units of log2.
        w(
            f"{x} = {softcap * LOG2E!r} * (1.0 - 2.0 / (1.0 + tl.exp2({x} * {2.0 / softcap!r})))"
            f"  # {softcap:g} * tanh"
        )


def mask(w: Writer, shape: GpuShape, x: str, tokens: str, live: str) -> None:
    """Give the score -inf to what a query does not see, and add an additive mask.

    Args:
        w: The module.
        shape: Its numbers.
        x: The scores.
        tokens: Numbers of the tokens in their row of the batch.
        live: Condition on the tokens, or nothing if all are stored.
    """
    spec = shape.spec
    if spec.slides:
        live = f"({live} & ({tokens} >= hidden))" if live else f"({tokens} >= hidden)"
    seen = [f"{live}[None, :]"] if live else []
    if spec.sliding_window is not None:
        if shape.is_one:
            seen.append(f"({tokens} >= first_seen)[None, :]")
        else:
            seen.append(f"({tokens}[None, :] >= first_seen + s[:, None])")
    if spec.mask == "causal":
        column = f"(start + {tokens})[None, :]"
        seen.append(f"({column} <= {'0' if shape.is_one else 's[:, None]'})")
    if spec.mask in ("bool", "additive"):
        step = "" if shape.is_one else " + s * m_ss"
        where = f"(head * m_sh{step})[:, None] + (start + {tokens})[None, :] * m_st"
        both = f"live_rows & {live}[None, :]" if live else "live_rows"
        w(f"given = tl.load(mask_BHST + b * m_sb + {where}, mask={both}, other=0)")
        if spec.mask == "bool":
            seen.append("(given != 0)")
        else:
            seen.append('(given > -float("inf"))')
            w(
                "given = given.to(tl.float32)",
                f"{x} = tl.maximum({x} + given * {LOG2E!r}, {LOWEST_SCORE})",
            )
    if seen:
        w(f'{x} = tl.where({" & ".join(seen)}, {x}, -float("inf"))')


def online_softmax(w: Writer, shape: GpuShape, x: list[str], p: list[str], units: Units) -> None:
    """Turn scores into weights relative to the running maximum; a shrinks what there was.

    The running maximum is kept `weight_bits` too low, and weights are that much larger.
    """
    largest = x[0]
    for name in x[1:]:
        largest = f"tl.maximum({largest}, {name})"
    largest = units.of_row(f"tl.max({largest}, 1)")
    if shape.weight_bits:
        largest += f" - {float(shape.weight_bits)}"
    w(f"m_next = tl.maximum(m, {largest})", "a = tl.exp2(m - m_next)", "m = m_next")
    below = "m"
    if units.offset:
        below = "below"
        w(f"below = m - {units.offset}")
    for score, weight in zip(x, p, strict=True):
        w(f"{weight} = tl.exp2({units.scaled(score)} - {below}[:, None])")


def accumulate(w: Writer, shape: GpuShape, block: int, value: str = "v") -> None:
    """Add a tile of exact words, weighted; its pieces are called by `value`."""
    wanted = shape.product_type("v", exact=shape.spec.is_grouped)
    if shape.has_sums:
        ones = f"tl.where(column < {shape.sum_columns // 2}, 1.0, 0.0)"
        if not shape.has_minimum_columns:
            ones = f"tl.full([1, {shape.sum_columns}], 1.0, tl.float32)"
        sum_type = TRITON_TYPE[wanted]
        w(
            f"sums = tl.dot(p.to({sum_type}), tl.broadcast_to({ones}, {block}, "
            f"{shape.sum_columns}).to({sum_type}), sums * a[:, None])"
        )
    else:
        w("l = l * a + tl.sum(p, 1)")
    ieee = ', input_precision="ieee"' if wanted == "fp32" else ""
    w(f"p = p.to({TRITON_TYPE[wanted]})") if wanted != "fp32" else None
    for piece in shape.v.pieces:
        name = piece.name
        w(f"o{name} = tl.dot(p, {value}{name}, o{name} * a[:, None]{ieee})")


def store_partial(w: Writer, shape: GpuShape) -> None:
    """Store the normalised output and its log2-sum-exp; of nothing it is -inf."""
    w("", "# store_partial")
    if shape.has_minimum_columns:
        half = shape.sum_columns // 2
        each = half // shape.minimum_groups
        w(f"l = tl.sum(tl.where(column < {half}, sums, 0.0), 1) * {1 / half!r}")
        for group in range(shape.v.groups):
            low = half + group * each
            inside = f"(column >= {low}) & (column < {low + each})"
            w(f"c{group} = tl.sum(tl.where({inside}, sums, 0.0), 1) * {1 / each!r}")
    elif shape.has_sums:
        w(f"l = tl.sum(sums, 1) * {1 / shape.sum_columns!r}")
        for group in range(shape.v.groups if shape.has_minima else 0):
            w(f"c{group} = tl.sum(low_sums{group}, 1) * 0.125")
    w(
        "some = l > 0",
        "over_l = (1.0 / tl.where(some, l, 1.0))[:, None]",
        "row = ((b * num_kv_heads + h) * rows + r) * splits + split",
        'lse = tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), -float("inf"))',
    )
    if shape.spec.mask == "additive":
        w(f"lse = tl.where(some & (m == {LOWEST_SCORE}), {LOWEST_LSE} * l, lse)")
    w(
        "tl.store(lse_RN + row, lse, mask=r < rows)",
    )
    count = shape.out_channels
    for piece in shape.v.pieces:
        name = piece.name
        inside = within(piece, count)
        seen = f"live_rows & {inside}" if inside else "live_rows"
        value = f"o{name}"
        if shape.has_minima:
            value = f"({value} + c{piece.group}[:, None])"
        if shape.has_unit:
            value += " * power(unit)"
        w(
            f"tl.store(out_RND + row[:, None] * {count} + {channels(piece)}, "
            f"{value} * over_l, mask={seen})"
        )
