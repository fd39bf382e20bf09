// 16-bit floats, one at a time: widened to fp32 and rounded from it.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Bfloat16 {
  uint16_t bits;
};
inline float widen(Bfloat16 x) { return from_bits((uint32_t)x.bits << 16); }
inline void narrow(float x, Bfloat16* out) {  // to nearest even, NaN stays NaN
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

struct Float16 {
  uint16_t bits;
};
#if defined(HAS_FLOAT16_CONVERSION)
inline float widen(Float16 x) { return float_of_float16(x.bits); }
inline void narrow(float x, Float16* out) { out->bits = float16_of(x); }
#else
inline float widen(Float16 x) {
  // Multiplying by 2^112 moves the exponent and makes subnormals normal.
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = (uint32_t)(x.bits & 0x7fff) << 13;
  const float scaled = from_bits(rest) * from_bits(0x77800000);
  const uint32_t bits = rest >= 0x0f800000 ? rest | 0x7f800000 : bits_of(scaled);
  return from_bits(bits | sign);
}
inline void narrow(float x, Float16* out) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000)
    half = 0x7e00;
  else if (rest >= 0x477ff000)  // from 65520 on, infinity
    half = 0x7c00;
  else if (rest < 0x38800000)  // subnormal: adding 0.5 leaves the rounded value in the low bits
    half = bits_of(from_bits(rest) + 0.5f) - 0x3f000000;
  else
    half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  out->bits = (uint16_t)(half | sign);
}
#endif

#if defined(HAS_FLOAT16_CONVERSION)
// The compiler makes no vectors of fp16 conversions: some at a time, by hand.
inline void widen_all(const Float16* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kFloat16s <= count; i += kFloat16s) widen_float16s(&x[i].bits, out + i);
  for (; i < count; i++) out[i] = widen(x[i]);
}
inline void narrow_all(const float* x, int64_t count, Float16* out) {
  int64_t i = 0;
  for (; i + kFloat16s <= count; i += kFloat16s) narrow_to_float16s(x + i, &out[i].bits);
  for (; i < count; i++) narrow(x[i], out + i);
}
#endif

}  // namespace
