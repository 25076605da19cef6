"""linear: a few rows times weights as they lie in memory, at the speed of reading them.

A decode step multiplies one row per sequence. A matrix product that tiles for many rows reads its
weights at a third of the memory's speed then; here each row of weights is one sequential read.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import packed_text, signature_text
from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.cpu.pages import INCLUDES
from kvcompile.codegen.cpu.scalars import CTYPE, narrow, scalar_text, widen
from kvcompile.codegen.cpu.text import comment, join_sections, render
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import LinearSpec

SUMS = 4
"""Running sums of a row, enough to hide the FMA latency. Their number does not depend on how many
rows there are, so that a row has the same result alone and in a batch."""

LOAD_PAIR = {
    "fp32": "  first = load(p);\n  second = load(p + $lanes);",
    "bf16": "  load_pairs_bf16(p, first, second);",
    "fp16": "  first = load_fp16(p);\n  second = load_fp16(p + $lanes);",
}

WEIGHTS = """
// $step words -> two vectors, in the order that suits the dtype; x is brought into the same one
static inline void load_step(const $word* p, vec& first, vec& second) {
$load_pair
}
"""

DOTS = """
// One row of weights with R rows of x, into out[r * out_row].
template <int R>
static inline void dots(
    const $word* w, const float* x, int64_t x_row, int64_t n, float bias, $word* out,
    int64_t out_row) {
  vec sums[R][$sums];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int u = 0; u < $sums; ++u) sums[r][u] = zero();
  const int64_t whole = n / $step * $step;
  int64_t c = 0;
  for (; c + $stride <= whole; c += $stride)
#pragma GCC unroll 16
    for (int u = 0; u < $sums; u += 2) {
      const int64_t at = c + u * $lanes;
      vec first, second;
      load_step(w + at, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        sums[r][u] = fma(first, load(x + r * x_row + at), sums[r][u]);
        sums[r][u + 1] = fma(second, load(x + r * x_row + at + $lanes), sums[r][u + 1]);
      }
    }
  for (; c < whole; c += $step) {
    vec first, second;
    load_step(w + c, first, second);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* at = x + r * x_row + c;
      sums[r][0] = fma(first, load(at), sums[r][0]);
      sums[r][1] = fma(second, load(at + $lanes), sums[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    vec sum = sums[r][0];
    for (int u = 1; u < $sums; ++u) sum = add(sum, sums[r][u]);
    float total = reduce_add(sum);
    for (int64_t i = whole; i < n; ++i) total += $w_i * x[r * x_row + i];
    out[r * out_row] = $total;
  }
}
"""

MAIN = """
// out = x weight^T + bias; all contiguous, bias may be null.
$signature
  if (rows < 1 || rows > $most_rows || in_features < 1 || out_features < 0) return 1;
  const int64_t n = in_features, whole = n / $step * $step;
  static thread_local std::vector<float> widened;
  if (int64_t(widened.size()) < rows * n) widened.resize(rows * n);
  float* const x = widened.data();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < whole; c += $step) {
      vec first, second;
      load_step(x_MK + r * n + c, first, second);
      store(x + r * n + c, first);
      store(x + r * n + c + $lanes, second);
    }
    for (int64_t i = whole; i < n; ++i) x[r * n + i] = $x_i;
  }
#pragma omp parallel for schedule(static) num_threads(int(threads)) \\
    if (threads > 1 && n * out_features >= 65536)
  for (int64_t o = 0; o < out_features; ++o) {
    const $word* w = weight_NK + o * n;
    const float bias = bias_N ? $bias_o : 0.0f;
    for (int64_t r = 0; r < rows; r += $block) {
      const float* from = x + r * n;
      $word* out = out_MN + r * out_features + o;
      switch (std::min(rows - r, int64_t($block))) {
$cases
      }
    }
  }
  return 0;
}
"""


class LinearGenerator:
    """Prints linear kernels."""

    def supports(self, spec: LinearSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed: every dtype can, for every instruction set."""
        return Supported()

    def generate(self, spec: LinearSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        isa, word = ISAS[spec.isa], CTYPE[spec.dtype]
        step = {"lanes": isa.lanes, "step": 2 * isa.lanes, "word": word}
        block = min(isa.accumulators // SUMS, isa.most_rows)
        load_pair = render(LOAD_PAIR[spec.dtype], lanes=isa.lanes)
        cases = "\n".join(
            f"        case {rows}: dots<{rows}>(w, from, n, n, bias, out, out_features); break;"
            for rows in range(block, 0, -1)
        )
        glossary = [
            spec.symbol,
            "a few rows times weights as they lie",
            "",
            f"M rows, at most {isa.most_rows}   K in_features   N out_features",
            f"x, weight, bias, out  {spec.dtype}; sums in fp32, rounded once",
        ]
        vocabulary = (
            isa.vector_text({spec.dtype}, masked=False, half=False, exp2=False),
            scalar_text({spec.dtype}, f16c=isa.f16c),
        )
        text = join_sections(
            comment(glossary),
            INCLUDES,
            "#include <vector>",
            # Without F16C the vectors are made of the scalar conversions.
            *(vocabulary if isa.f16c else vocabulary[::-1]),
            render(WEIGHTS, load_pair=load_pair, **step),
            render(
                DOTS,
                w_i=widen(spec.dtype, "w[i]"),
                total=narrow(spec.dtype, "total + bias"),
                sums=SUMS,
                stride=SUMS * isa.lanes,
                **step,
            ),
            render(
                MAIN,
                signature=signature_text(spec),
                most_rows=isa.most_rows,
                block=block,
                x_i=widen(spec.dtype, "x_MK[r * n + i]"),
                bias_o=widen(spec.dtype, "bias_N[o]"),
                cases=cases,
                **step,
            ),
            packed_text(spec),
        )
        return KernelSource(spec, text)
