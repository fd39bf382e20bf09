// bf16 as a way to keep numbers: the upper half of a float, read and written as whole vectors of
// floats. There is no arithmetic in it.
#pragma once

#include "simd.h"

namespace {

typedef Word Bf16;

inline Vec load(const Bf16* p) { return (Vec)load_upper_words(p); }

// Rounded to nearest, ties to even; a NaN becomes the one of all bits, which costs no selection.
inline VecU bf16_bits(Vec v) {
  const VecU bits = (VecU)v;
  const VecU raised = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (raised | (VecU)(v != v)) >> 16;
}

inline void store(Bf16* p, Vec v) { store_lower_words(p, bf16_bits(v)); }

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
