"""Scalar conversions between fp32 and the storage types, in C++.

They round to nearest even, exactly as torch does, so that appended bytes equal packed bytes.
"""

from __future__ import annotations

CTYPE = {"fp32": "float", "bf16": "uint16_t", "fp16": "uint16_t"}
"""The C++ type of a word of each dtype."""

BF16 = """
static inline float widen_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static inline uint16_t narrow_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return x == x ? rounded : uint16_t(0x7fc0);
}
"""

FP16_F16C = """
static inline float widen_fp16(uint16_t x) { return _cvtsh_ss(x); }
static inline uint16_t narrow_fp16(float x) {
  return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}
"""

FP16_PORTABLE = """
static inline float widen_fp16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 1023;
  uint32_t bits = sign | (fraction << 13);
  float y;
  if (exponent == 0) {  // zero and the subnormal numbers: fraction * 2^-24
    y = float(fraction) * 0x1p-24f;
    return sign ? -y : y;
  }
  bits |= (exponent == 31 ? 255 : exponent + 112) << 23;
  memcpy(&y, &bits, 4);
  return y;
}
static inline uint16_t narrow_fp16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);   // NaN
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
  if (bits < 0x38800000) {  // subnormal: 0.5 has the spacing of subnormal halves in its last bit
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((bits >> 13) - (112 << 10)));
}
"""


def widen(dtype: str, expression: str) -> str:
    """Print the fp32 value of a word of `dtype`."""
    return expression if dtype == "fp32" else f"widen_{dtype}({expression})"


def narrow(dtype: str, expression: str) -> str:
    """Print the word of `dtype` nearest to an fp32 expression."""
    return expression if dtype == "fp32" else f"narrow_{dtype}({expression})"


def convert(source: str, target: str, expression: str) -> str:
    """Print the conversion of a word; words of one type are copied untouched."""
    return expression if source == target else narrow(target, widen(source, expression))


def scalar_text(dtypes: set[str], *, f16c: bool) -> str:
    """Print the conversions that `dtypes` need."""
    texts = []
    if "bf16" in dtypes:
        texts.append(BF16)
    if "fp16" in dtypes:
        texts.append(FP16_F16C if f16c else FP16_PORTABLE)
    return "\n".join(text.strip("\n") for text in texts)
