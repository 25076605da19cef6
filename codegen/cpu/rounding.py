"""Numbers of quantized pages, in C++: bf16 rounded outwards, integers to even, 8-bit floats.

The torch twins are in `codegen/formats/grouped.py` and in torch itself.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats.float8 import Float8Format

NUMBERS = """
// ---- numbers: every operation rounds once, as in the layout -----------------------------------
#pragma GCC optimize("fp-contract=off")
// the largest bf16 that is at most x
static inline float bf16_down(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + (bits >> 31) * 0xffff) & 0xffff0000;
  memcpy(&x, &bits, 4);
  return x;
}
// the smallest bf16 that is at least x >= 0
static inline float bf16_up(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0xffff) & 0xffff0000;
  memcpy(&x, &bits, 4);
  return x;
}
// the word of a float that is a bf16 number
static inline uint16_t bf16_word(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t(bits >> 16);
}
// integers in the order of floats, NaN beyond both ends: extremes of them are taken lane by lane,
// and a NaN is seen in everything that shares its scale
static inline int32_t ordered(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
static inline float from_ordered(int32_t bits) {
  bits ^= bits >> 31 & 0x7fffffff;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
"""

NEAREST = """
// the integer nearest to 0 <= x < 2^22, ties to even: the sum has no bits left for a fraction
static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }
"""

NARROW_FP8 = """
// the $type word nearest to x, ties to even; |x| must not round to more than $largest
static inline uint8_t narrow_$type(float x) {
  uint32_t bits, sum;
  memcpy(&bits, &x, 4);
  // Words are 1/$fractions of their power of two apart, but at least 2^-$finest: the unit in the
  // last place of a power 2^$left times as large, so a sum with that counts words.
  const int32_t power = std::max(int32_t(bits >> 23 & 255), $least);
  const uint32_t large = uint32_t(power + $left) << 23;
  float y;
  memcpy(&y, &large, 4);
  y += std::fabs(x);
  memcpy(&sum, &y, 4);
  return uint8_t((bits >> 24 & 128) | (sum - large + uint32_t(power - $least) * $fractions));
}
"""

WIDEN_FP8 = """
// fraction times a power of two: the fraction has a hidden bit, unless the exponent is the least
static inline float widen_$type(uint8_t x) {
  const int32_t exponent = x >> $mantissa_bits & $exponents;
  const int32_t fraction = (x & $fraction_mask) + (exponent > 0 ? $fractions : 0);
  const uint32_t bits = uint32_t(std::max(exponent, 1) + $offset) << 23 | uint32_t(x & 0x80) << 24;
  float power;
  memcpy(&power, &bits, 4);
  return float(fraction) * power;
}
"""


def narrow_text(format_: Float8Format) -> str:
    """Print the function that rounds to a type of 8 bits."""
    return _render(NARROW_FP8, format_)


def widen_text(format_: Float8Format) -> str:
    """Print the function that returns the number of a word of 8 bits."""
    return _render(WIDEN_FP8, format_)


def _render(template: str, format_: Float8Format) -> str:
    mantissa_bits, least = format_.mantissa_bits, 128 - format_.bias
    return render(
        template,
        type=format_.type_name,
        largest=int(format_.largest),
        mantissa_bits=mantissa_bits,
        fractions=1 << mantissa_bits,
        fraction_mask=(1 << mantissa_bits) - 1,
        exponents=(1 << format_.exponent_bits) - 1,
        left=23 - mantissa_bits,
        # The biased fp32 exponent of the smallest normal number, and what fractions of it are.
        least=least,
        offset=least - 1 - mantissa_bits,
        finest=127 - least + mantissa_bits,
    )
