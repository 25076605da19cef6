"""What some models do to scores on their way to the weights, in C++: soft caps and sink logits.

The cap of Gemma 2 (https://arxiv.org/abs/2408.00118) bounds the scaled scores before the mask. A
sink logit (gpt-oss) is one more score of each row, with nothing behind it: one more partial result
when partial results are merged, with m = sink, l = 1 and O = 0.
"""

from __future__ import annotations

import math

from kvcompile.codegen.cpu.scalars import CTYPE, widen
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.spec import KernelSpec

TANH = """
// tanh(x), relative error below 2^-21: y P(y^2) / Q(y^2), y = x up to 9, where it is 1. Minimax, to
// 2.1e-8 before rounding; NaN stays NaN, for `maximum` returns its second operand then
static inline vec tanh_of(vec x) {
  const vec below = sub(zero(), maximum(splat(-9.0f), x));
  const vec y = sub(zero(), maximum(splat(-9.0f), below)), z = mul(y, y);
  vec p = splat(1.33546807e-8f), q = splat(7.77656644e-7f);
  p = fma(p, z, splat(2.06090971e-5f)), q = fma(q, z, splat(3.28563632e-4f));
  p = fma(p, z, splat(3.49558906e-3f)), q = fma(q, z, splat(2.58769858e-2f));
  p = fma(p, z, splat(1.33810264e-1f)), q = fma(q, z, splat(4.6714342e-1f));
  p = fma(p, z, splat(9.99999979e-1f)), q = fma(q, z, splat(1.0f));
  return quotient(mul(y, p), q);
}
"""

CAP = """
// cap: s[row][t] <- $softcap * tanh(score / $softcap), both in units of log2
static void cap(int rows, int tokens, float* s) {
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; t += $lanes) {
      float* x = s + r * $chunk + t;
      store(x, mul(tanh_of(mul(load(x), splat($inverse))), splat($bound)));
    }
}
"""

SINK = """
  // a partial result of its own: m = sink, l = 1, O = 0
  const float sink = $widened * 1.44269504f;
"""

CALL_CAP = "    cap(count, chunk.tokens, work.s);\n"


def cap_text(shape: AttendShape) -> str:
    """Print the soft cap, or nothing."""
    softcap = shape.spec.softcap
    if softcap is None:
        return ""
    bound = softcap / math.log(2)
    literals = {
        "softcap": f"{softcap:g}",
        "inverse": _literal(1 / bound),
        "bound": _literal(bound),
        "lanes": shape.isa.lanes,
        "chunk": shape.chunk,
    }
    return join_sections(shape.isa.vocabulary.QUOTIENT, TANH, render(CAP, **literals))


def call_cap(spec: KernelSpec) -> str:
    """Print the call of the soft cap on the scores of a panel, or nothing."""
    return "" if spec.softcap is None else CALL_CAP


def sink_field(spec: KernelSpec) -> str:
    """Print the field of a call that holds the sink logits, or nothing."""
    return "" if spec.sink_dtype is None else f"  const {CTYPE[spec.sink_dtype]}* sinks_H;\n"


def sink_argument(spec: KernelSpec) -> str:
    """Print what the field is filled with, or nothing."""
    return "" if spec.sink_dtype is None else f"{' ' * 18}sinks_H,\n"


def sink_parts(shape: AttendShape) -> dict[str, str]:
    """Return what merge_splits begins with: nothing, or the sink logit."""
    dtype = shape.spec.sink_dtype
    if dtype is None:
        return {"sink": "", "lowest": "-INFINITY", "joined": "0.0f"}
    word = widen(dtype, f"call.sinks_H[h * {shape.group} + row % {shape.group}]")
    return {
        "sink": render(SINK, widened=word) + "\n",
        "lowest": "sink",
        "joined": "sink == -INFINITY ? 0.0f : std::exp2(sink - m)",
    }


def variant_lines(spec: KernelSpec) -> list[str]:
    """Return the lines of a kernel's glossary."""
    lines = []
    if spec.softcap is not None:
        lines.append(
            f"softcap {spec.softcap:g}: scores are cap * tanh(score / cap), before the mask"
        )
    if spec.sink_dtype is not None:
        lines.append(f"sinks_H {spec.sink_dtype}, a logit per query head that joins the softmax")
    return lines


def _literal(x: float) -> str:
    """Return a number as a float of C++."""
    return f"{x:.9e}f"
