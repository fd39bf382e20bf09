// Block-scaled 16-bit integers: which scale a block gets, and the rounding.
//
// A block's values are multiplied by a factor so that their Euclidean norm becomes at most kNorm
// and the largest at most 32767, then rounded. By Cauchy and Schwarz no sum of products of two such
// blocks, nor any part of one, exceeds the product of their norms: rounding adds at most √512 / 2 <
// 12 to a norm (kMaxBlock values), and (46300 + 12)² < 2³¹, so that 32-bit sums can't overflow; the
// rest up to √2³¹ = 46340 leaves room for the rounding of the norm itself. A bound by the largest
// value alone (128 · 4095² < 2³¹) would cost two to three bits of every value, and more with
// outliers.
//
// A block with an infinity or a NaN gets the scale NaN: all results that it enters are NaN, where
// fp32 would give NaN or an infinity. A block of zeros gets the scale 0.
#pragma once

#include "simd.h"

namespace {

constexpr float kNorm = 46300.f, kLargest = 32767.f;
// What is stored is kUnit / factor, so that neither the scale nor a sum (below 2³¹) times kShrink
// times the scale leaves fp32's range before the result does.
constexpr float kUnit = 4096.f, kShrink = 1.f / (4096.f * 4096.f);
// Squares of values within these are neither lost nor infinite; others are multiplied by kLift or
// kLower first.
constexpr float kSmall = 1e-15f, kBig = 1e17f;
constexpr float kLift = 0x1p100f, kLower = 0x1p-100f;

// One lane per block.
struct BlockScale {
  Vec before;  // 1, kLift or kLower
  Vec factor;  // values · before · factor are rounded
  Vec stored;
};

inline bool any(VecI mask) {
  int32_t all = 0;
  for (int i = 0; i < kWidth; i++) all |= mask[i];
  return all != 0;
}

// 1, or what brings a block with this largest value into the range where squares are safe.
inline Vec lift_of(Vec largest) {
  const Vec one = splat(1.f);
  Vec lift = select((largest < kSmall) & (largest > 0.f), splat(kLift), one);
  return select((largest > kBig) & (largest <= __FLT_MAX__), splat(kLower), lift);
}

// v · before, where it isn't known to be 1, as it nearly always is.
template <bool kLifted>
inline Vec lifted(Vec v, Vec before) {
  return kLifted ? v * before : v;
}

// From the sum of squares and the largest magnitude of values · before.
inline BlockScale scale_of(Vec squares, Vec largest, Vec before) {
  const Vec stored = max(sqrt(squares) * (kUnit / kNorm), largest * (kUnit / kLargest));
  // NaN also where only an infinity was: its square is infinite, and infinity - infinity is NaN.
  const Vec finite = stored + (squares - squares);
  const Vec inverse = select(stored > 0.f, kUnit / stored, Vec{});
  // 1 / before is a power of two.
  const Vec after =
      select(before > 1.f, splat(kLower), select(before < 1.f, splat(kLift), splat(1.f)));
  return {before, inverse, finite * after};
}

}  // namespace
