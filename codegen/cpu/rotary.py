"""The turning mean of K in C++: taken out of a page, added to scores and to tokens that are read.

The torch twin is `codegen/rotary.py`.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.panels import switch_rows
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import LEAST_GAIN, MINIMUM_UNIT

MEAN = """
// ---- the turning mean of K: of up to $means pairs of channels, two fp32 numbers of 12 significant
// bits each; the number of the pair lies in the bits that are free
struct Mean {
  int pair;
  float first, second;
};
static inline Mean mean_of(const uint8_t* means, int n) {
  uint32_t words[2];
  memcpy(words, means + n * 8, 8);
  Mean mean;
  mean.pair = int(words[0] & 0xfff);
  words[0] &= ~0xfffu;
  memcpy(&mean.first, words, 4);
  memcpy(&mean.second, words + 1, 4);
  return mean;
}
// how many there are
static inline int count_means(const uint8_t* means) {
  int n = 0;
  for (; n < $means; ++n) {
    const Mean mean = mean_of(means, n);
    if (mean.first == 0 && mean.second == 0) break;
  }
  return n;
}
static inline int first_channel(int pair) { return $first_channel; }
static inline int second_channel(int pair) { return $second_channel; }
// the angles of a pair: the cosines of $page_size tokens, then their sines
static inline const float* angles(const float* rotary, int pair) {
  return rotary + pair * $pair_words;
}
"""

SEPARATE = """
// x rounded to 12 significant bits; 0 for NaN and for what is tiny or huge
static inline float shorten(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x800) & ~0xfffu;
  const bool kept = std::fabs(x) >= 0x1p-100f && std::fabs(x) <= 0x1p127f;
  memcpy(&x, &bits, 4);
  return kept ? x : 0.0f;
}
// the mean of a page, in halves
static inline float mean_of_page(float* x /* [P] */) {
  for (int half = $page_size / 2; half > 0; half /= 2)
    for (int t = 0; t < half; ++t) x[t] += x[t + half];
  return x[0] / $page_size.0f;
}
// what the levels of a channel have to span, squared
static inline float span(const float* x /* [P] */) {
  float low = x[0], high = x[0];
  for (int t = 1; t < $page_size; ++t) {
    low = x[t] < low ? x[t] : low;
    high = x[t] > high ? x[t] : high;
  }
  const float span = $span;
  return span * span;
}
// The means of the pairs whose ranges shrink most without them, the greatest gain first; they are
// taken out of x. Behind them are zeros.
static void separate_mean(float* x /* [P][$channels] */, const float* rotary, uint8_t* means) {
  float first[$pairs], second[$pairs], gain[$pairs];
  for (int pair = 0; pair < $pairs; ++pair) {
    const float* cos = angles(rotary, pair);
    const float* sin = cos + $page_size;
    alignas(64) float a[$page_size], b[$page_size], forth[$page_size], aside[$page_size];
    for (int t = 0; t < $page_size; ++t) {
      a[t] = x[t * $channels + first_channel(pair)];
      b[t] = x[t * $channels + second_channel(pair)];
    }
    for (int t = 0; t < $page_size; ++t) {
      forth[t] = a[t] * cos[t] + b[t] * sin[t];
      aside[t] = b[t] * cos[t] - a[t] * sin[t];
    }
    const float u = shorten(mean_of_page(forth)), v = shorten(mean_of_page(aside));
    const float before = span(a) + span(b);
    for (int t = 0; t < $page_size; ++t) {
      a[t] -= u * cos[t] - v * sin[t];
      b[t] -= v * cos[t] + u * sin[t];
    }
    const float difference = before - (span(a) + span(b));
    first[pair] = u, second[pair] = v, gain[pair] = 0;
    if (difference > $least_gain * before) gain[pair] = difference;
  }
  memset(means, 0, $mean_bytes);
  for (int n = 0; n < $means; ++n) {
    const int pair = int(std::max_element(gain, gain + $pairs) - gain);
    if (!(gain[pair] > 0)) break;
    gain[pair] = 0;
    uint32_t words[2];
    memcpy(words, first + pair, 4);
    memcpy(words + 1, second + pair, 4);
    words[0] |= uint32_t(pair);
    memcpy(means + n * 8, words, 8);
    const float* cos = angles(rotary, pair);
    const float* sin = cos + $page_size;
    float *a = x + first_channel(pair), *b = x + second_channel(pair);
    for (int t = 0; t < $page_size; ++t) {
      a[t * $channels] -= first[pair] * cos[t] - second[pair] * sin[t];
      b[t * $channels] -= second[pair] * cos[t] + first[pair] * sin[t];
    }
  }
}
"""

ADD = """
// one token gets back what was taken out of its page
static inline void add_mean(const uint8_t* means, const float* rotary, int slot, float* x) {
  const int count = count_means(means);
  for (int n = 0; n < count; ++n) {
    const Mean mean = mean_of(means, n);
    const float* cos = angles(rotary, mean.pair) + slot;
    const float* sin = cos + $page_size;
    x[first_channel(mean.pair)] += mean.first * *cos - mean.second * *sin;
    x[second_channel(mean.pair)] += mean.second * *cos + mean.first * *sin;
  }
}
"""

SCORES = """
// mean_scores: what was taken out of K, times the query. Of the query's pair (a, b) token t of a
// page gets (a first + b second) cos(t) + (b first - a second) sin(t)
template <int ROWS>
static inline void mean_scores(const float* rotary, const uint8_t* means, int tokens,
                               const float* q, float* s) {
  const int count = count_means(means);
  if (count == 0) return;
  const float* cos[$means];
  float forth[ROWS][$means], aside[ROWS][$means];
  for (int n = 0; n < count; ++n) {
    const Mean mean = mean_of(means, n);
    cos[n] = angles(rotary, mean.pair);
    const int first = first_channel(mean.pair), second = second_channel(mean.pair);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float a = q[r * $q_stride + first], b = q[r * $q_stride + second];
      forth[r][n] = a * mean.first + b * mean.second;
      aside[r][n] = b * mean.first - a * mean.second;
    }
  }
  for (int t = 0; t < tokens; t += $lanes) {
    vec sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = load(s + r * $chunk + t);
    for (int n = 0; n < count; ++n) {
      const vec x = load(cos[n] + t), y = load(cos[n] + $page_size + t);
      UNROLL for (int r = 0; r < ROWS; ++r)
        sum[r] = fma(y, splat(aside[r][n]), fma(x, splat(forth[r][n]), sum[r]));
    }
    UNROLL for (int r = 0; r < ROWS; ++r) store(s + r * $chunk + t, sum[r]);
  }
}

static void panel_mean_scores(const float* rotary, const Chunk& chunk, int rows, const float* q,
                              float* s) {
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* means = chunk.record[page] + $mean_offset;
    const int tokens = $page_tokens;
    for (int row = 0; row < rows;) {
      const float* qq = q + row * $q_stride;
      float* ss = s + row * $chunk + page * $page_size;
$blocks
    }
  }
}
"""


def _literals(layout: RecordLayout) -> dict[str, object]:
    rotary, size = layout.rotary, layout.page_size
    assert rotary is not None
    return {
        "means": rotary.means,
        "pairs": rotary.pairs,
        "page_size": size,
        "pair_words": 2 * size,
        "mean_bytes": layout.k_bytes - layout.mean_offset,
        "mean_offset": layout.mean_offset,
        "first_channel": "2 * pair" if rotary.interleaved else "pair",
        "second_channel": "2 * pair + 1" if rotary.interleaved else f"pair + {rotary.pairs}",
    }


def separate_text(layout: RecordLayout) -> str:
    """Print separate_mean, which needs arithmetic that is not contracted; "" without a mean."""
    if layout.rotary is None:
        return ""
    literals = _literals(layout)
    format_ = layout.format("k")
    # As in the twin: a NaN or an infinity gives no gain, whatever the span is.
    span = "std::max(std::fabs(low), std::fabs(high))"
    if format_.has_minimum:
        span = f"high - low + std::fabs(low) * {MINIMUM_UNIT}f"
    channels = format_.channels(layout.part("k"))
    separate = render(
        SEPARATE, channels=channels, span=span, least_gain=f"{LEAST_GAIN}f", **literals
    )
    return join_sections(render(MEAN, **literals), separate)


def add_text(layout: RecordLayout) -> str:
    """Print add_mean; products of a mean and a cosine are exact, contracted or not."""
    literals = _literals(layout)
    return join_sections(render(MEAN, **literals), render(ADD, **literals))


def mean_scores_text(shape: AttendShape) -> str:
    """Print panel_mean_scores; "" without a mean."""
    if shape.layout.rotary is None:
        return ""
    literals = _literals(shape.layout)
    calls = {
        rows: [f"mean_scores<{rows}>(rotary, means, tokens, qq, ss);"]
        for rows in shape.block_sizes()
    }
    scores = render(
        SCORES,
        q_stride=shape.q_stride,
        lanes=shape.isa.lanes,
        chunk=shape.chunk,
        page_tokens=shape.page_tokens,
        blocks=switch_rows(" " * 6, calls),
        **literals,
    )
    return join_sections(render(MEAN, **literals), scores)
