// bf16 as a way to keep numbers: the upper half of a float, read and written as whole vectors of
// floats. There is no arithmetic in it.
#pragma once

#include "simd.h"

namespace {

struct Bf16 {
  uint16_t bits;
};

inline Vec load(const Bf16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (Vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
#endif
}

// Rounded to nearest, ties to even; a NaN becomes the one of all bits, which costs no selection.
inline VecU bf16_bits(Vec v) {
  const VecU bits = (VecU)v;
  const VecU raised = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (raised | (VecU)(v != v)) >> 16;
}

inline void store(Bf16* p, Vec v) {
  const VecU bits = bf16_bits(v);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);  // within each half
  const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(joined));
#else
  for (int i = 0; i < kWidth; i++) p[i].bits = (uint16_t)bits[i];
#endif
}

// The first n < kWidth elements; the rest are zero.
inline Vec load_part(const Bf16* p, int n) {
  Bf16 t[kWidth] = {};
  memcpy(t, p, n * sizeof(Bf16));
  return load(t);
}
inline void store_part(Bf16* p, Vec v, int n) {
  Bf16 t[kWidth];
  store(t, v);
  memcpy(p, t, n * sizeof(Bf16));
}

}  // namespace
