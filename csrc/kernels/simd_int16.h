// 16-bit integers in vectors: sums of products of pairs, rounding to them and their shuffles.
//
// A pair is two neighbours in depth in one 32-bit lane. Beside simd.h this is the only place of
// intrinsics; the last branch of each function is plain C++, for CPUs other than x86.
#pragma once

#include "simd.h"

namespace {

// --- Products ------------------------------------------------------------------------------------

// Sums of products of pairs: sum += a.low · b.low + a.high · b.high in each 32-bit lane.
struct MultiplyAndAdd {
  static __attribute__((always_inline)) inline void add(VecI& total, VecI a, VecI b) {
#if defined(__AVX512F__)
    total += (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
    asm volatile("" : "+v"(total));
#elif defined(__AVX2__)
    total += (VecI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    // Keeps GCC from moving the next broadcasts up, which would spill the sums.
    asm volatile("" : "+x"(total));
#elif defined(__SSE2__)
    total += (VecI)_mm_madd_epi16((__m128i)a, (__m128i)b);
    asm volatile("" : "+x"(total));
#else
    const auto low = [](VecI pairs) { return (VecI)((VecU)pairs << 16) >> 16; };
    total += low(a) * low(b) + (a >> 16) * (b >> 16);
#endif
  }
};

#if defined(__AVX512F__) || defined(CPUTRAIN_AVX_VNNI)
#define HAS_DOT_PRODUCT
// One instruction for both, on CPUs with AVX512_VNNI, or AVX_VNNI where there is no AVX-512. As
// assembly, because the intrinsics would need all of their callers compiled for VNNI.
struct DotProduct {
  static __attribute__((always_inline)) inline void add(VecI& total, VecI a, VecI b) {
#if defined(__AVX512F__)
    asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
#endif
  }
};

inline bool cpu_has_dot_product() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512vnni");
#else
  return __builtin_cpu_supports("avxvnni");
#endif
}
#endif

// --- Rounding ------------------------------------------------------------------------------------

// To the nearest integer, ties to even, in one instruction.
inline VecI round_nearest(Vec v) {
#if defined(__AVX512F__)
  return (VecI)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (VecI)_mm_cvtps_epi32((__m128)v);
#else
  forget_value(v);  // a product would be fused with what round_to_int adds
  return round_to_int(v);
#endif
}

// --- Shuffles ------------------------------------------------------------------------------------

// narrow: 16-bit words of lo and hi, lane by lane of 128 bits; then 32-bit and 64-bit interleaving,
// ditto. store_lane: 128 bits of w.
#if defined(__AVX512F__)
typedef __m512i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm512_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
template <int kLane>
inline void store_lane(int32_t* to, Words w) {
  _mm_storeu_si128((__m128i*)to, _mm512_extracti32x4_epi32(w, kLane));
}
#elif defined(__AVX2__)
typedef __m256i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm256_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm256_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm256_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
template <int kLane>
inline void store_lane(int32_t* to, Words w) {
  _mm_storeu_si128((__m128i*)to, _mm256_extracti128_si256(w, kLane));
}
#elif defined(__SSE2__)
typedef __m128i Words;
inline Words narrow(VecI lo, VecI hi) { return _mm_packs_epi32((Words)lo, (Words)hi); }
inline Words low32(Words a, Words b) { return _mm_unpacklo_epi32(a, b); }
inline Words high32(Words a, Words b) { return _mm_unpackhi_epi32(a, b); }
inline Words low64(Words a, Words b) { return _mm_unpacklo_epi64(a, b); }
inline Words high64(Words a, Words b) { return _mm_unpackhi_epi64(a, b); }
template <int kLane>
inline void store_lane(int32_t* to, Words w) {
  _mm_storeu_si128((__m128i*)to, w);
}
#else
typedef VecI Words;  // one lane of 128 bits
static_assert(kWidth == 4);
inline Words narrow(VecI lo, VecI hi) {
  const VecI low = Words{lo[0], lo[2], hi[0], hi[2]} & 0xffff;
  return low |
         (VecI)(VecU{(uint32_t)lo[1], (uint32_t)lo[3], (uint32_t)hi[1], (uint32_t)hi[3]} << 16);
}
inline Words low32(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
inline Words high32(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
inline Words low64(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
inline Words high64(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
template <int kLane>
inline void store_lane(int32_t* to, Words w) {
  memcpy(to, &w, sizeof w);
}
#endif

}  // namespace
