"""The fragments scores and accumulate over codes: decoded in registers, multiplied in fp32.

An element of K is scale * code + minimum, both per channel of a page. Summed over the channels c,

    q[c] * K[t][c] = (q[c] * scale[c]) * code[t][c] + q[c] * minimum[c],

and the first product and the second sum are made once per page and row. V has scale and minimum per
token and group of channels, and they go into the weights in the same way. What is left for the
inner loops is to make a code a number and to multiply it.
"""

from __future__ import annotations

from textwrap import indent

from kvcompile.codegen.cpu.grouped import GroupedPart, grouped_part
from kvcompile.codegen.cpu.panels import Calls
from kvcompile.codegen.cpu.shape import AttendShape, split_evenly
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.cpu.words import load_scale
from kvcompile.codegen.formats import Role
from kvcompile.codegen.formats.grouped import SCALE_BYTES

FOLD_QUERY = """
// dequantize: K = scale * code + minimum, per channel; both go into the query
template <int ROWS>
static inline void fold_query(const uint8_t* scales, const float* q, float* folded,
                              float* offset) {
  vec sum[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = zero();
  for (int c = 0; c < $k_channels; c += $lanes) {
    const vec scale = load_bf16(scales + c * 2);
    const vec minimum = load_bf16(scales + ($k_channels + c) * 2);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const vec x = load(q + r * $q_stride + c);
      store(folded + r * $k_channels + c, mul(x, scale));
      sum[r] = fma(x, minimum, sum[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) offset[r] = reduce_add(sum[r]);
}
"""

FOLD_QUERY_FP8 = """
// dequantize: K = scale * code, per channel; the scale goes into the query
template <int ROWS>
static inline void fold_query(const uint8_t* scales, const float* q, float* folded,
                              float* offset) {
  UNROLL for (int r = 0; r < ROWS; ++r) offset[r] = 0.0f;
  for (int c = 0; c < $k_channels; c += $lanes) {
    const vec scale = $load_scale(scales + c * 2);
    UNROLL for (int r = 0; r < ROWS; ++r)
      store(folded + r * $k_channels + c, mul(load(q + r * $q_stride + c), scale));
  }
}
"""

DECODE_SCORES = """
// scores: s[row][t] = sum over channels of q'[row][c] * code[t][c] + offset[row], for the 16 tokens
// of a tile; on the way the tile's share of V is fetched into the L2 cache, every line of it
template <int ROWS, int CHAINS>
static inline void tile_scores(const uint8_t* record, int t, bool fetch, const float* q,
                               const float* offset, float* s) {
  const uint8_t* v = record + $v_offset + t * $v_token_bytes;
$lane_loop  vec sum[ROWS][CHAINS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < CHAINS; ++j) sum[r][j] = zero();
  for (int c = 0; c < $field; c += 4) {
$loads
$codes
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int step = CHAINS / 2; step > 0; step /= 2)
      UNROLL for (int j = 0; j < step; ++j) sum[r][j] = add(sum[r][j], sum[r][j + step]);
    store(s + r * $chunk$lane_plus, add(sum[r][0], splat(offset[r])));
  }
$lane_end}

template <int ROWS, int CHAINS>
static inline void scores(const uint8_t* record, int tokens, bool fetch, const float* q, float* s) {
  alignas(64) float folded[ROWS * $k_channels];
  float offset[ROWS];
  fold_query<ROWS>(record + $k_scales, q, folded, offset);
  for (int t = 0; t < tokens; t += 16)
    tile_scores<ROWS, CHAINS>(record, t, fetch, folded, offset, s + t);
}
"""

SCORE_CODES = """
if (fetch) {
  UNROLL for (int line = 0; line < $share; line += 64)
    __builtin_prefetch(v + line, 0, 2);
  v += $share;
}
UNROLL for (int j = 0; j < $codes; ++j) {
$number
  const float* y = q + c + $element;
  UNROLL for (int r = 0; r < ROWS; ++r)
    sum[r][j % CHAINS] = fma(code, splat(y[r * $k_channels]), sum[r][j % CHAINS]);
}
"""

FOLD_WEIGHTS = """
// dequantize: V = scale * code + minimum, per token and $group_size channels; both go into p
struct Weights {
  // p[row][t] * scale[t], 0 behind the last token; sum over t of p[row][t] * minimum[t]
  alignas(64) float p[$block_rows * $chunk];
  float offset[$block_rows];
};
template <int ROWS>
static inline void fold_weights(const Chunk& chunk, const float* p, int group, Weights& weights) {
  vec sum[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = zero();
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* scales = chunk.record[page] + $v_scales + group * $group_bytes;
    const int first = page * $page_size, tokens = chunk.tokens - first;
    for (int t = 0; t < $page_size; t += $lanes) {
      const vec scale = load_bf16(scales + t * 2);
      const vec minimum = load_bf16(scales + ($page_size + t) * 2);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const int at = r * $chunk + first + t;
        const vec x = t < tokens ? load(p + at) : zero();
        store(weights.p + at, weighted(x, scale));
        sum[r] = add(sum[r], weighted(x, minimum));
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) weights.offset[r] = reduce_add(sum[r]);
}
"""

FOLD_WEIGHTS_FP8 = """
// dequantize: V = scale * code, per token and $group_size channels; the scale goes into p
struct Weights {
  // p[row][t] * scale[t], 0 behind the last token
  alignas(64) float p[$block_rows * $chunk];
};
template <int ROWS>
static inline void fold_weights(const Chunk& chunk, const float* p, int group, Weights& weights) {
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* scales = chunk.record[page] + $v_scales + group * $group_bytes;
    const int first = page * $page_size, tokens = chunk.tokens - first;
    for (int t = 0; t < $page_size; t += $lanes) {
      const vec scale = $load_scale(scales + t * 2);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const int at = r * $chunk + first + t;
        store(weights.p + at, t < tokens ? weighted(load(p + at), scale) : zero());
      }
    }
  }
}
"""

DECODE_ACCUMULATE = """
// accumulate: o[row][c] = sum over the chunk's tokens of p'[row][t] * code[t][c] + offset[row], for
// VECS vectors of channels from c on; on the way K of the next chunk is fetched into the L2 cache
template <int ROWS, int VECS>
static inline void accumulate(
    const Chunk& chunk, const Weights& weights, int c, bool fetch, float* o) {
  constexpr int share = ($k_bytes - 1) / ($steps * VECS) + 1;  // bytes of K per step
  vec sum[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int i = 0; i < VECS; ++i) sum[r][i] = $start;
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* record = chunk.record[page] + c * 4;
    const uint8_t* ahead = chunk.ahead[page];
    for (int t = 0; t < $field; t += 4) {
      const float* p = weights.p + page * $page_size + t;
      UNROLL for (int i = 0; i < VECS; ++i) {
$loads
$codes
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int i = 0; i < VECS; ++i)
      store(o + r * $out_channels + c + i * $lanes, sum[r][i]);
}
"""

ACCUMULATE_CODES = """
if (fetch) {
  UNROLL for (int line = 0; line < share; line += 64)
    __builtin_prefetch(ahead + line, 0, 2);
  ahead += share;
}
UNROLL for (int j = 0; j < $codes; ++j) {
$number
  const float* w = p + $element;
  UNROLL for (int r = 0; r < ROWS; ++r)
    sum[r][i] = fma(code, splat(w[r * $chunk]), sum[r][i]);
}
"""


def decode_scores(shape: AttendShape) -> str:
    """Print scores for K in codes."""
    lanes, part, channels = shape.isa.lanes, _part(shape, "k"), shape.k_channels
    whole, field = lanes == 16, channels // _fields(part)
    addresses = [
        f"{_offset('record', plane.begin)} + t * {channels // plane.fields}"
        f"{'' if whole else ' + lane * 4'} + {{step}} * 16"
        for plane in part.planes()
    ]
    # Bytes of V for every time that codes are taken out of words.
    steps = field // 4 * _turns(part) * (16 // lanes)
    share = -(-shape.v_token_bytes * 16 // steps)
    fold = render(
        FOLD_QUERY if part.float8 is None else FOLD_QUERY_FP8,
        load_scale="" if part.float8 is None else load_scale(part.float8),
        k_channels=channels,
        q_stride=shape.q_stride,
        lanes=lanes,
    )
    codes = _codes(part, field, SCORE_CODES, k_channels=channels, share=share)
    text = render(
        DECODE_SCORES,
        loads=indent(_loads(addresses, "c", field), " " * 4),
        codes=indent(codes, " " * 4),
        field=field,
        k_channels=channels,
        k_scales=part.code_bytes,
        v_offset=shape.v_offset,
        v_token_bytes=shape.v_token_bytes,
        chunk=shape.chunk,
        lane_loop="" if whole else f"  for (int lane = 0; lane < 16; lane += {lanes}) {{\n",
        lane_plus="" if whole else " + lane",
        lane_end="" if whole else "  }\n",
    )
    return fold + "\n\n" + text


def decode_accumulate(shape: AttendShape) -> str:
    """Print accumulate for V in codes."""
    part, page_size, lanes = _part(shape, "v"), shape.layout.page_size, shape.isa.lanes
    field = page_size // _fields(part)
    addresses = [
        f"record + {shape.v_offset + plane.begin} + {{step}} * {shape.v_channels} + i * {4 * lanes}"
        for plane in part.planes()
    ]
    literals = {"page_size": page_size, "chunk": shape.chunk, "lanes": lanes}
    fold = render(
        FOLD_WEIGHTS if part.float8 is None else FOLD_WEIGHTS_FP8,
        load_scale="" if part.float8 is None else load_scale(part.float8),
        block_rows=max(shape.block_sizes()),
        group_size=shape.layout.q_group_size,
        group_bytes=SCALE_BYTES * page_size * len(part.words),
        v_scales=shape.v_offset + part.code_bytes,
        **literals,
    )
    text = render(
        DECODE_ACCUMULATE,
        loads=indent(_loads(addresses, "t", field, flipped=part.flipped), " " * 8),
        codes=indent(_codes(part, field, ACCUMULATE_CODES, chunk=shape.chunk), " " * 8),
        field=field,
        start="zero()" if part.is_float else "splat(weights.offset[r])",
        k_bytes=shape.v_offset,
        steps=field // 4 * _turns(part),
        out_channels=shape.out_channels,
        **literals,
    )
    return fold + "\n\n" + text


def decode_accumulate_calls(shape: AttendShape) -> Calls:
    """Return the calls of fold_weights and accumulate for V in codes."""
    return {rows: _calls(shape, rows) for rows in shape.block_sizes()}


def _calls(shape: AttendShape, rows: int) -> list[str]:
    lanes = shape.isa.lanes
    groups = shape.layout.part("v").channel_groups()
    ends = [group.stop for group in groups[:-1]] + [shape.v_channels]
    calls = []
    for number, (group, end) in enumerate(zip(groups, ends, strict=True)):
        calls.append(f"fold_weights<{rows}>(chunk, pp, {number}, weights);")
        channel = group.start
        most = max(1, shape.isa.accumulators // rows)
        for vectors in split_evenly((end - channel) // lanes, most):
            # What is fetched on the way is fetched once: by the first block of rows and channels.
            fetch = "row == 0" if channel == 0 else "false"
            calls.append(f"accumulate<{rows}, {vectors}>(chunk, weights, {channel}, {fetch}, oo);")
            channel += vectors * lanes
    return calls


def _part(shape: AttendShape, role: Role) -> GroupedPart:
    part = grouped_part(shape.spec, role)
    assert part is not None
    return part


def _fields(part: GroupedPart) -> int:
    """Return how many codes share a byte of the narrowest plane."""
    return max(plane.fields for plane in part.planes())


def _loads(addresses: list[str], step: str, field: int, *, flipped: bool = False) -> str:
    """Print the loads of the words that hold four codes of every field of every lane.

    Args:
        addresses: Where the words of each plane lie, for the first of the four in `{step}`.
        step: The variable that runs through a field.
        field: Codes of a field of the narrowest plane.
        flipped: Whether the highest bit of every byte is turned over.
    """
    if len(addresses) == 1:
        flip = " ^ 0x80808080u" if flipped else ""
        return f"words x = load_words({addresses[0].format(step=step)}){flip};"
    # Two fields of the narrow plane lie in one of the wide plane, half of it each.
    low, high = addresses
    both = [low.format(step=at) for at in (step, f"({step} + {field})")]
    lines = ["words low[] = {", *(f"    load_words({at})," for at in both), "};"]
    return "\n".join([*lines, f"words x = load_words({high.format(step=step)});"])


def _codes(part: GroupedPart, field: int, template: str, **literals: object) -> str:
    """Print what is done with every code of the loaded words.

    Fields are a loop of the program, not of the printer: one-bit codes would fill the instruction
    cache otherwise.

    Args:
        part: K or V.
        field: Codes of a field of the narrowest plane.
        template: Works on `code`, the number of the `element` of four or eight of them.
        **literals: For the template.
    """
    bits, count, element, loop = part.format.bits, 4, f"f * {field} + j", ""
    numbers = [f"const vec code = number(bits(x, j * 8, {(1 << bits) - 1}));"]
    if len(part.planes()) == 2:
        loop = "for (int f = 0; f < 8; f += 2, x >>= 2, low[0] >>= 2, low[1] >>= 2)"
        count, element = 8, f"(f + j / 4) * {field} + j % 4"
        numbers = [
            "const words high = bits(x, j % 4 * 8 + j / 4 - 2, 4);",
            "const vec code = number(bits(low[j / 4], j % 4 * 8, 3) | high);",
        ]
    elif bits < 8:
        loop = f"for (int f = 0; f < {8 // bits}; ++f, x >>= {bits})"
    else:
        element = "j"
        if part.float8 is not None:
            numbers = [f"const vec code = number_{part.float8.type_name}(x, j * 8);"]
    number = indent("\n".join(numbers), "  ")
    text = render(template, codes=count, number=number, element=element, **literals)
    return f"{loop} {{\n{indent(text, '  ')}\n}}" if loop else text


def _turns(part: GroupedPart) -> int:
    """Return how often the loop of `_codes` runs."""
    return _fields(part) // len(part.planes())


def _offset(base: str, offset: int) -> str:
    return f"{base} + {offset}" if offset else base
