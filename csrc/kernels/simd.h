// Vectors of float and 32-bit integers, as wide as the instruction set that this file is compiled
// for.
//
// They are the compiler's own vector types, so + - * / < & | ^ >> work as written, a*b+c becomes
// one fma where there is one, and the same source serves SSE2, AVX2, AVX-512 and CPUs other than
// x86. Only what operators can't say is a function here. Intrinsics, builtins of one CPU and
// assembly stand in this header and in simd_int16.h alone (tests/unit/native/test_intrinsics.py);
// each has a last branch in plain C++.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

// Internal linkage per translation unit: the same function compiled for three instruction sets must
// not be merged by the linker, or AVX-512 code would run on a CPU without it.
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a zmm register
#elif defined(__AVX2__)
constexpr int kWidth = 8;  // floats in a ymm register
#else
constexpr int kWidth = 4;  // floats in an xmm register
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4), aligned(kWidth * 4)));

inline Vec splat(float x) { return x - Vec{}; }
inline VecU splat_u(uint32_t x) { return x - VecU{}; }
inline VecI splat_i(int32_t x) { return x - VecI{}; }

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);  // unaligned
  return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// The first n < kWidth elements; the rest are zero.
inline Vec load_part(const float* p, int n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  alignas(64) float t[kWidth] = {};
  memcpy(t, p, n * sizeof(float));
  return load(t);
#endif
}
inline void store_part(float* p, Vec v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  alignas(64) float t[kWidth];
  store(t, v);
  memcpy(p, t, n * sizeof(float));
#endif
}

inline VecI to_int_bits(Vec v) { return (VecI)v; }
inline Vec to_float_bits(VecI v) { return (Vec)v; }
inline Vec to_float(VecI v) { return __builtin_convertvector(v, Vec); }

// Nearest integer; |v| must stay below 2^22. Adding 1.5 · 2^23 leaves the rounded value in the low
// mantissa bits.
inline VecI round_to_int(Vec v) {
  const Vec magic = splat(12582912.f);
  return (VecI)(v + magic) - (VecI)magic;
}

inline Vec select(VecI mask, Vec yes, Vec no) { return mask ? yes : no; }

#if defined(__AVX512F__)
// With masks that let everything pass: gcc 12 warns of the plain ones.
inline Vec max(Vec a, Vec b) { return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b); }
inline Vec sqrt(Vec a) { return (Vec)_mm512_maskz_sqrt_ps(0xffff, (__m512)a); }
#elif defined(__AVX2__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
inline Vec sqrt(Vec a) { return (Vec)_mm256_sqrt_ps((__m256)a); }
#elif defined(__SSE2__)
inline Vec max(Vec a, Vec b) { return (Vec)_mm_max_ps((__m128)a, (__m128)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm_min_ps((__m128)a, (__m128)b); }
inline Vec sqrt(Vec a) { return (Vec)_mm_sqrt_ps((__m128)a); }
#else
// As x86's: the second operand where one is NaN.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec sqrt(Vec a) {
  for (int i = 0; i < kWidth; i++) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
#endif

inline Vec abs(Vec a) { return (Vec)((VecI)a & 0x7fffffff); }

// a · b + c and a · b - c with one rounding where there is an instruction for it (kFused), else
// with two. For code that is compiled without contraction, or that needs what a product lost.
#if defined(__AVX512F__)
constexpr bool kFused = true;
inline Vec fused_multiply_add(Vec a, Vec b, Vec c) {
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Vec fused_multiply_subtract(Vec a, Vec b, Vec c) {
  return (Vec)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__)
constexpr bool kFused = true;
inline Vec fused_multiply_add(Vec a, Vec b, Vec c) {
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline Vec fused_multiply_subtract(Vec a, Vec b, Vec c) {
  return (Vec)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
constexpr bool kFused = false;
inline Vec fused_multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec fused_multiply_subtract(Vec a, Vec b, Vec c) { return a * b - c; }
#endif

// Sums and maxima of all lanes, halving, so that the order is fixed for a width.
inline float sum(Vec v) {
  alignas(64) float t[kWidth];
  store(t, v);
  for (int n = kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}
inline float max_lane(Vec v) {
  alignas(64) float t[kWidth];
  store(t, v);
  for (int n = kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

// e^x to 1 – 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays NaN.
// Cody–Waite: x = n·ln2 + r with |r| <= ln2/2, e^r by a polynomial (minimax, degree 6), then the
// exponent is set in two halves because 2^128 alone doesn't fit.
inline Vec exp(Vec x) {
  const Vec lowest = splat(-87.3365447505f), highest = splat(88.7228390520f);
  const Vec clamped = min(max(x, lowest), highest);
  const VecI n = round_to_int(clamped * 1.44269504089f);
  const Vec nf = to_float(n);
  Vec r = clamped - nf * 0.693359375f;
  r = r - nf * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vec y = p * (r * r) + r + 1.f;
  const VecI half = n >> 1;
  y = y * to_float_bits((half + 127) << 23) * to_float_bits((n - half + 127) << 23);
  y = select(x < lowest, splat(0.f), y);
  y = select(x > highest, splat(__builtin_inff()), y);
  return select(x != x, x, y);
}

// --- 16-bit words and doubles --------------------------------------------------------------------

struct Word {  // bf16.h says what it means
  uint16_t bits;
};

// kWidth words as the upper halves of 32-bit lanes; the lower halves are zero.
inline VecU load_upper_words(const Word* p) {
#if defined(__AVX512F__)
  return (VecU)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (VecU)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__SSE2__)
  return (VecU)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
#else
  VecU v = {};
  for (int i = 0; i < kWidth; i++) v[i] = (uint32_t)p[i].bits << 16;
  return v;
#endif
}

// The lower halves of the lanes, whose upper halves are zero.
inline void store_lower_words(Word* p, VecU v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);  // within each half
  const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(joined));
#else
  for (int i = 0; i < kWidth; i++) p[i].bits = (uint16_t)v[i];
#endif
}

// kWidth numbers of 4 bits, from a whole byte on, each in a lane; a byte's high half comes first.
inline VecI load_nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  const __m128i all = _mm_unpacklo_epi8(high, _mm_and_si128(bytes, low));
  return (VecI)_mm512_maskz_cvtepu8_epi32(0xffff, all);
#elif defined(__AVX2__)
  int32_t four;
  memcpy(&four, p, sizeof four);
  const __m128i bytes = _mm_cvtsi32_si128(four), low = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  return (VecI)_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(high, _mm_and_si128(bytes, low)));
#else
  VecI v{};
  for (int i = 0; i < kWidth; i += 2) v[i] = p[i / 2] >> 4, v[i + 1] = p[i / 2] & 15;
  return v;
#endif
}

// A table of 16 numbers, and those of it that `index` (0 … 15) names.
struct Table16 {
#if defined(__AVX512F__)
  __m512 all;
  explicit Table16(const float* table) : all(_mm512_loadu_ps(table)) {}
  Vec at(VecI index) const { return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, all); }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Table16(const float* table)
      : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
  Vec at(VecI index) const {
    const __m256i i = (__m256i)index;
    return (Vec)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i),
                                 _mm256_permutevar8x32_ps(high, i),
                                 _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
  }
#else
  const float* table;
  explicit Table16(const float* table) : table(table) {}
  Vec at(VecI index) const {
    Vec v;
    for (int i = 0; i < kWidth; i++) v[i] = table[index[i]];
    return v;
  }
#endif
};

#if defined(__F16C__)
#define HAS_FLOAT16_CONVERSION
constexpr int kFloat16s = 8;  // converted by one instruction
inline float float_of_float16(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float16_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline void widen_float16s(const uint16_t* x, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)));
}
inline void narrow_to_float16s(const float* x, uint16_t* out) {
  _mm_storeu_si128((__m128i*)out, _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
#endif

// A register of doubles, widened straight from memory: that spares the shuffle which the upper half
// of a register of floats would need. (gcc's __builtin_convertvector works in halves and is half as
// fast.)
constexpr int kDoubles = kWidth / 2;
typedef double Doubles __attribute__((vector_size(kDoubles * 8)));

inline Doubles load_wide(const float* x) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(x));
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(x));
#elif defined(__SSE2__)
  return (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)x)));
#else
  Doubles v = {};
  for (int i = 0; i < kDoubles; i++) v[i] = x[i];
  return v;
#endif
}

// --- The core: its caches, registers and modes ---------------------------------------------------

// Ask for the cache line at p, to read or to write. The passes over a row that is in the cache
// already would leave the memory idle: they use the time to fetch the next row. A store to memory
// that isn't in the cache reads it first, and few such stores can wait at a time: asked for one row
// early, gradients of two outputs took 0.6 of the time (Emerald Rapids). Beyond the end of an array
// all do nothing, and so does prefetchw on a CPU without it. Always inline: GCC 12 takes a function
// that only prefetches for one without effect, and drops the call.
__attribute__((always_inline)) inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }
__attribute__((always_inline)) inline void fetch_to_second_level(const void* p) {
  __builtin_prefetch(p, 0, 2);
}
template <class T>
__attribute__((always_inline)) inline void fetch_to_write(T* p) {
#if defined(__SSE2__)
  asm volatile("prefetchw %0" : : "m"(*p));
#else
  __builtin_prefetch(p, 1, 3);
#endif
}

template <class T>
constexpr int kElementsOfLine = 64 / sizeof(T);

// The compiler has to have v in a register here, and knows nothing of its value from here on: no
// product is fused with a sum behind it.
__attribute__((always_inline)) inline void forget_value(Vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__SSE2__)
  asm("" : "+x"(v));
#else
  asm("" : "+w"(v));
#endif
}

// In a loop that waits for another core: the other thread of this core gets the execution units.
inline void pause_spinning() {
#if defined(__SSE2__)
  __builtin_ia32_pause();
#endif
}

// Numbers below 1.2e-38 count as zero while this lives, if asked, on x86. The moments of parameters
// that get no gradient (rows of an embedding) decay into that range and stay there, where Intel's
// multipliers take an assist of about 150 cycles per instruction.
#if defined(__SSE2__)
class FlushDenormals {
 public:
  explicit FlushDenormals(bool wanted) : before_(_mm_getcsr()) {
    if (wanted) _mm_setcsr(before_ | 0x8040);  // flush-to-zero and denormals-are-zero
  }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#else
struct FlushDenormals {
  explicit FlushDenormals(bool) {}
};
#endif

}  // namespace
