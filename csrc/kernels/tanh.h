// The hyperbolic tangent, for caps of logits and of scores.
#pragma once

#include "simd.h"

namespace {

// tanh to 1 – 2 units in the last place: a polynomial (Cephes) where 1 - e^-2|x| would cancel.
inline Vec tanh_of(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec small = x + x * square * p;
  const Vec e = exp(-2.f * abs(x));
  const Vec large = (1.f - e) / (1.f + e);
  return select(abs(x) < 0.625f, small, select(x < 0.f, -large, large));
}

}  // namespace
