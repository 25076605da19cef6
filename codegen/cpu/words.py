"""The vocabulary of codes: words of 32 bits, one per lane, and the numbers packed into them.

One text serves every instruction set: compilers turn vectors of integers into its instructions.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.grouped import float8_formats, grouped_part
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats.float8 import Float8Format

WORDS = """
// ---- words of 32 bits, one per lane, which hold several codes each -----------------------------
typedef uint32_t words __attribute__((vector_size($bytes)));
typedef int32_t signed_words __attribute__((vector_size($bytes)));
typedef uint16_t half_words __attribute__((vector_size($half_bytes)));
static inline words load_words(const uint8_t* p) { words x; memcpy(&x, p, sizeof x); return x; }
// the bits of `mask` after a shift to the right, or to the left if it is negative
static inline words bits(words x, int shift, uint32_t mask) {
  return (shift < 0 ? x << -shift : x >> shift) & mask;
}
static inline vec number(words x) { return __builtin_convertvector((signed_words)x, vec); }
// neighbouring bf16 words
static inline vec load_bf16(const uint8_t* p) {
  half_words x;
  memcpy(&x, p, sizeof x);
  return (vec)(__builtin_convertvector(x, words) << 16);
}
// p x, and 0 where p is 0, whatever x
static inline vec weighted(vec p, vec x) { return p == zero() ? zero() : mul(p, x); }
"""

WORDS_FP8 = """
// the byte of $type from bit `shift` on$divided:
// sign, $exponent_bits bits of exponent, $mantissa_bits of fraction
static inline vec number_$type(words x, int shift) {
  const words sign = bits(x, shift - 24, 0x80000000u);
  // 2^(exponent - 15) (1 + fraction / $fractions)
  const words y = bits(x, shift - $left, ${mask}u) $join 0x38000000u;
  // Exponent 0 has no hidden one: 2 y - 2^-14 is the number then, and less than y only then.
  const vec z = fma((vec)y, splat(2.0f), splat(-0x1p-14f));
  const signed_words least = (signed_words)z < (signed_words)y ? (signed_words)z : (signed_words)y;
  return (vec)((words)least | sign);
}
"""

SCALE_FP8 = """
// the scales for such numbers
static inline vec load_scale_$type(const uint8_t* p) { return mul(load_bf16(p), splat($unit.0f)); }
"""


def words_text(shape: AttendShape) -> str:
    """Print the vocabulary of codes."""
    text = render(WORDS, bytes=shape.isa.lanes * 4, half_bytes=shape.isa.lanes * 2)
    parts = (grouped_part(shape.spec, "k"), grouped_part(shape.spec, "v"))
    for format_ in float8_formats(*parts):
        text += "\n" + _float8_text(format_)
    return text


def load_scale(format_: Float8Format) -> str:
    """Return the name of the function that loads scales for what `number_` of a type returns."""
    return f"load_scale_{format_.type_name}" if format_.fp16_exponent else "load_bf16"


def _float8_text(format_: Float8Format) -> str:
    left, unit = 23 - format_.mantissa_bits, format_.fp16_exponent
    mask = 0x7F << left
    text = render(
        WORDS_FP8,
        type=format_.type_name,
        exponent_bits=format_.exponent_bits,
        mantissa_bits=format_.mantissa_bits,
        fractions=1 << format_.mantissa_bits,
        divided=f", times 2^-{unit}" if unit else "",
        left=left,
        mask=f"0x{mask:08x}",
        # The highest of 5 bits of exponent meets a bit of 112, which is added then.
        join="+" if mask & 0x38000000 else "|",
    )
    if unit:
        text += "\n" + render(SCALE_FP8, type=format_.type_name, unit=1 << unit)
    return text
