"""The vocabulary of codes: words of 32 bits, one per lane, and the numbers packed into them.

One text serves every instruction set: compilers turn vectors of integers into its instructions.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.grouped import grouped_part
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import render

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
// the byte of e4m3 from bit `shift` on, times 2^-8: sign, 4 bits of exponent, 3 of fraction
static inline vec number_e4m3(words x, int shift) {
  const words sign = bits(x, shift - 24, 0x80000000u);
  // 2^(exponent - 15) (1 + fraction / 8)
  const words y = bits(x, shift - 20, 0x07f00000u) | 0x38000000u;
  // Exponent 0 has no hidden one: 2 y - 2^-14 is the number then, and less than y only then.
  const vec z = fma((vec)y, splat(2.0f), splat(-0x1p-14f));
  const signed_words least = (signed_words)z < (signed_words)y ? (signed_words)z : (signed_words)y;
  return (vec)((words)least | sign);
}
// the scales for such numbers
static inline vec load_scale_e4m3(const uint8_t* p) { return mul(load_bf16(p), splat(256.0f)); }
"""


def words_text(shape: AttendShape) -> str:
    """Print the vocabulary of codes."""
    text = render(WORDS, bytes=shape.isa.lanes * 4, half_bytes=shape.isa.lanes * 2)
    parts = (grouped_part(shape.spec, "k"), grouped_part(shape.spec, "v"))
    if any(part is not None and part.is_float for part in parts):
        text += "\n" + WORDS_FP8.strip("\n")
    return text
