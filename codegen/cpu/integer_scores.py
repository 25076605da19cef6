"""The fragment scores of the integer mode: queries rounded to int8, codes as they are stored."""

from __future__ import annotations

from kvcompile.codegen.cpu.integer_codes import (
    VECTOR,
    IntegerPart,
    bytes_ahead,
    codes_text,
    integer_part,
    integer_vocabulary,
)
from kvcompile.codegen.cpu.panels import switch_rows
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.formats import TILE
from kvcompile.codegen.formats.base import round_up

REGISTERS = 32
INDEPENDENT = 8
"""Sums side by side that hide the latency of a dot product."""
LEAST_STEPS = 4
"""Steps over quads that are printed one after the other, so that chains of sums can alternate."""

FOLD_QUERY = """
// fold_query: q' = q * scale of a page as bytes q8 = q' / delta, with one delta per row, and what
// the dot products with codes leave out of the scores:
// rest = sum of q * middle - $centre * delta * sum of q8, where middle = minimum + $centre * scale
struct FoldedQuery {
  alignas(64) float scaled[$block_rows * $channels];  // q'
  vec base[$block_rows];  // sums of q * middle, 16 in a row
  alignas(64) uint8_t q8[$block_rows * $q8_stride];
  alignas(16) float inverse[8], delta[8], rest[8];
};

template <int ROWS>
static inline void scale_query(const uint8_t* record, const float* q, FoldedQuery& folded) {
  const uint8_t* scales = record + $scales;
  vec largest[ROWS], base[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) largest[r] = base[r] = zero();
  for (int c = 0; c < $channels; c += 16) {
    const vec scale = load_scales(scales + c * 2);
    const vec middle = fma(scale, splat($centre), load_scales(scales + ($channels + c) * 2));
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const vec x = load(q + r * $q_stride + c), scaled = mul(x, scale);
      store(folded.scaled + r * $channels + c, scaled);
      largest[r] = _mm512_range_ps(scaled, largest[r], 0x0b);  // the larger magnitude
      base[r] = fma(x, middle, base[r]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) folded.base[r] = base[r];
  UNROLL for (int r = 0; r < ROWS; r += 4) {
    const __m128 most = maxima(OF_4(largest, r));
    _mm_store_ps(folded.inverse + r, inverse_step(most, 127.0f));
    _mm_store_ps(folded.delta + r, _mm_mul_ps(most, _mm_set1_ps(1.0f / 127)));
  }
}

// 16 * VECS channels of q8 from channel c on; count gathers their sum
template <int VECS>
static inline void round_channels(FoldedQuery& folded, int r, int c, quads& count) {
  const float* scaled = folded.scaled + r * $channels + c;
  quads x[4] = {};
  UNROLL for (int j = 0; j < VECS; ++j)
    x[j] = round_nearest(mul(load(scaled + j * 16), splat(folded.inverse[r])));
  const quads first = _mm512_packs_epi32(x[0], x[1]), last = _mm512_packs_epi32(x[2], x[3]);
  const quads bytes = ordered(_mm512_packs_epi16(first, last));
  count = dot(count, _mm512_set1_epi8(1), bytes);
  _mm512_store_si512(folded.q8 + r * $q8_stride + c, bytes);
}

template <int ROWS>
static inline void round_query(FoldedQuery& folded) {
  vec rest[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    quads count = _mm512_setzero_si512();
$rounds
    rest[r] = fma(to_float(count), splat(folded.delta[r] * -$centre), folded.base[r]);
  }
  UNROLL for (int r = 0; r < ROWS; r += 4)
    _mm_store_ps(folded.rest + r, sums(OF_4(rest, r)));
}
"""

SCORES = """
// scores: s[row][t] = delta * sum of q8 * code + rest for the 16 * TILES tokens from a tile on; on
// the way their share of the rest of the page is fetched into the L2 cache, evenly: bursts would
// fill the queues
template <int ROWS, int TILES, int CHAINS>
static inline void tile_scores(const uint8_t* record, int tile, const FoldedQuery& folded,
                               float* s) {
  constexpr int SHARE = $share * TILES;  // bytes per step
  const uint8_t* rest = record + $bytes_ahead + tile * $tile_share;
  quads sum[ROWS][TILES][CHAINS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int t = 0; t < TILES; ++t)
      UNROLL for (int j = 0; j < CHAINS; ++j) sum[r][t][j] = _mm512_setzero_si512();
  for (int i = 0; i < $quads; i += $unrolled) {
    UNROLL for (int step = 0; step < $steps; ++step) {
      const int f = step % $fields, at = i + step / $fields;
      UNROLL for (int line = 0; line < SHARE; line += 64)
        __builtin_prefetch(rest + (i * $fields + step) * SHARE + line, 0, 2);
      quads codes[TILES];
      UNROLL for (int t = 0; t < TILES; ++t) codes[t] = k_codes(record, tile + t, at, f);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const quads x = splat_quad(folded.q8 + r * $q8_stride + f * $field + at * 4);
        UNROLL for (int t = 0; t < TILES; ++t)
          sum[r][t][step % CHAINS] = dot(sum[r][t][step % CHAINS], codes[t], x);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int t = 0; t < TILES; ++t) {
      UNROLL for (int j = 1; j < CHAINS; ++j)
        sum[r][t][0] = _mm512_add_epi32(sum[r][t][0], sum[r][t][j]);
      store(s + r * $chunk + t * 16,
            fma(to_float(sum[r][t][0]), splat(folded.delta[r]), splat(folded.rest[r])));
    }
}

// The queries of the next two pages are folded on the way: tiles hide the latencies of folding.
template <int ROWS, int TILES, int CHAINS>
static inline void scores(const Chunk& chunk, const float* q, float* s) {
  FoldedQuery folded[3];
  for (int step = 0; step < chunk.pages + 2; ++step) {
    if (step < chunk.pages) scale_query<ROWS>(chunk.record[step], q, folded[step % 3]);
    if (step >= 1 && step <= chunk.pages) round_query<ROWS>(folded[(step - 1) % 3]);
    if (step < 2) continue;
    const int page = step - 2, first = page * $page_size;
    const int tokens = std::min($page_size, chunk.tokens - first);
    for (int t = 0; t < tokens; t += 16 * TILES)
      tile_scores<ROWS, TILES, CHAINS>(chunk.record[page], t / 16, folded[page % 3],
                                       s + first + t);
  }
}

static void panel_scores(const Chunk& chunk, int rows, const float* q, float* s) {
  for (int row = 0; row < rows;) {
    const float* qq = q + row * $q_stride;
    float* ss = s + row * $chunk;
$blocks
  }
}
"""


def scores_text(shape: AttendShape) -> str:
    """Print panel_scores, and the vocabulary of the integer mode before it."""
    k = integer_part(shape, "k")
    channels = k.part.channels
    literals = {
        "q8_stride": round_up(channels, VECTOR),
        "q_stride": shape.q_stride,
    }
    fold = render(
        FOLD_QUERY,
        block_rows=max(shape.block_sizes()),
        channels=channels,
        scales=k.scales,
        centre=f"{k.part.largest / 2}f",
        rounds=_rounds(channels),
        **literals,
    )
    steps = max(k.fields, LEAST_STEPS)
    rest = shape.layout.record_bytes - bytes_ahead(shape)
    tile_share = -(-rest * TILE // shape.layout.page_size)
    calls = {
        rows: [f"scores<{rows}, {tiles}, {chains}>(chunk, qq, ss);"]
        for rows in shape.block_sizes()
        for tiles, chains in [_sums(k, rows)]
    }
    scores = render(
        SCORES,
        bytes_ahead=bytes_ahead(shape),
        tile_share=tile_share,
        share=-(-tile_share // (k.quads * k.fields)),
        fields=k.fields,
        field=k.field_elements,
        quads=k.quads,
        steps=steps,
        unrolled=steps // k.fields,
        chunk=shape.chunk,
        page_size=shape.layout.page_size,
        blocks=switch_rows("    ", calls),
        **literals,
    )
    return join_sections(integer_vocabulary(), codes_text(k), fold, scores)


def _rounds(channels: int) -> str:
    """Print the calls of round_channels for a row: 64 channels at a time, then the others."""
    call = "    round_channels<{}>(folded, r, {}, count);"
    whole, rest = channels // 64 * 64, channels % 64 // 16
    lines = []
    if whole == 64:
        lines.append(call.format(4, 0))
    elif whole:
        lines += [f"    for (int c = 0; c < {whole}; c += 64)", "  " + call.format(4, "c")]
    if rest:
        lines.append(call.format(rest, whole))
    return "\n".join(lines)


def _sums(k: IntegerPart, rows: int) -> tuple[int, int]:
    """Return the tiles, and the sums per row and tile, that fill the registers.

    A tile takes a register per row, one for its codes and those they are taken out of; the mask of
    the codes and a quad of the query take one each.
    """
    most = (REGISTERS - 2) // (rows + 1 + k.packed_registers)
    tiles = 4
    while tiles > 1 and (tiles > most or k.part.shape.page_size % (TILE * tiles)):
        tiles //= 2
    chains = 1
    while chains * rows * tiles < INDEPENDENT and chains < LEAST_STEPS:
        chains *= 2
    return tiles, chains
