"""Numbers of quantized pages, in C++: bf16 rounded outwards, integers to even, e4m3.

The torch twins are in `codegen/formats/grouped.py` and in torch itself.
"""

from __future__ import annotations

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

NARROW_E4M3 = """
// the e4m3 word nearest to x, ties to even; |x| must not round to more than 448
static inline uint8_t narrow_e4m3(float x) {
  uint32_t bits, sum;
  memcpy(&bits, &x, 4);
  // Words are 1/8 of their power of two apart, but at least 2^-9: the unit in the last place of a
  // power 2^20 times as large, so a sum with that counts words.
  const int32_t power = std::max(int32_t(bits >> 23 & 255), 121);
  const uint32_t large = uint32_t(power + 20) << 23;
  float y;
  memcpy(&y, &large, 4);
  y += std::fabs(x);
  memcpy(&sum, &y, 4);
  return uint8_t((bits >> 24 & 128) | (sum - large + uint32_t(power - 121) * 8));
}
"""

WIDEN_E4M3 = """
// fraction times a power of two: the fraction has 4 bits, or 3 if the exponent is the least
static inline float widen_e4m3(uint8_t x) {
  const int32_t exponent = x >> 3 & 15, fraction = (x & 7) + (exponent > 0 ? 8 : 0);
  const uint32_t bits = uint32_t(std::max(exponent, 1) + 117) << 23 | uint32_t(x & 0x80) << 24;
  float power;
  memcpy(&power, &bits, 4);
  return float(fraction) * power;
}
"""
