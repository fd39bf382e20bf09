// LayerNorm of one row, forward and backward, for every operator that ends in one.
//
// A row is read from memory once and stays in the first-level cache for the passes over it: one for
// the sum, one for the squared distances from the mean (never E[x²] - E[x]², which cancels), one to
// normalise.
#pragma once

#include <cmath>

#include "columns.h"

namespace {

struct Moments {
  float mean, rstd;
};

inline float row_sum(const float* x, int64_t cols) {
  Vec sums[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY { sums[j] += part.load(x + c); });
  return sum_of_chains(sums);
}

inline Moments moments(const float* x, int64_t cols, float total, float eps) {
  const float mean = total / (float)cols;
  Vec squares[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    const Vec distance = part.only(part.load(x + c) - mean);
    squares[j] += distance * distance;
  });
  const float variance = sum_of_chains(squares) / (float)cols;
  return {mean, 1.f / std::sqrt(variance + eps)};
}

// weight or bias may be null. out may be x.
template <bool kDropout = false>
inline void normalise_row(const float* x, Moments m, const float* weight, const float* bias,
                          float* out, int64_t cols, RowKey key = {},
                          DropoutRate rate = DropoutRate(0.f)) {
  for_columns_dropped<kDropout>(cols, key, rate,
                                [&](int64_t c, int, auto part, Vec factor) INLINE_BODY {
                                  Vec y = (part.load(x + c) - m.mean) * m.rstd;
                                  if (weight) y *= part.load(weight + c);
                                  if (bias) y += part.load(bias + c);
                                  part.store(out + c, y * factor);
                                });
}

// What a backward row adds to, one row of sums each; never null.
struct NormSums {
  float *weight, *beta, *bias;
};

// grad_x of one row, plus `also` (the gradient that reached x by another way, or null); grad_weight
// and grad_beta are added up on the way. grad_x may be grad. With x̂ = (x - mean)·rstd and g =
// grad·weight: grad_x = rstd·(g - mean(g) - x̂·mean(g·x̂)). With dropout, grad_y (of what was dropped
// before it became part of x) is grad_x · factors.
template <bool kDropout>
inline void norm_backward_row(const float* grad, const float* x, Moments m, const float* weight,
                              const float* also, float* grad_x, float* grad_y, NormSums add,
                              int64_t cols, RowKey key = {}, DropoutRate rate = DropoutRate(0.f)) {
  Vec sums[kChains] = {}, products[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    Vec g = part.load(grad + c);
    const Vec normed = (part.load(x + c) - m.mean) * m.rstd;
    part.store(add.weight + c, part.load(add.weight + c) + g * normed);
    part.store(add.beta + c, part.load(add.beta + c) + g);
    if (weight) g *= part.load(weight + c);
    sums[j] += g;
    products[j] += g * normed;
  });
  const float mean_g = sum_of_chains(sums) / (float)cols;
  const float mean_product = sum_of_chains(products) / (float)cols;
  for_columns_dropped<kDropout>(
      cols, key, rate, [&](int64_t c, int, auto part, Vec factor) INLINE_BODY {
        Vec g = part.load(grad + c);
        if (weight) g *= part.load(weight + c);
        const Vec normed = (part.load(x + c) - m.mean) * m.rstd;
        Vec result = (g - mean_g - normed * mean_product) * m.rstd;
        if (also) result += part.load(also + c);
        part.store(grad_x + c, result);
        if (kDropout) part.store(grad_y + c, result * factor);
        part.store(add.bias + c, part.load(add.bias + c) + result * factor);
      });
}

}  // namespace
