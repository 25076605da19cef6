"""The vector vocabulary in GCC's vector extensions: 4 lanes, any CPU, no flags."""

VECTOR = """
// ---- vectors: GCC vector extensions, 4 lanes ------------------------------------------------
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
static inline vec zero() { return vec{0.0f, 0.0f, 0.0f, 0.0f}; }
static inline vec splat(float x) { return vec{x, x, x, x}; }
static inline vec load(const float* p) { vec x; memcpy(&x, p, sizeof x); return x; }
static inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }
static inline vec add(vec a, vec b) { return a + b; }
static inline vec sub(vec a, vec b) { return a - b; }
static inline vec mul(vec a, vec b) { return a * b; }
static inline vec maximum(vec a, vec b) { return a > b ? a : b; }
static inline vec fma(vec a, vec b, vec c) { return a * b + c; }
static inline float reduce_add(vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float reduce_max(vec x) {
  const float low = x[0] > x[2] ? x[0] : x[2], high = x[1] > x[3] ? x[1] : x[3];
  return low > high ? low : high;
}
"""

QUOTIENT = """
static inline vec quotient(vec a, vec b) { return a / b; }
"""

MASKED = """
// score + bias, and -inf where the bias is -inf, whatever the score
static inline vec masked(vec score, vec bias) {
  const vec dead = splat(-INFINITY);
  return bias == dead ? dead : score + bias;
}
"""

EXP2 = """
// 2^x for x <= 0, relative error below 2^-21; 0 below the normal numbers
static inline vec exp2_nonpositive(vec x) {
  const ivec normal = ~(x < splat(-126.0f));
  // adding and taking away 1.5 * 2^23 rounds to the nearest integer
  const vec bounded = maximum(x, splat(-126.0f)), magic = splat(12582912.0f);
  const vec whole = (bounded + magic) - magic;
  const ivec exponent = (__builtin_convertvector(whole, ivec) + 127) << 23;
  const vec power = exp2_fraction(sub(x, whole)) * (vec)exponent;
  return normal ? power : zero();
}
"""

LOAD_BF16 = """
// 4 pairs of bf16 -> their first and their second halves
static inline void load_pairs_bf16(const uint16_t* p, vec& first, vec& second) {
  ivec pairs;
  memcpy(&pairs, p, sizeof pairs);
  first = (vec)(pairs << 16);
  second = (vec)(pairs & int32_t(0xffff0000));
}
"""

LOAD_FP16 = """
static inline vec load_fp16(const uint16_t* p) {
  return vec{widen_fp16(p[0]), widen_fp16(p[1]), widen_fp16(p[2]), widen_fp16(p[3])};
}
"""
