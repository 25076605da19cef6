"""The fragment accumulate of the integer mode: weights rounded to 16 bits, codes as stored."""

from __future__ import annotations

from kvcompile.codegen.cpu.integer_codes import IntegerPart, bytes_ahead, codes_text, integer_part
from kvcompile.codegen.cpu.panels import panel_accumulate
from kvcompile.codegen.cpu.shape import AttendShape, split_evenly
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.formats.base import round_up
from kvcompile.codegen.formats.grouped import SCALE_BYTES

REGISTERS = 32

ROUND_WEIGHTS = """
// round_weights: p' = p * scale of a chunk and a group of channels, as 16 bits in two bytes, with
// one step per row; rest = sum of p * minimum. Behind the last token the bytes are zero.
struct Weights {
  alignas(64) uint8_t high[$block_rows * $stride], low[$block_rows * $stride];
  alignas(64) float scaled[$block_rows * $stride];  // p'
  alignas(16) float step[8], rest[8];
};

// the scales of 16 tokens from t on; their minima follow $minima bytes behind
static inline const uint8_t* token_scales(const Chunk& chunk, unsigned t, int group) {
  return chunk.record[t / $page_size] + $scales + group * $group_bytes + t % $page_size * 2;
}

template <int ROWS>
static inline void round_weights(const Chunk& chunk, int group, const float* p, Weights& w) {
  const int filled = (chunk.tokens + 15) / 16 * 16;
  const int end = (chunk.pages * $page_size + 31) / 32 * 32;
  vec largest[ROWS], rest[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) largest[r] = rest[r] = zero();
  for (int t = 0; t < filled; t += 16) {
    const uint8_t* scales = token_scales(chunk, t, group);
    const vec scale = load_scales(scales);
    const vec minimum = $minimum;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const vec x = load(p + r * $chunk + t), scaled = mul(x, scale);
      store(w.scaled + r * $stride + t, scaled);
      largest[r] = maximum(scaled, largest[r]);
      rest[r] = fma(x, minimum, rest[r]);
    }
  }
  for (int t = filled; t < end; t += 16)
    UNROLL for (int r = 0; r < ROWS; ++r) store(w.scaled + r * $stride + t, zero());
  alignas(16) float inverse[8];
  UNROLL for (int r = 0; r < ROWS; r += 4) {
    const __m128 most = maxima(OF_4(largest, r));
    _mm_store_ps(inverse + r, inverse_step(most, 65535.0f));
    _mm_store_ps(w.step + r, _mm_mul_ps(most, _mm_set1_ps(1.0f / 65535)));
    _mm_store_ps(w.rest + r, sums(OF_4(rest, r)));
  }
  const quads halves = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  for (int t = 0; t < end; t += 32)
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float* x = w.scaled + r * $stride + t;
      const quads first = round_nearest(mul(load(x), splat(inverse[r])));
      const quads last = round_nearest(mul(load(x + 16), splat(inverse[r])));
      // per lane of 128 bits: the low bytes of the first, of the last, the high bytes of both
      const quads bytes = ordered(_mm512_shuffle_epi8(_mm512_packus_epi32(first, last), halves));
      uint8_t *low = w.low + r * $stride + t, *high = w.high + r * $stride + t;
      _mm256_store_si256((__m256i*)low, _mm512_castsi512_si256(bytes));
      _mm256_store_si256((__m256i*)high, _mm512_extracti64x4_epi64(bytes, 1));
    }
}
"""

ACCUMULATE = """
// accumulate: o[row][c] = step * sum of the chunk's weights * codes + rest, for VECS vectors of
// channels from `channel` on; on the way this block of channels, one of BLOCKS, fetches its share
// of the next chunk's records into the L2 cache, page after page
template <int ROWS, int VECS, int BLOCKS>
static inline void accumulate(const Chunk& chunk, const Weights& w, int block, int channel,
                              float* o) {
  constexpr int PART = ($bytes_ahead + BLOCKS - 1) / BLOCKS;
  constexpr int SHARE = (PART + $last_step) / $steps;  // bytes per step
  quads high[ROWS][VECS], low[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < VECS; ++j) high[r][j] = low[r][j] = _mm512_setzero_si512();
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* record = chunk.record[page];
    const int part = block * chunk.pages + page;  // of BLOCKS * chunk.pages parts
    const uint8_t* ahead = chunk.ahead[part / BLOCKS] + part % BLOCKS * PART;
    const uint8_t *ph = w.high + page * $page_size, *pl = w.low + page * $page_size;
    for (int i = 0; i < $quads; ++i) {
      UNROLL for (int f = 0; f < $fields; ++f) {
        UNROLL for (int line = 0; line < SHARE; line += 64)
          __builtin_prefetch(ahead + (i * $fields + f) * SHARE + line, 0, 2);
        quads codes[VECS];
        UNROLL for (int j = 0; j < VECS; ++j) codes[j] = v_codes(record, channel + j * 16, i, f);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          const quads h = splat_quad(ph + r * $stride + f * $field + i * 4);
          const quads l = splat_quad(pl + r * $stride + f * $field + i * 4);
          UNROLL for (int j = 0; j < VECS; ++j) {
            high[r][j] = dot(high[r][j], h, codes[j]);
            low[r][j] = dot(low[r][j], l, codes[j]);
          }
        }
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < VECS; ++j) {
      const vec sum = fma(to_float(high[r][j]), splat(256.0f), to_float(low[r][j]));
      store(o + r * $out_channels + channel + j * 16, fma(sum, splat(w.step[r]), splat(w.rest[r])));
    }
}
"""


def accumulate_text(shape: AttendShape) -> str:
    """Print panel_accumulate; what `scores_text` prints comes before it."""
    v = integer_part(shape, "v")
    page_size = v.part.shape.page_size
    minima = page_size * SCALE_BYTES
    minimum = f"load_scales(scales + {minima})"
    if v.part.flipped:
        minimum = f"fma(scale, splat(128.0f), {minimum})"
    literals = {
        "page_size": page_size,
        "chunk": shape.chunk,
        "stride": round_up(shape.chunk, 32),
    }
    weights = render(
        ROUND_WEIGHTS,
        block_rows=max(shape.block_sizes()),
        scales=v.scales,
        minima=minima,
        group_bytes=len(v.part.words) * minima,
        minimum=minimum,
        **literals,
    )
    steps = v.quads * v.fields
    accumulate = render(
        ACCUMULATE,
        bytes_ahead=bytes_ahead(shape),
        steps=steps,
        last_step=steps - 1,
        quads=v.quads,
        fields=v.fields,
        field=v.field_elements,
        out_channels=shape.out_channels,
        **literals,
    )
    calls = {rows: _calls(v, rows) for rows in shape.block_sizes()}
    panel = panel_accumulate(shape, calls, "  Weights weights;\n")
    return join_sections(codes_text(v), weights, accumulate, panel)


def _calls(v: IntegerPart, rows: int) -> list[str]:
    """Return the calls for a block of rows; groups of equal size share them in a loop.

    A vector of channels takes two registers per row, one for its codes and one those are taken out
    of; the mask of the codes and the two bytes of the weights take three.
    """
    most = max(1, (REGISTERS - 3) // (2 * rows + 2))
    groups = v.part.shape.channel_groups()
    ends = [group.stop for group in groups[:-1]] + [v.part.channels]
    blocks = [
        split_evenly((end - group.start) // 16, most)
        for group, end in zip(groups, ends, strict=True)
    ]
    count, each, size = sum(map(len, blocks)), len(blocks[0]), groups[0].stop
    equal = len(groups) if blocks[-1] == blocks[0] else len(groups) - 1
    if equal == 1:
        lines = _group_calls(rows, blocks[0], count, ("0", "0", "0"))
    else:
        loop = _group_calls(rows, blocks[0], count, ("g", f"g * {each}", f"g * {size}"))
        lines = [f"for (int g = 0; g < {equal}; ++g) {{", *("  " + line for line in loop), "}"]
    if equal < len(groups):
        first = (str(equal), str(equal * each), str(equal * size))
        lines += _group_calls(rows, blocks[-1], count, first)
    return lines


def _group_calls(
    rows: int, blocks: list[int], count: int, first: tuple[str, str, str]
) -> list[str]:
    """Return the calls for one group of channels.

    Args:
        rows: Rows of the block.
        blocks: Vectors of channels in each block of the group.
        count: Blocks of all groups.
        first: C++ for the number of the group, of its first block and of its first channel.
    """
    group, block, channel = first
    lines = [f"round_weights<{rows}>(chunk, {group}, pp, weights);"]
    for number, vectors in enumerate(blocks):
        at = f"{_sum(block, number)}, {_sum(channel, 16 * sum(blocks[:number]))}"
        lines.append(f"accumulate<{rows}, {vectors}, {count}>(chunk, weights, {at}, oo);")
    return lines


def _sum(first: str, more: int) -> str:
    if first.isdigit():
        return str(int(first) + more)
    return f"{first} + {more}" if more else first
