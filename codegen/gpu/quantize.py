"""The fragments that quantize a page: the numbers of `codegen.formats`, bit for bit.

Every division is rounded to nearest, sums are made in halves, and a number is rounded to an integer
by adding 2^23 and taking it off again, half to even as torch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.formats.float8 import Float8Format
from kvcompile.codegen.formats.planes import LARGEST_EXPONENT, SMALLEST_EXPONENT
from kvcompile.codegen.gpu import rope
from kvcompile.codegen.gpu.fragments import channels, place, point_to_record, within
from kvcompile.codegen.gpu.shape import ROLES, TRITON_TYPE, GpuShape, Part, Piece

if TYPE_CHECKING:
    from kvcompile.codegen.gpu.text import Writer
    from kvcompile.codegen.spec import KernelSpec

BF16_DOWN = """@triton.jit
def bf16_down(x):
    # the largest bf16 number that is at most x
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) & -65536).to(tl.float32, bitcast=True)
"""

BF16_UP = """@triton.jit
def bf16_up(x):
    # the smallest bf16 number that is at least x >= 0
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
"""

NEAREST = """@triton.jit
def nearest(x):
    # to an integer, half to even, for 0 <= x < 2^22
    return (x + 8388608.0) - 8388608.0
"""

STEP = """@triton.jit
def step(scale):
    # what to divide by
    return tl.where(scale == 0, 1.0, scale)
"""

WORD = """@triton.jit
def word(scale, minimum):
    # two bf16 numbers, the minimum in the lower half
    low = (minimum.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return scale.to(tl.int32, bitcast=True) | low
"""


def nearest_float_text(format_: Float8Format) -> str:
    """Print the function that returns the words of a type of 8 bits."""
    low, bias, name = 23 - format_.mantissa_bits, format_.bias, format_.type_name
    half, below = (1 << low - 1) - 1, 127 - bias << format_.mantissa_bits
    return f"""@triton.jit
def {name}(x):
    # the nearest {name} number, half to even, for |x| <= {format_.largest:g}
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    magnitude = size.to(tl.int32, bitcast=True)
    normal = ((magnitude + 0x{half:X} + ((magnitude >> {low}) & 1)) >> {low}) - {below}
    small = nearest(size * {2.0 ** (bias - 1 + format_.mantissa_bits)}).to(tl.int32)
    return tl.where(size < {2.0 ** (1 - bias)}, small, normal) | ((bits >> 24) & 0x80)
"""


def helpers(shape: GpuShape) -> list[str]:
    """Return the functions that a module needs."""
    parts = [part for part in (shape.k, shape.v) if part.is_grouped]
    if not parts:
        return []
    texts = [BF16_UP, NEAREST, STEP]
    floats = dict.fromkeys(part.float8 for part in parts if part.float8 is not None)
    texts += [nearest_float_text(format_) for format_ in floats]
    if any(not part.is_float for part in parts):
        texts += [BF16_DOWN, WORD]
    return texts


def page(w: Writer, shape: GpuShape) -> None:
    """Quantize the page `number`, from the ring and the new tokens."""
    spec, window = shape.spec, shape.layout.window
    assert window is not None
    size = spec.page_size
    w(
        f"n = tl.arange(0, {size})",
        f"old = {window.num_sink_tokens} + number * {size} + n",
        "new = old - before",
        "slots = ring_slot + old",
        f"exact_page = tl.load(exact_BN + b * exact_stride + slots // {TILE}, mask=new < 0, "
        "other=0)",
        f"exact = exact_page + h * {shape.layout.exact.record_bytes}",
        "page = tl.load(page_BN + b * page_stride + number)",
    )
    point_to_record(w, shape, header=True)
    w(*rope.angle_rows(spec, "new"))
    for role in ROLES:
        part = shape.part(role)
        exact = shape.part(role, exact=True)
        w("", f"# {role.upper()}")
        address = f"(exact + {exact.offset})" if exact.offset else "exact"
        w(
            f"ring = tl.multiple_of({address}.to(tl.pointer_type({TRITON_TYPE[exact.name]})), 16)",
            f"ring = ring[:, None] + (slots % {TILE})[:, None] * {exact.channels}",
        )
        for piece in part.pieces:
            _load(w, spec, part, piece, part.shape.head_dim)
        if not part.is_grouped:
            _store_words(w, part)
        elif role == "k":
            _scales_of_channels(w, part)
            _store_codes(w, part)
        else:
            _scales_of_tokens(w, spec, part)
            _store_codes(w, part)


def _load(w: Writer, spec: KernelSpec, part: Part, piece: Piece, end: int) -> None:
    """Load the channels of a piece that come before `end`; the others are 0."""
    role = part.role
    inside = within(piece, end)
    also = f" & {inside}" if inside else ""
    w(
        f"given = tl.load({role}_row + new[:, None] * {role}_st + {channels(piece)}, "
        f"mask=(new >= 0)[:, None]{also}, other=0.0)",
    )
    if role == "k":
        row = "k_row + new[:, None] * k_st"
        new = "(new >= 0)[:, None]"
        w(*rope.turn(spec, "given", row, piece.offset, channels(piece), new))
    w(
        f"kept = tl.load(ring + {channels(piece)}, mask=(new < 0)[:, None]{also}, other=0.0)",
        f"x{piece.name} = tl.where((new < 0)[:, None], kept, given).to(tl.float32)",
    )


def _store_words(w: Writer, part: Part) -> None:
    w(f"words = {place(part.name, part.offset)}")
    for piece in part.pieces:
        stored = within(piece, part.channels)
        masked = f", mask={stored}" if stored else ""
        w(
            f"tl.store(words + n[:, None] * {part.channels} + {channels(piece)}, "
            f"x{piece.name}.to({TRITON_TYPE[part.name]}){masked})"
        )


def _scales_of_channels(w: Writer, part: Part) -> None:
    """K: one scale per channel."""
    tokens = part.shape.page_size
    for piece in part.pieces:
        x = f"x{piece.name}"
        if part.is_float:
            w(f"scale = bf16_up(tl.math.div_rn(tl.max(tl.abs({x}), 0), {_largest(part)}))")
        elif part.widths == (1,):
            _halves(w, f"total = {x}", "total", tokens, piece.width, axis=0)
            w(f"mean = total * {1 / tokens!r}")
            _halves(w, f"total = tl.abs({x} - mean[None, :])", "total", tokens, piece.width, axis=0)
            w(f"deviation = total * {1 / tokens!r}")
            w("minimum = bf16_down(mean - deviation)")
            w("scale = bf16_up((mean + deviation) - minimum)")
        else:
            w(
                f"minimum = bf16_down(tl.min({x}, 0) + 0.0)",
                f"span = (tl.max({x}, 0) + 0.0) - minimum",
                f"scale = bf16_up(tl.math.div_rn(span, {_largest(part)}))",
            )
        _codes(w, part, piece, "scale[None, :]", "minimum[None, :]")
        _exponent(w, first=piece is part.pieces[0])
        begin = f"{piece.offset} + " if piece.offset else ""
        scales = place(part.scale_type, part.scales_offset)
        value = "scale.to(tl.bfloat16)" if part.is_float else "word(scale, minimum)"
        w(f"tl.store({scales} + {begin}tl.arange(0, {piece.width}), {value})")
    _store_exponent(w, part)


def _scales_of_tokens(w: Writer, spec: KernelSpec, part: Part) -> None:
    """V: one scale per token and group of channels."""
    for group in range(part.groups):
        pieces = [piece for piece in part.pieces if piece.group == group]
        if part.is_float:
            _over_pieces(w, part, pieces, "largest", "tl.max(tl.abs({0}), 1)", "tl.maximum")
            w(f"scale = bf16_up(tl.math.div_rn(largest, {_largest(part)}))")
        elif part.widths == (1,):
            _means(w, spec, part, group)
            w("minimum = bf16_down(mean - deviation)")
            w("scale = bf16_up((mean + deviation) - minimum)")
        else:
            _over_pieces(w, part, pieces, "low", "tl.min({0}, 1)", "tl.minimum", beyond="inf")
            _over_pieces(w, part, pieces, "high", "tl.max({0}, 1)", "tl.maximum", beyond="-inf")
            w(
                "minimum = bf16_down(low + 0.0)",
                "span = (high + 0.0) - minimum",
                f"scale = bf16_up(tl.math.div_rn(span, {_largest(part)}))",
            )
        for piece in pieces:
            _codes(w, part, piece, "scale[:, None]", "minimum[:, None]")
        _exponent(w, first=not group)
        scales = place(part.scale_type, part.scales_offset)
        begin = f"{group * part.shape.page_size} + " if group else ""
        value = "scale.to(tl.bfloat16)" if part.is_float else "word(scale, minimum)"
        w(f"tl.store({scales} + {begin}n, {value})")
    _store_exponent(w, part)


def _largest(part: Part) -> str:
    if part.float8 is not None:
        return repr(part.float8.largest)
    return repr(float((1 << sum(part.widths)) - 1))


def _inside(part: Part, piece: Piece, value: str, beyond: str) -> str:
    """Return a value whose channels behind the last one are replaced."""
    inside = within(piece, part.shape.head_dim)
    if not inside:
        return value
    other = f'float("{beyond}")' if "inf" in beyond else beyond
    return f"tl.where({inside}, {value}, {other})"


def _over_pieces(
    w: Writer,
    part: Part,
    pieces: list[Piece],
    name: str,
    reduced: str,
    joined: str,
    beyond: str = "0.0",
) -> None:
    for i, piece in enumerate(pieces):
        value = reduced.format(_inside(part, piece, f"x{piece.name}", beyond))
        w(f"{name} = {joined}({name}, {value})" if i else f"{name} = {value}")


def _means(w: Writer, spec: KernelSpec, part: Part, group: int) -> None:
    """Print mean and mean deviation of a group of channels of V, summed in halves."""
    inside = part.shape.channel_groups()[group]
    size, tokens = 1 << (len(inside) - 1).bit_length(), part.shape.page_size
    whole = Piece("s", inside.start, size, group)
    _load(w, spec, part, whole, inside.stop)
    deviation = "tl.abs(xs - mean[:, None])"
    if size > len(inside):
        deviation = f"tl.where({within(whole, inside.stop)}, {deviation}, 0.0)"
    for name, value in (("mean", "xs"), ("deviation", deviation)):
        _halves(w, f"{name} = {value}", name, size, tokens, axis=1)
        w(f"{name} = tl.math.div_rn({name}, {float(len(inside))!r})")


def _halves(w: Writer, first: str, name: str, size: int, other: int, *, axis: int) -> None:
    """Sum an axis of `size` numbers in halves."""
    w(first)
    while size > 1:
        size //= 2
        if axis == 0:
            w(f"{name} = tl.sum(tl.reshape({name}, [2, {size}, {other}]), 0)")
        else:
            w(f"{name} = tl.sum(tl.reshape({name}, [{other}, 2, {size}]), 1)")
    w(f"{name} = tl.reshape({name}, [{other}])")


def _codes(w: Writer, part: Part, piece: Piece, scale: str, minimum: str) -> None:
    x, code = f"x{piece.name}", f"c{piece.name}"
    if part.float8 is not None:
        value = f"{part.float8.type_name}(tl.math.div_rn({x}, step({scale})))"
    elif part.widths == (1,):
        value = f"({x} > {minimum} + {scale} * 0.5).to(tl.int32)"
    else:
        value = (
            f"tl.minimum(nearest(tl.math.div_rn({x} - {minimum}, step({scale}))), "
            f"{_largest(part)}).to(tl.int32)"
        )
    w(f"{code} = {_inside(part, piece, value, '0')}")


def _exponent(w: Writer, *, first: bool) -> None:
    this = "tl.max(scale, 0)"
    w(f"largest_scale = {this if first else f'tl.maximum(largest_scale, {this})'}")


def _store_exponent(w: Writer, part: Part) -> None:
    w(
        "exponent = largest_scale.to(tl.int32, bitcast=True) >> 23",
        f"exponent = tl.minimum(tl.maximum(exponent, {SMALLEST_EXPONENT}), {LARGEST_EXPONENT})",
        f"tl.store({place('int32', part.offset)} + tl.arange(0, 4), exponent)",
    )


def _store_codes(w: Writer, part: Part) -> None:
    """Pack codes into words: the fields of a word come from the planes of a chunk."""
    words, across = part.planes, part.planes.across
    offset, low = part.codes_offset, 0
    for planes in words.planes:
        rows = part.shape.page_size // planes.tokens
        w(
            f"words = {place('int16', offset)} + tl.arange(0, {rows})[:, None] * "
            f"{part.channels // across}"
        )
        for c, chunk in enumerate(words.chunks):
            width = chunk.width // across
            for f in range(across):
                code = f"c{c * across + f}"
                if low:
                    code = f"({code} >> {low})"
                if len(words.planes) > 1:
                    code = f"({code} & {(1 << planes.bits) - 1})"
                _place_fields(w, planes.tokens, across, planes.bits, f, code, rows, width)
            begin = chunk.offset // across
            columns = f"{begin} + tl.arange(0, {width})" if begin else f"tl.arange(0, {width})"
            w(f"tl.store(words + ({columns})[None, :], packed.to(tl.int16))")
        offset += part.shape.page_size * part.channels * planes.bits // 8
        low += planes.bits


def _place_fields(
    w: Writer, tokens: int, across: int, bits: int, f: int, code: str, rows: int, width: int
) -> None:
    """Add the fields of a plane of channels to the words: one for each plane of tokens."""
    if tokens == 1:
        field = f"({code} << {f * bits})" if f else code
    else:
        shifts = f"(tl.arange(0, {tokens}) * {across * bits}{f' + {f * bits}' if f else ''})"
        tiles = f"tl.reshape({code}, [{tokens}, {rows}, {width}])"
        field = f"tl.sum({tiles} << {shifts}[:, None, None], 0)"
    w(f"packed = packed | {field}" if f else f"packed = {field}")
