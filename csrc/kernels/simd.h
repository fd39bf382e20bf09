// Vectors of float and 32-bit integers, as wide as the instruction set that this file is compiled
// for.
//
// They are the compiler's own vector types, so + - * / < & | ^ >> work as written, a*b+c becomes
// one fma where there is one, and the same source serves SSE2, AVX2 and AVX-512. Only what
// operators can't say is a function here.
#pragma once

#include <immintrin.h>

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
#else
inline Vec max(Vec a, Vec b) { return (Vec)_mm_max_ps((__m128)a, (__m128)b); }
inline Vec min(Vec a, Vec b) { return (Vec)_mm_min_ps((__m128)a, (__m128)b); }
inline Vec sqrt(Vec a) { return (Vec)_mm_sqrt_ps((__m128)a); }
#endif

inline Vec abs(Vec a) { return (Vec)((VecI)a & 0x7fffffff); }

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

}  // namespace
