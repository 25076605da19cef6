"""Rotary embedding in C++: q and new K turn on their way into a kernel.

The order of the arithmetic is that of `x * cos + rotate(x) * sin` in fp32, rounded to the model's
dtype once, at the end: what a compiler makes of the operators, which rounds where a result is
stored. Products of two bf16 or fp16 numbers are exact in fp32; those of fp32 numbers are rounded
before they are added, as operators do.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.scalars import CTYPE, narrow, widen
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.spec import KernelSpec

ROTATE = """
// ---- rotary embedding: $pairs pairs of channels turn; what follows them stands still
${begin}static $inlined void rotate(
    const $ctype* x /* [$head_dim] */, const $ctype* cos /* [$dim] */,
    const $ctype* sin /* [$dim] */, $ctype* out /* [$head_dim] */) {
  float partner[$dim];  // rotate(x)
  for (int j = 0; j < $pairs; ++j) {
    partner[$first] = -$widened_second;
    partner[$second] = $widened_first;
  }
  for (int c = 0; c < $dim; ++c) {
    const float turned = $x * $cos + partner[c] * $sin;
    out[c] = $narrowed;
  }
$rest}
$end"""

REST = """  for (int c = $dim; c < $head_dim; ++c) out[c] = x[c];
"""

NO_CONTRACTION = """// not inlined, lest sums are contracted as the caller's are
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
"""

END_NO_CONTRACTION = """#pragma GCC pop_options
"""

FIELDS = """
  const $ctype* cos_BSR;
  int64_t cos_sb, cos_ss;
  const $ctype* sin_BSR;
  int64_t sin_sb, sin_ss;
"""

ROPE_ARGUMENTS = f"{' ' * 18}cos_BSR, cos_sb, cos_ss, sin_BSR, sin_sb, sin_ss,\n"
"""What an attend kernel fills its `rope_fields` with."""

KEYS = """
// new keys of one row and KV head, which turn on their way in; null if there are none
struct Keys {
  const $ctype* first;
  int64_t stride;
  const $ctype* cos;
  int64_t cos_stride;
  const $ctype* sin;
  int64_t sin_stride;
  void turn(int64_t s, $ctype* out /* [$head_dim] */) const {
    rotate(first + s * stride, cos + s * cos_stride, sin + s * sin_stride, out);
  }
};
"""

KEYS_OF_ROW = """    const Keys k{k_BKSD ? k_BKSD + b * k_sb + h * k_sh : nullptr, k_st,
                 cos_BSR + b * cos_sb, cos_ss, sin_BSR + b * sin_sb, sin_ss};
"""
"""The keys of row b and KV head h, given the arguments of an append kernel."""


def rotate_text(spec: KernelSpec) -> str:
    """Print rotate; "" if nothing turns."""
    rope = spec.rope
    if rope is None:
        return ""
    dtype, exact = spec.dtype, spec.dtype != "fp32"
    rest = ""
    if rope.dim < spec.head_dim_qk:
        rest = render(REST, dim=rope.dim, head_dim=spec.head_dim_qk) + "\n"
    first, second = ("2 * j", "2 * j + 1") if rope.interleaved else ("j", f"j + {rope.pairs}")
    return render(
        ROTATE,
        begin="" if exact else NO_CONTRACTION,
        inlined="inline" if exact else "__attribute__((noinline))",
        end="" if exact else END_NO_CONTRACTION,
        ctype=CTYPE[dtype],
        head_dim=spec.head_dim_qk,
        dim=rope.dim,
        pairs=rope.pairs,
        first=first,
        second=second,
        widened_first=widen(dtype, f"x[{first}]"),
        widened_second=widen(dtype, f"x[{second}]"),
        **{name: widen(dtype, f"{name}[c]") for name in ("x", "cos", "sin")},
        narrowed=narrow(dtype, "turned"),
        rest=rest,
    )


def keys_text(spec: KernelSpec) -> str:
    """Print rotate and Keys, which an append kernel reads new K by; "" if nothing turns."""
    if spec.rope is None:
        return ""
    keys = render(KEYS, ctype=CTYPE[spec.dtype], head_dim=spec.head_dim_qk)
    return rotate_text(spec) + "\n\n" + keys


def rope_fields(spec: KernelSpec) -> str:
    """Print the fields of one call of attend that q turns by; "" if nothing turns."""
    return "" if spec.rope is None else render(FIELDS, ctype=CTYPE[spec.dtype]) + "\n"


def rope_line(spec: KernelSpec) -> list[str]:
    """Return the line of the glossary that says what turns, if anything does."""
    return [] if spec.rope is None else [f"rope    {spec.rope.said} {spec.dtype}"]
