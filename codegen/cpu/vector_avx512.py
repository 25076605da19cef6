"""The vector vocabulary in AVX-512: 16 lanes."""

VECTOR = """
#include <immintrin.h>
// ---- vectors: AVX-512, 16 lanes -------------------------------------------------------------
typedef __m512 vec;
static inline vec zero() { return _mm512_setzero_ps(); }
static inline vec splat(float x) { return _mm512_set1_ps(x); }
static inline vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec maximum(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline float reduce_add(vec x) { return _mm512_reduce_add_ps(x); }
static inline float reduce_max(vec x) { return _mm512_reduce_max_ps(x); }
"""

QUOTIENT = """
static inline vec quotient(vec a, vec b) { return _mm512_div_ps(a, b); }
"""

MASKED = """
// score + bias, and -inf where the bias is -inf, whatever the score
static inline vec masked(vec score, vec bias) {
  const vec dead = splat(-INFINITY);
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(bias, dead, _CMP_EQ_OQ), add(score, bias), dead);
}
"""

EXP2 = """
// 2^x for x <= 0, relative error below 2^-21; 0 below the normal numbers
static inline vec exp2_nonpositive(vec x) {
  const vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, exp2_fraction(sub(x, whole)), whole);
}
"""

LOAD_BF16 = """
// 16 pairs of bf16 -> their first and their second halves
static inline void load_pairs_bf16(const uint16_t* p, vec& first, vec& second) {
  const __m512i pairs = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}
"""

LOAD_FP16 = """
static inline vec load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
"""

HALF_LOAD = """
// the last 8 channels of a row: lanes 8..15 are zero and nothing behind the row is read
static inline vec half_load(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
"""

HALF_LOAD_BF16 = """
static inline void half_load_pairs_bf16(const uint16_t* p, vec& first, vec& second) {
  const __m512i pairs = _mm512_maskz_loadu_epi32(0xff, p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}
"""

HALF_LOAD_FP16 = """
static inline vec half_load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)));
}
"""
