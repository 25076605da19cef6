"""The fragments over quantized pages.

With fp16 products a channel's scale of K goes into the query once per page, a token's scale of V
into its weight. Codes are small integers, exact in fp16; so that query and weight have the range of
fp16 and not less, both are divided by a power of two: that of the largest scale of the page, which
its record tells. The minima of K, bf16 numbers of any size, are multiplied as such, in a product
that is 8 columns wide; those of V, in units of the scales, in another one that adds up the weights
too, rounded as they are with the codes. With fp32 products codes become numbers in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompile.codegen.gpu import fragments
from kvcompile.codegen.gpu.fragments import place
from kvcompile.codegen.gpu.helpers import raw_place, unit_factor, unpack_float_name, unpack_name
from kvcompile.codegen.gpu.shape import TRITON_TYPE, GpuShape, Part, Piece

if TYPE_CHECKING:
    from kvcompile.codegen.gpu.text import Writer

IEEE = ', input_precision="ieee"'
"""Of a product of fp32 numbers, which is to be no product of tf32 numbers."""

QUERY_ROOM_BITS = 11
"""By 2 to this power scaled queries are larger, so that fp16 holds those of small scales with all
their bits. Below 4 are query and scale, at most, and 65504 is the largest fp16 number."""


def pages(w: Writer, shape: GpuShape) -> None:
    """Go over the quantized pages of a split."""
    spec = shape.spec
    assert shape.layout.window is not None
    sinks, size = shape.layout.window.num_sink_tokens, spec.page_size
    if shape.is_fp16 and shape.k.is_grouped:
        _scaled_query(w, shape)
    table = "page_BN + b * page_stride"
    w(
        "# the quantized pages of this split",
        f"count = tl.minimum(tl.load(quantized_B + b), tl.maximum(stored - {sinks}, 0) // {size})",
        "per_split = tl.cdiv(count, splits - 1)",
        "begin = split * per_split",
        "end = tl.minimum(begin + per_split, count)",
    )
    if spec.sliding_window is not None:
        w(f"begin = tl.maximum(begin, tl.maximum(first_seen - {sinks}, 0) // {size})")
    if spec.slides:
        w(f"begin = tl.maximum(begin, tl.maximum(hidden - {sinks}, 0) // {size})")
    w(f"n = tl.arange(0, {shape.tile_tokens})")
    if shape.has_unit:
        w("unit = tl.full((), 1, tl.int32)")
    w(f"page = tl.load({table} + begin, mask=begin < end, other=0)")
    with w.block("for i in range(begin, end):"):
        fragments.point_to_record(w, shape, header=shape.is_fp16)
        w(f"page = tl.load({table} + i + 1, mask=i + 1 < end, other=0)  # one ahead")
        _page(w, shape, sinks)


def _scaled_query(w: Writer, shape: GpuShape) -> None:
    """Every row of the query as fp16 numbers below 2 and a power of two."""
    w("# the query as fp16 numbers below 2 and a power of two")
    for i, piece in enumerate(shape.k.pieces):
        this = f"tl.max(tl.abs(q{piece.name}.to(tl.float32)), 1)"
        w(f"largest = {f'tl.maximum(largest, {this})' if i else this}")
    w("q_exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)")
    for piece in shape.k.pieces:
        name = piece.name
        w(f"qh{name} = (q{name}.to(tl.float32) * power(254 - q_exponent)[:, None]).to(tl.float16)")
    bits = query_bits(shape.k) - shape.k.unit_bits
    room = f" * {2.0**-bits}" if bits else ""
    w(f"q_scale_log2 = power(q_exponent) * scale_log2{room}")


def _page(w: Writer, shape: GpuShape, sinks: int) -> None:
    spec = shape.spec
    tiles = shape.tile_names
    xs, ps = [f"x{tile}" for tile in tiles], [f"p{tile}" for tile in tiles]
    if shape.k.is_grouped:
        _load_codes(w, shape, shape.k, tiles)
        _k_scales(w, shape)
    else:
        _load_word_tiles(w, shape, shape.k, tiles)
    units = _units(shape)
    for tile, x in zip(tiles, xs, strict=True):
        _scores(w, shape, x, tile)
        left = fragments.finish_scores(w, shape, x, units)
    needs_tokens = spec.mask != "none" or spec.sliding_window is not None or spec.slides
    for i, x in enumerate(xs):
        if needs_tokens:
            w(f"tokens = {sinks + i * shape.tile_tokens} + i * {spec.page_size} + n")
            fragments.mask(w, shape, x, "tokens", "")
    fragments.online_softmax(w, shape, xs, ps, left)
    if shape.v.is_grouped:
        _load_codes(w, shape, shape.v, tiles)
        _accumulate(w, shape, tiles)
    else:
        _load_word_tiles(w, shape, shape.v, tiles)
        for i, tile in enumerate(tiles):
            _accumulate_words(w, shape, tile, first=not i)


def query_bits(part: Part) -> int:
    """Return by which power of two a query with the scales of K is larger."""
    return part.unit_bits or QUERY_ROOM_BITS


def _load_codes(w: Writer, shape: GpuShape, part: Part, tiles: list[str]) -> None:
    """Unpack the codes of a page: a tile of numbers per piece and tile of tokens."""
    role, words = part.role, part.planes
    across = words.across
    offset, low = part.codes_offset, 0
    for number, planes in enumerate(words.planes):
        pointer = f"{role}_words{number or ''}"
        w(f"{pointer} = {place('int16', offset)}")
        offset += part.shape.page_size * part.channels * planes.bits // 8
        slices = shape.tiles // planes.tokens
        row = part.channels // across
        for c, chunk in enumerate(words.chunks):
            width = chunk.width // across
            begin = chunk.offset // across
            columns = f"({begin} + tl.arange(0, {width}))" if begin else f"tl.arange(0, {width})"
            for r in range(slices):
                rows = f"({r * shape.tile_tokens} + n)" if r else "n"
                names = [
                    f"{role}{c * across + f}{tiles[t * slices + r]}"
                    for t in range(planes.tokens)
                    for f in range(across)
                ]
                if number:
                    names = [f"{name}h" for name in names]
                load = f"tl.load({pointer} + {rows}[:, None] * {row} + {columns}[None, :])"
                if part.float8 is not None:
                    call = unpack_float_name(part.float8)
                else:
                    call = unpack_name(planes.bits, is_raw=role == "k" and shape.is_raw)
                w(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}({load})")
        if number:
            for piece in part.pieces:
                for tile in tiles:
                    name = f"{role}{piece.name}{tile}"
                    w(f"{name} += {name}h * {float(1 << low)}")
        low += planes.bits


def _load_word_tiles(w: Writer, shape: GpuShape, part: Part, tiles: list[str]) -> None:
    """Load exact words of a page whose other part is quantized, tile by tile."""
    role, wanted = part.role, shape.product_type(part.role)
    w(f"{role}_words = {place(part.name, part.offset)}")
    cast = "" if wanted == part.name else f".to({TRITON_TYPE[wanted]})"
    for piece in part.pieces:
        inside = fragments.within(piece, part.channels)
        masked = f", mask={inside}, other=0.0" if inside else ""
        for i, tile in enumerate(tiles):
            rows = f"({i * shape.tile_tokens} + n)" if i else "n"
            w(
                f"{role}{piece.name}{tile} = tl.load({role}_words + {rows}[:, None] * "
                f"{part.channels} + {fragments.channels(piece)}{masked}){cast}"
            )


def _k_scales(w: Writer, shape: GpuShape) -> None:
    """Put the scales of K into the query, or into the codes."""
    part = shape.k
    w(f"k_scales = {place(part.scale_type, part.scales_offset)}")
    if shape.is_fp16:
        w(f"k_exponent = tl.max(tl.load({place('int32', part.offset)} + tl.arange(0, 1)), 0)")
        # Exponents of parts begin at 16, so that there is room above 254.
        w(f"over_unit = power({254 + query_bits(part)} - k_exponent)")
    together = _load_k_scales_together(w, shape)
    for i, piece in enumerate(part.pieces):
        if not together:
            begin = f"{piece.offset} + " if piece.offset else ""
            load = f"tl.load(k_scales + {begin}tl.arange(0, {piece.width}))"
            w(f"{part.scale_name}{piece.name} = {load}")
        if shape.is_fp16:
            _scale_query(w, shape, piece, first=not i)
        else:
            _scale_codes(w, shape, piece)
    if shape.is_fp16:
        w("x_unit = q_scale_log2 * power(k_exponent)")
        if not part.is_float:
            raw = " - thousand * x_unit[:, None]" if shape.is_raw else ""
            w(f"x_low = tl.max(low * scale_log2{raw}, 1)")


def _load_k_scales_together(w: Writer, shape: GpuShape) -> bool:
    """Load the scales of all pieces of K by one copy, if one warp has them and can divide them.

    Each copy takes a warp about 10 instructions, and 128 words need no more than one.
    """
    part, count = shape.k, len(shape.k.pieces)
    widths = {piece.width for piece in part.pieces}
    divides = count > 1 and not count & (count - 1) and len(widths) == 1
    if not shape.is_one_warp or part.is_float or not divides:
        return False
    (width,) = widths
    halves = ", ".join("2" for _ in range(count.bit_length() - 1))
    w(
        f"words0 = tl.load(k_scales + tl.arange(0, {width})[:, None] + "
        f"{width} * tl.arange(0, {count})[None, :]).reshape({width}, {halves})"
    )
    have = 1
    while have < count:
        for i in range(have):
            w(f"words{i}, words{i + have} = tl.split(words{i})")
        have *= 2
    return True


def _scale_codes(w: Writer, shape: GpuShape, piece: Piece) -> None:
    low = "" if shape.k.is_float else f" + lower(words{piece.name})[None, :]"
    scale = f"{_fp32_scale(shape.k, piece.name)}[None, :]"
    for tile in shape.tile_names:
        name = f"k{piece.name}{tile}"
        w(f"{name} = {name} * {scale}{unit_factor(shape.k)}{low}")


def _fp32_scale(part: Part, which: str) -> str:
    """Return the loaded scales of a part as fp32 numbers."""
    name = part.scale_name + which
    return f"{name}.to(tl.float32)" if part.is_float else f"upper({name})"


def _fp16_scale(part: Part, over: str, which: str) -> str:
    """Return the loaded scales of a part over a unit, as fp16 numbers."""
    name = part.scale_name + which
    if part.is_float:
        return f"({name}.to(tl.float32) * {over}).to(tl.float16)"
    return f"half_scales({name}, {over})"


def _scale_query(w: Writer, shape: GpuShape, piece: Piece, *, first: bool) -> None:
    name, part = piece.name, shape.k
    over = "over_unit"
    if shape.is_raw:
        place_in_word = raw_place(part.widths[0], int(name) % part.planes.across)
        over += f" * {2.0**-place_in_word}" if place_in_word else ""
    w(f"qs{name} = qh{name} * {_fp16_scale(part, over, name)}[None, :]")
    if shape.is_raw:
        thousand = f"tl.full([{piece.width}, 8], 1024.0, tl.float16)"
        w(f"thousand = tl.dot(qs{name}, {thousand}{'' if first else ', thousand'})")
    if not part.is_float:
        _minimum_scores(w, shape, name, piece.width, first=first)


def _minimum_scores(w: Writer, shape: GpuShape, name: str, width: int, *, first: bool) -> None:
    """Multiply the query with the minima of K, exactly: what all tokens of the page have."""
    minimum = f"tl.broadcast_to(minima(words{name})[:, None], {width}, 8)"
    before = "" if first else ", low"
    if shape.spec.dtype == "bf16":
        w(f"low = tl.dot(q{name}, {minimum}{before})")
        return
    # 11 bits are the sum of two bf16 numbers.
    w(
        f"high = q{name}.to(tl.bfloat16)",
        f"low = tl.dot(high, {minimum}{before})",
        f"low = tl.dot((q{name}.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16), "
        f"{minimum}, low)",
    )


def _scores(w: Writer, shape: GpuShape, x: str, tile: str) -> None:
    if shape.k.is_grouped:
        query = "qs" if shape.is_fp16 else "q"
        fragments.scores(w, shape, query, x, exact=False, tile=tile)
    else:
        fragments.scores(w, shape, "q", x, exact=True, tile=tile, beside=False)


def _units(shape: GpuShape) -> fragments.Units:
    """Return how the products of a page become scores."""
    if not shape.k.is_grouped or not shape.is_fp16:
        return fragments.EXACT_UNITS
    return fragments.Units(row_factor="x_unit", offset="" if shape.k.is_float else "x_low")


def _accumulate(w: Writer, shape: GpuShape, tiles: list[str]) -> None:
    """Add the codes of V, weighted by weights and scales."""
    part, size = shape.v, shape.tile_tokens
    w(f"v_scales = {place(part.scale_type, part.scales_offset)}")
    if shape.has_unit:
        header = place("int32", part.offset)
        w(
            f"unit_next = tl.maximum(unit, tl.max(tl.load({header} + tl.arange(0, 1)), 0))",
            "a_o = a * power(tl.maximum(127 + unit - unit_next, 1))",
            "unit = unit_next",
            f"over_unit = power({254 + part.unit_bits} - unit)",
        )
    shrink = "a_o" if shape.has_unit else "a"
    for i, tile in enumerate(tiles):
        _load_v_scales(w, shape, i * size)
        _sums(w, shape, tile, first=not i)
        for g in range(part.groups):
            if shape.has_unit:
                w(f"ps = ph * {_fp16_scale(part, 'over_unit', str(g))}[None, :]")
            for piece in [p for p in part.pieces if p.group == g]:
                before = f"o{piece.name}" + ("" if i else f" * {shrink}[:, None]")
                value = f"v{piece.name}{tile}"
                if shape.has_unit:
                    w(f"o{piece.name} = {_weighted(shape, 'ps', value, before)}")
                    continue
                low = "" if part.is_float else f" + lower(words{g})[:, None]"
                scale = f"{_fp32_scale(part, str(g))}[:, None]"
                w(f"{value} = {value} * {scale}{unit_factor(part)}{low}")
                w(f"o{piece.name} = {_weighted(shape, f'p{tile}', value, before, IEEE)}")


def _weighted(shape: GpuShape, weight: str, value: str, before: str, precision: str = "") -> str:
    """Return the product of a tile's weights and numbers of its tokens, and what was before."""
    if shape.has_dots:
        return f"tl.dot({weight}, {value}, {before}{precision})"
    factors = f"{weight}[:, :, None].to(tl.float32) * {value}[None, :, :].to(tl.float32)"
    return f"tl.sum({factors}, 1) + {before}"


def _load_v_scales(w: Writer, shape: GpuShape, first: int) -> None:
    """Load the scales of a tile of V, which begins with the token `first` of its page."""
    part, page_size = shape.v, shape.spec.page_size
    if shape.is_one_warp and part.groups == 2 and not part.is_float:
        begin = f"{first} + " if first else ""
        both = f"v_scales + {begin}n[:, None] + {page_size} * tl.arange(0, 2)[None, :]"
        w(f"words0, words1 = tl.split(tl.load({both}))  # one copy of 128 bits per lane")
        return
    for g in range(part.groups):
        offset = g * page_size + first
        begin = f"{offset} + " if offset else ""
        w(f"{part.scale_name}{g} = tl.load(v_scales + {begin}n)")


def _accumulate_words(w: Writer, shape: GpuShape, tile: str, *, first: bool) -> None:
    """Add exact words of V beside a quantized K."""
    wanted = shape.product_type("v")
    _sums(w, shape, tile, first=first)
    precision = IEEE if wanted == "fp32" else ""
    weight = f"p{tile}" if wanted == "fp32" else "ph"
    for piece in shape.v.pieces:
        before = f"o{piece.name} * a[:, None]" if first else f"o{piece.name}"
        product = _weighted(shape, weight, f"v{piece.name}{tile}", before, precision)
        w(f"o{piece.name} = {product}")


def _sums(w: Writer, shape: GpuShape, tile: str, *, first: bool) -> None:
    """Add up weights, and weighted minima of V."""
    if not shape.has_sums:
        w(f"l = {'l * a' if first else 'l'} + tl.sum(p{tile}, 1)")
        return
    triton_type, columns = TRITON_TYPE[shape.product_type("v")], shape.sum_columns
    w(f"ph = p{tile}.to({triton_type})")
    if not shape.has_minimum_columns:
        ones = f"tl.full([{shape.tile_tokens}, {columns}], 1.0, {triton_type})"
        before = "sums * a[:, None]" if first else "sums"
        w(f"sums = {_weighted(shape, 'ph', ones, before)}")
        for g in range(shape.v.groups if shape.has_minima else 0):
            value = f"(lower(words{g}) * over_unit).to(tl.float16)[:, None]"
            value = f"tl.broadcast_to({value}, {shape.tile_tokens}, 8)"
            before = f"low_sums{g}{' * a_o[:, None]' if first else ''}"
            w(f"low_sums{g} = {_weighted(shape, 'ph', value, before)}")
        return
    half = columns // 2
    each = half // shape.minimum_groups
    value = f"lower(words{shape.v.groups - 1})[:, None]"
    for g in range(shape.v.groups - 2, -1, -1):
        edge = half + (g + 1) * each
        value = f"tl.where(column < {edge}, lower(words{g})[:, None], {value})"
    if first:
        w(f"sums *= tl.where(column < {half}, a[:, None], a_o[:, None])")
    w(
        f"addends = tl.where(column < {half}, 1.0, {value} * over_unit).to(tl.float16)",
        f"sums = {_weighted(shape, 'ph', 'addends', 'sums')}",
    )
