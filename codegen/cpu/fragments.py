"""The fragments of attention in the order of the mathematics, printed over the vocabulary.

load_query -> load_page -> scores -> mask -> online_softmax -> accumulate -> store_partial
-> merge_splits. load_page is in pages.py, next to the layout it reads.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import mask_ctype
from kvcompile.codegen.cpu.scalars import CTYPE, narrow, widen
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.cpu.variants import sink_parts
from kvcompile.codegen.formats import TILE

LOAD_QUERY = """
// load_query: q[row][$q_stride] = q_BHSD * scale * log2(e), so that 2^score is the softmax weight
static void load_query(const Call& call, int64_t b, int64_t h, int64_t row0, int rows, float* q) {
  const float factor = float(call.scale * 1.4426950408889634);
  for (int r = 0; r < rows; ++r) {
    const int64_t s = (row0 + r) / $group, head = h * $group + (row0 + r) % $group;
$row
    for (int c = 0; c < $head_dim; ++c) q[r * $q_stride + c] = $widened * factor;
$pad  }
}
"""

QUERY_ROW = """
    const $ctype* x = call.q_BHSD + b * call.q_sb + head * call.q_sh + s * call.q_ss;
"""

TURNED_ROW = """
    $ctype x[$head_dim];
    rotate(call.q_BHSD + b * call.q_sb + head * call.q_sh + s * call.q_ss,
           call.cos_BSR + b * call.cos_sb + s * call.cos_ss,
           call.sin_BSR + b * call.sin_sb + s * call.sin_ss, x);
"""

QUERY_PAD = """    for (int c = $head_dim; c < $q_stride; ++c) q[r * $q_stride + c] = 0.0f;
"""

SCORES = """
// scores: s[row][t] = sum over channels of q[row][c] * K[t][c], for the 16 tokens of a tile; on the
// way the tile's share of V is fetched into the L2 cache, evenly: bursts would fill the queues
template <int ROWS, int CHAINS>
static inline void tile_scores(const $ctype* k, const uint8_t* v, bool fetch, const float* q,
                               float* s) {
$lane_loop  vec sum[ROWS][CHAINS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < CHAINS; ++j) sum[r][j] = zero();
  for (int c = 0; c < $k_channels; c += CHAINS) {
    UNROLL for (int j = 0; j < CHAINS; j += 2) {
      vec first, second;
      load_k(k$lane_words, c + j, first, second);
      if (fetch)
        ${unroll_fetch}__builtin_prefetch(v + (c + j$lane_share) * $fetch_half$fetch_plus, 0, 2);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        sum[r][j] = fma(first, splat(q[r * $q_stride + c + j]), sum[r][j]);
        sum[r][j + 1] = fma(second, splat(q[r * $q_stride + c + j + 1]), sum[r][j + 1]);
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int step = CHAINS / 2; step > 0; step /= 2)
      UNROLL for (int j = 0; j < step; ++j) sum[r][j] = add(sum[r][j], sum[r][j + step]);
    store(s + r * $chunk$lane_plus, sum[r][0]);
  }
$lane_end}

template <int ROWS, int CHAINS>
static inline void scores(const uint8_t* record, int tokens, bool fetch, const float* q, float* s) {
  const $ctype* k = (const $ctype*)record;
  const uint8_t* v = record + $v_offset;
  for (int t = 0; t < tokens; t += 16)
    tile_scores<ROWS, CHAINS>(k + t * $k_channels, v + t * $v_token_bytes, fetch, q, s + t);
}
"""

MASK_HEAD = """
// mask: bias[t] for the `tokens` stored tokens from `first` on: 0 or a finite number if token t is
// visible to the query token, -inf if it is not"""

HIDDEN = """
// how many of the `tokens` stored tokens of row b from `first` on lie before column 0
static inline int hidden_of(const Call& call, int64_t b, int64_t first, int tokens) {
  const int64_t hidden = -int64_t(call.store.starts[b]) - first;
  return int(std::min(std::max(hidden, int64_t(0)), int64_t(tokens)));
}
"""

HIDE = """
// hide: dead, whatever their scores are
static inline void hide(const Call& call, int64_t b, int64_t first, int tokens, int rows,
                        float* s) {
  const int hidden = hidden_of(call, b, first, tokens);
  for (int r = 0; r < rows; ++r) std::fill_n(s + r * $chunk, hidden, -INFINITY);
}
"""

MASK_CAUSAL = """
static void mask_bias(const Call& call, int64_t b, int64_t s, int64_t first, int tokens,
                      float* bias) {
  const int64_t t0 = call.store.starts[b] + first;  // logical position of the first stored token
  for (int t = 0; t < tokens; ++t) bias[t] = $seen ? 0.0f : -INFINITY;
}
"""

MASK_TENSOR = """
static inline float bias_of($ctype x) {
$body
}
static void mask_bias(const Call& call, int64_t b, const $ctype* row, int64_t first, int tokens,
                      float* bias) {
  const $ctype* x = row + (call.store.starts[b] + first) * call.m_st;
$hidden  if (call.m_st == 1)
    for (int t = $begin; t < tokens; ++t) bias[t] = bias_of(x[t]);
  else
    for (int t = $begin; t < tokens; ++t) bias[t] = bias_of(x[t * call.m_st]);
}
"""

HIDDEN_BIAS = """  const int hidden = hidden_of(call, b, first, tokens);
  std::fill_n(bias, hidden, -INFINITY);
"""

BIAS_BOOL = "  return x ? 0.0f : -INFINITY;"
BIAS_ADDITIVE = """  // clamped, so that log2(e) times a lowest finite number does not become dead
  const float value = $widened;
  const float clamped = std::min(std::max(value, -2e38f), 2e38f);
  return value == -INFINITY ? value : clamped * 1.44269504f;"""

MASK_ROWS = """
// masks a panel: rows that read the same part of the mask share one bias
static void mask(const Call& call, int64_t b, int64_t h, int64_t row0, int rows, int64_t first,
                 int tokens, float* bias, float* s) {
  const $ctype* last = nullptr;
  for (int r = 0; r < rows; ++r) {
    const int64_t query = (row0 + r) / $group, head = h * $group + (row0 + r) % $group;
    const $ctype* row = call.mask_BHST + b * call.m_sb + head * call.m_sh + query * call.m_ss;
    if (r == 0 || row != last) mask_bias(call, b, row, first, tokens, bias);
    last = row;
    for (int t = 0; t < tokens; t += $lanes)
      store(s + r * $chunk + t, masked(load(s + r * $chunk + t), load(bias + t)));
  }
}
"""

MASK_ROWS_CAUSAL = """
// masks a panel: the query heads of one query token share one bias
static void mask(const Call& call, int64_t b, int64_t row0, int rows, int64_t first, int tokens,
                 float* bias, float* s) {
  int64_t last = -1;
  for (int r = 0; r < rows; ++r) {
    const int64_t query = (row0 + r) / $group;
    if (query != last) mask_bias(call, b, query, first, tokens, bias);
    last = query;
    for (int t = 0; t < tokens; t += $lanes)
      store(s + r * $chunk + t, masked(load(s + r * $chunk + t), load(bias + t)));
  }
}
"""

ONLINE_SOFTMAX = """
// online_softmax: one row of a chunk, m = max score, s[t] <- p[t] = 2^(s[t] - m), l = sum of p.
// A row without a visible token has m = -inf and l = 0.
static void online_softmax(float* s, int tokens, float& m, float& l) {
  const int end = (tokens + $last_lane) / $lanes * $lanes;
  for (int t = tokens; t < end; ++t) s[t] = -INFINITY;  // lanes behind the last token: anything
  vec highest = splat(-INFINITY);
  for (int t = 0; t < end; t += $lanes) highest = maximum(load(s + t), highest);
  m = reduce_max(highest);
  l = 0.0f;
  if (m == -INFINITY) return;
  vec sum = zero();
  for (int t = 0; t < end; t += $lanes) {
    const vec p = exp2_nonpositive(sub(load(s + t), splat(m)));
    sum = add(sum, p);
    store(s + t, p);
  }
  l = reduce_add(sum);
}
"""

ACCUMULATE = """
// accumulate: o[row][c] = sum over the chunk's tokens of p[row][t] * V[t][c], for VECS vectors of
// channels from c on; on the way K of the next chunk is fetched into the L2 cache
template <int ROWS, int VECS>
static inline void ${half}accumulate(
    const Chunk& chunk, const float* p, int c, bool fetch, float* o) {
  vec sum[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int i = 0; i < VECS; ++i) sum[r][i] = zero();
  for (int page = 0; page < chunk.pages; ++page) {
    const $ctype* v = (const $ctype*)(chunk.record[page] + $v_offset);
    const int tokens = $page_tokens;
    const float* pp = p + page * $page_size;
    const uint8_t* ahead = chunk.ahead[page];
    for (int t = 0; t + 1 < tokens; t += 2) {
      if (fetch)
        UNROLL for (int i = 0; i < $fetch_bytes; i += 64)
          __builtin_prefetch(ahead + t * $fetch_half + i, 0, 2);
      UNROLL for (int i = 0; i < VECS; ++i) {
        vec first, second;
        ${half}load_v(v, t, c + i * $lanes, first, second);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          sum[r][i] = fma(first, splat(pp[r * $chunk + t]), sum[r][i]);
          sum[r][i] = fma(second, splat(pp[r * $chunk + t + 1]), sum[r][i]);
        }
      }
    }
    if (tokens % 2 == 1)
      UNROLL for (int i = 0; i < VECS; ++i) {
        const vec last = ${half}load_last_v(v, tokens - 1, c + i * $lanes);
        UNROLL for (int r = 0; r < ROWS; ++r)
          sum[r][i] = fma(last, splat(pp[r * $chunk + tokens - 1]), sum[r][i]);
      }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int i = 0; i < VECS; ++i)
      store(o + r * $out_channels + c + i * $lanes, sum[r][i]);
}
"""

STORE_PARTIAL = """
// store_partial: where chunk `chunk` of KV head h of row b leaves (m, l, O), see Partial
static inline Partial partial(const Call& call, int64_t b, int64_t h, int64_t chunk) {
  const int64_t rows = $rows;
  const int64_t floats = (2 * rows + 15) / 16 * 16 + rows * $out_channels;
  float* base = call.scratch + ((b * call.num_kv_heads + h) * call.most_chunks + chunk) * floats;
  return Partial{base, base + rows, base + (2 * rows + 15) / 16 * 16};
}
"""

MERGE_SPLITS = """
// merge_splits: out = sum of 2^(m_i - m) O_i / sum of 2^(m_i - m) l_i, in the order of the chunks
static void merge_splits(const Call& call, int64_t b, int64_t h, int64_t row) {
  const int64_t chunks = chunks_of(call, b);
$sink  float m = $lowest;
  for (int64_t i = 0; i < chunks; ++i) m = std::max(m, partial(call, b, h, i).m[row]);
  alignas(64) float o[$out_channels] = {};
  float l = $joined;
  for (int64_t i = 0; i < chunks; ++i) {
    const Partial part = partial(call, b, h, i);
    if (part.m[row] == -INFINITY) continue;  // nothing visible: O_i was not written
    const float weight = std::exp2(part.m[row] - m);
    l += weight * part.l[row];
    for (int c = 0; c < $v_channels; c += $step)
      store(o + c, fma(splat(weight), load(part.o + row * $out_channels + c), load(o + c)));
  }
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  const int64_t s = row / $group, head = h * $group + row % $group;
  $ctype* out = call.out_BHSD + b * call.o_sb + head * call.o_sh + s * call.o_ss;
  for (int c = 0; c < $head_dim; ++c) out[c] = $narrowed;
}
"""


def load_query(shape: AttendShape) -> str:
    """Print load_query."""
    spec = shape.spec
    pad = ""
    if shape.q_stride > spec.head_dim_qk:
        pad = render(QUERY_PAD, head_dim=spec.head_dim_qk, q_stride=shape.q_stride) + "\n"
    return render(
        LOAD_QUERY,
        q_stride=shape.q_stride,
        group=shape.group,
        row=render(
            QUERY_ROW if spec.rope is None else TURNED_ROW,
            ctype=CTYPE[spec.dtype],
            head_dim=spec.head_dim_qk,
        ),
        head_dim=spec.head_dim_qk,
        widened=widen(spec.dtype, "x[c]"),
        pad=pad,
    )


def scores(shape: AttendShape) -> str:
    """Print scores; a tile of 16 tokens takes one or several vectors."""
    lanes = shape.isa.lanes
    whole = lanes == 16
    pair = " * 2" if shape.layout.k_format == "bf16" else ""
    # Bytes of V per call of load_k, which takes two channels of one vector of tokens.
    loads = shape.k_channels // 2 * (16 // lanes)
    fetch = -(-shape.v_token_bytes * 16 // loads)
    fetch += fetch % 2
    loop = f"UNROLL for (int i = 0; i < {fetch}; i += 64)\n          "
    return render(
        SCORES,
        ctype=CTYPE[shape.layout.k_format],
        k_channels=shape.k_channels,
        q_stride=shape.q_stride,
        v_offset=shape.v_offset,
        v_token_bytes=shape.v_token_bytes,
        chunk=shape.chunk,
        lane_loop="" if whole else f"  for (int lane = 0; lane < 16; lane += {lanes}) {{\n",
        lane_words="" if whole else f" + lane{pair}",
        lane_plus="" if whole else " + lane",
        lane_share="" if whole else f" + lane * {shape.k_channels // lanes}",
        lane_end="" if whole else "  }\n",
        unroll_fetch=loop if fetch > 64 else "",
        fetch_half=fetch // 2,
        fetch_plus=" + i" if fetch > 64 else "",
    )


def mask(shape: AttendShape) -> str:
    """Print mask, or nothing if every token is visible."""
    spec = shape.spec
    literals = {"group": shape.group, "lanes": shape.isa.lanes, "chunk": shape.chunk}
    if spec.mask == "none":
        return join_sections(HIDDEN, render(HIDE, chunk=shape.chunk)) if spec.slides else ""
    if spec.mask == "causal":
        seen = "t0 + t >= 0 && t0 + t <= s" if spec.slides else "t0 + t <= s"
        bias, rows = render(MASK_CAUSAL, seen=seen), render(MASK_ROWS_CAUSAL, **literals)
    else:
        dtype = spec.mask_dtype
        body = BIAS_BOOL if dtype is None else render(BIAS_ADDITIVE, widened=widen(dtype, "x"))
        ctype = mask_ctype(spec)
        bias = render(
            MASK_TENSOR,
            ctype=ctype,
            body=body,
            hidden=HIDDEN_BIAS if spec.slides else "",
            begin="hidden" if spec.slides else "0",
        )
        if spec.slides:
            bias = join_sections(HIDDEN, bias)
        rows = render(MASK_ROWS, ctype=ctype, **literals)
    return MASK_HEAD.strip("\n") + "\n" + bias.strip("\n") + "\n\n" + rows


def online_softmax(shape: AttendShape) -> str:
    """Print online_softmax."""
    return render(ONLINE_SOFTMAX, lanes=shape.isa.lanes, last_lane=shape.isa.lanes - 1)


def accumulate(shape: AttendShape) -> str:
    """Print accumulate for whole vectors and, if rows of V end in one, for half a vector."""
    fetch = -(-shape.v_offset // (shape.layout.page_size // 2))
    fetch += fetch % 2
    halves = [] if shape.half_channel is None else ["half_"]
    if shape.v_channels >= shape.isa.lanes:
        halves.insert(0, "")
    return "\n\n".join(
        render(
            ACCUMULATE,
            half=half,
            ctype=CTYPE[shape.layout.v_format],
            v_offset=shape.v_offset,
            page_size=shape.layout.page_size,
            page_tokens=shape.page_tokens,
            fetch_bytes=fetch,
            fetch_half=fetch // 2,
            chunk=shape.chunk,
            out_channels=shape.out_channels,
            lanes=shape.isa.lanes,
        )
        for half in halves
    )


def rows_expression(shape: AttendShape) -> str:
    """Print the number of rows of a KV head: a literal for one query token."""
    return str(shape.group) if shape.spec.queries == "one" else f"call.query_len * {shape.group}"


def most_chunks(shape: AttendShape, tokens: str) -> str:
    """Print a bound on the chunks of a row of so many tokens.

    Of quantized and exact pages one chunk each may be short, and up to 15 slots are empty behind
    the sinks and behind the ring.
    """
    if shape.spec.is_grouped:
        return f"({tokens} + {2 * (TILE - 1) - 2}) / {shape.chunk} + 2"
    return f"({tokens} + {shape.chunk - 1}) / {shape.chunk}"


def store_partial(shape: AttendShape) -> str:
    """Print store_partial: the address of a partial result."""
    return render(STORE_PARTIAL, rows=rows_expression(shape), out_channels=shape.out_channels)


def merge_splits(shape: AttendShape) -> str:
    """Print merge_splits."""
    spec = shape.spec
    return render(
        MERGE_SPLITS,
        out_channels=shape.out_channels,
        v_channels=shape.v_channels,
        step=shape.isa.lanes,
        group=shape.group,
        ctype=CTYPE[spec.dtype],
        head_dim=spec.head_dim_vo,
        narrowed=narrow(spec.dtype, "o[c] * inverse"),
        **sink_parts(shape),
    )
