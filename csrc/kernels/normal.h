// The normal distribution: density and cumulative probability of a vector of numbers, from one
// exponential.
//
// Where t = |x| is above 1 the tail beyond t is Q(t) = e^(-t²/2) · R(t), and R falls smoothly like
// 0.4 / t: a quotient of polynomials of degrees 3 and 4 with positive coefficients, so that nothing
// cancels. Both tails keep their relative precision, unlike 1 + erf(x / √2), which has no correct
// digit left below x = -5.5. Below 1 the probability is 1/2 + x · (polynomial in x²), which is more
// accurate there.
//
// All coefficients are from csrc/fit_normal_tail.py. Greatest error of GELU, x · cumulative, found
// over every 61st float: 1.7 units in the last place above x = -1, 5.3 below, and 0 in place of
// results below 3e-38.
#pragma once

#include "simd.h"

namespace {

struct Normal {
  Vec density;     // e^(-x²/2) / √2π
  Vec cumulative;  // probability of less than x
};

// t² - square, what the product lost in rounding. Its exponential needs it: at t = 13 half a unit
// in the last place of t²/2 = 85 is a relative error of 4e-6.
inline Vec lost_of_square(Vec t, Vec square) {
  if constexpr (kFused) return fused_multiply_subtract(t, t, square);
  const Vec high = (Vec)((VecI)t & (int32_t)0xfffff000),
            low = t - high;  // 12 bits each: exact products
  return ((high * high - square) + 2.f * high * low) + low * low;
}

// e^(-t²/2) = (1 + excess) · 2^-n.
struct HalfSquareExp {
  Vec excess;
  VecI shifted_n;  // n where the exponent of a float is

  // y · 2^-n for a y whose exponent stays within a float's range.
  Vec scale(Vec y) const { return (Vec)((VecI)y - shifted_n); }
};

// For 0 <= t <= 13.1, where the result, and a third of it, are still normal numbers. NaN stays NaN.
inline HalfSquareExp exp_of_half_square(Vec t, Vec square) {
  const Vec magic = splat(12582912.f);                  // 1.5 · 2^23: see round_to_int
  const Vec shifted = square * 0.72134752044f + magic;  // t²/2 / ln 2
  const Vec n = shifted - magic;
  Vec r =
      square - n * 1.38671875f;  // 2 ln 2 in two parts, the first short enough for an exact product
  r = r + n * 4.2438888e-4f + lost_of_square(t, square);
  Vec e = splat(2.1691245e-05f);  // (e^(-r/2) - 1) / r for |r| <= ln 2
  e = e * r + -2.6147417e-04f;
  e = e * r + 2.6042012e-03f;
  e = e * r + -2.0833174e-02f;
  e = e * r + 1.2499999e-01f;
  e = e * r + -0.5f;
  return {e * r, (VecI)shifted << 23};  // what magic has above n is shifted out
}

inline Normal normal(Vec x) {
  const Vec farthest = splat(13.1f), zero = Vec{};
  const Vec t = abs(x), near = min(farthest, t),
            square = near * near;  // in this order a NaN passes
  const HalfSquareExp exponential = exp_of_half_square(near, square);
  Vec p = splat(2.3939071e-02f);
  p = p * near + 1.4204402e-01f;
  p = p * near + 3.9735094e-01f;
  p = p * near + 4.9981076e-01f;
  Vec q = splat(6.0008205e-02f);
  q = q * near + 3.5596618e-01f;
  q = q * near + 1.057682f;
  q = q * near + 1.59069f;
  q = q * near + 1.f;
  // p + p·excess: one rounding less than p · (1 + excess).
  Vec tail = exponential.scale(p * exponential.excess + p) / q;
  tail = select(t > farthest, zero, tail);
  Vec c = splat(9.423524e-05f);
  c = c * square + -1.1693537e-03f;
  c = c * square + 9.967197e-03f;
  c = c * square + -6.6489585e-02f;
  c = c * square + 3.9894226e-01f;
  const Vec outer = select((VecI)x < 0, tail, 1.f - tail);
  const Vec density = exponential.scale(exponential.excess * 0.39894228040f + 0.39894228040f);
  return {select(t > farthest, zero, density), select(t < 1.f, c * x + 0.5f, outer)};
}

}  // namespace
