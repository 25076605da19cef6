"""The vector vocabulary in AVX2 with FMA and F16C: 8 lanes."""

VECTOR = """
#include <immintrin.h>
// ---- vectors: AVX2, 8 lanes -----------------------------------------------------------------
typedef __m256 vec;
static inline vec zero() { return _mm256_setzero_ps(); }
static inline vec splat(float x) { return _mm256_set1_ps(x); }
static inline vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec maximum(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline float reduce_add(vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float reduce_max(vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
"""

QUOTIENT = """
static inline vec quotient(vec a, vec b) { return _mm256_div_ps(a, b); }
"""

MASKED = """
// score + bias, and -inf where the bias is -inf, whatever the score
static inline vec masked(vec score, vec bias) {
  const vec dead = splat(-INFINITY);
  return _mm256_blendv_ps(add(score, bias), dead, _mm256_cmp_ps(bias, dead, _CMP_EQ_OQ));
}
"""

EXP2 = """
// 2^x for x <= 0, relative error below 2^-21; 0 below the normal numbers
static inline vec exp2_nonpositive(vec x) {
  const vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vec normal = _mm256_cmp_ps(x, splat(-126.0f), _CMP_NLT_UQ);
  const __m256i exponent = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  const vec power = mul(exp2_fraction(sub(x, whole)), _mm256_castsi256_ps(exponent));
  return _mm256_and_ps(normal, power);
}
"""

LOAD_BF16 = """
// 8 pairs of bf16 -> their first and their second halves
static inline void load_pairs_bf16(const uint16_t* p, vec& first, vec& second) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
  first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}
"""

LOAD_FP16 = """
static inline vec load_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
"""
