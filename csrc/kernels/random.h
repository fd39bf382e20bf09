// A counter-based generator for dropout: whether an element is kept is a pure function of
// (key, row, column). Nothing is stored and nothing depends on the number of threads or on the
// vector width; the backward pass asks again.
//
// Per row the 64-bit key is mixed with the row number (splitmix64). Within the row a 32-bit hash
// (two multiplications, three xor-shifts; constants of lowbias32 by Chris Wellons) turns a counter
// into two 16-bit numbers: columns c and c + 16 of a 32-column block share one hash, because the
// 16-bit resolution of a probability (1/65536) is enough and halves the cost.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

constexpr int kDropoutBlock =
    32;  // columns served by 16 counters; a multiple of every vector width

struct RowKey {
  uint32_t low, high;
};

inline RowKey row_key(uint64_t key, uint64_t row) {
  uint64_t z = key + (row + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return {(uint32_t)z, (uint32_t)(z >> 32)};
}

template <class U>
inline U hash(U counter, RowKey key) {
  U x = counter + key.low;
  x = x ^ (x >> 16);
  x = x * 0x7feb352du;
  x = x ^ key.high;
  x = x ^ (x >> 15);
  x = x * 0x846ca68bu;
  return x ^ (x >> 16);
}

// p as the generator can draw it, and the factor that keeps the expectation: exactly 1 / (1 - drawn
// p).
struct DropoutRate {
  uint32_t threshold;  // drop if the 16-bit number is below
  float scale;
  explicit DropoutRate(float p) {
    threshold = (uint32_t)std::lrint(p * 65536.0);
    scale = threshold >= 65536 ? 0.f : (float)(65536.0 / (65536.0 - threshold));
  }
};

inline VecU lane_numbers() {
  VecU v;
  for (int i = 0; i < kWidth; i++) v[i] = i;
  return v;
}

// Factors (0 or scale) for kWidth columns from the multiple-of-kWidth column `first` on, and for
// the kWidth columns 16 further. `first` % 32 must be below 16.
inline void dropout_factors(RowKey key, DropoutRate rate, int64_t first, Vec* here,
                            Vec* sixteen_on) {
  const uint32_t counter = (uint32_t)(first / kDropoutBlock * 16 + first % kDropoutBlock);
  const VecU bits = hash<VecU>(lane_numbers() + counter, key);
  const Vec scale = splat(rate.scale), zero = Vec{};
  *here = select((VecI)(bits & 0xffffu) < (int32_t)rate.threshold, zero, scale);
  *sixteen_on = select((VecI)(bits >> 16) < (int32_t)rate.threshold, zero, scale);
}

// The factors of a whole 32-column block, in order.
constexpr int kDropoutVecs = kDropoutBlock / kWidth;
inline void dropout_block(RowKey key, DropoutRate rate, int64_t first, Vec* factors) {
  for (int i = 0; i < kDropoutVecs / 2; i++)
    dropout_factors(key, rate, first + i * kWidth, &factors[i], &factors[i + kDropoutVecs / 2]);
}

}  // namespace
