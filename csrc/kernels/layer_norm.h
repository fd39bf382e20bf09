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

// Meanwhile the row at `next` is fetched.
inline Moments moments(const float* x, int64_t cols, float total, float eps, const float* next) {
  const float mean = total / (float)cols;
  Vec squares[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    fetch(next + c);
    const Vec distance = part.only(part.load(x + c) - mean);
    squares[j] += distance * distance;
  });
  const float variance = sum_of_chains(squares) / (float)cols;
  return {mean, 1.f / std::sqrt(variance + eps)};
}

// weight or bias may be null. out may be x. kept (or null) receives x̂ = (x - mean)·rstd.
template <bool kDropout = false>
inline void normalise_row(const float* x, Moments m, const float* weight, const float* bias,
                          float* out, int64_t cols, RowKey key = {},
                          DropoutRate rate = DropoutRate(0.f), Bf16* kept = nullptr) {
  for_columns_dropped<kDropout>(cols, key, rate,
                                [&](int64_t c, int, auto part, Vec factor) INLINE_BODY {
                                  fetch_to_write(out + cols + c);
                                  Vec y = (part.load(x + c) - m.mean) * m.rstd;
                                  if (kept) {
                                    fetch_to_write(kept + cols + c);
                                    part.store(kept + c, y);
                                  }
                                  if (weight) y *= part.load(weight + c);
                                  if (bias) y += part.load(bias + c);
                                  part.store(out + c, y * factor);
                                });
}

// x̂ from what the forward kept: x itself, or x̂ as bf16.
template <class Part>
INLINE_BODY inline Vec normed(const Part& part, const float* x, Moments m) {
  return (part.load(x) - m.mean) * m.rstd;
}
template <class Part>
INLINE_BODY inline Vec normed(const Part& part, const Bf16* x, Moments) {
  return part.load(x);
}

// What the backward of a row adds to, one row of sums each.
struct NormSums {
  float *weight, *beta, *bias;
};

// mean(g) and mean(g·x̂) of the gradient's formula, where g = grad·weight.
struct GradMeans {
  float g, product;
};

// Four rows' inputs and outputs would leave a 32 KB cache at 768 columns.
constexpr int kRowsTogether = 2;

// The first pass of the backward, over kRows rows at once (cols apart): what is added up over the
// rows is loaded and stored once for all of them, and one row's sums need not wait for another's.
template <int kRows, class X>
inline void grad_means(const float* grad, const X* x, const Moments* m, const float* weight,
                       NormSums add, int64_t cols, GradMeans* means) {
  constexpr int kEach = kChains / kRows;  // chains of sums for each row
  Vec sums[kRows][kEach] = {}, products[kRows][kEach] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    Vec for_weight = part.load(add.weight + c), for_beta = part.load(add.beta + c);
    const Vec w = part.load(weight + c);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const Vec g = part.load(grad + r * cols + c);
      const Vec product = g * normed(part, x + r * cols + c, m[r]);
      for_weight += product;
      for_beta += g;
      sums[r][j % kEach] += g * w;
      products[r][j % kEach] += product * w;
    }
    part.store(add.weight + c, for_weight);
    part.store(add.beta + c, for_beta);
  });
  for (int r = 0; r < kRows; r++) {
    Vec all = sums[r][0], all_products = products[r][0];
    for (int k = 1; k < kEach; k++) all += sums[r][k], all_products += products[r][k];
    means[r] = {sum(all) / (float)cols, sum(all_products) / (float)cols};
  }
}

// The second pass: grad_x = rstd·(g - mean(g) - x̂·mean(g·x̂)) + also (the gradient that reached x by
// another way, or null). grad_x may be grad. With dropout, grad_y (of what was dropped before it
// became part of x) is grad_x · factors; kBias adds that up, too.
template <bool kDropout, bool kBias, class X>
inline void norm_grad_row(const float* grad, const X* x, Moments m, GradMeans means,
                          const float* weight, const float* also, float* grad_x, float* grad_y,
                          NormSums add, int64_t cols, RowKey key = {},
                          DropoutRate rate = DropoutRate(0.f)) {
  // Over one column the gradient is exactly 0, which a rounding error times a huge rstd would hide.
  const float rstd = cols > 1 ? m.rstd : 0.f;
  const float slope = -rstd * means.product, start = -rstd * means.g;
  for_columns_dropped<kDropout>(cols, key, rate,
                                [&](int64_t c, int, auto part, Vec factor) INLINE_BODY {
                                  fetch(grad + kRowsTogether * cols + c);
                                  fetch(x + kRowsTogether * cols + c);
                                  fetch_to_write(grad_x + cols + c);
                                  const Vec g = part.load(grad + c) * part.load(weight + c);
                                  Vec result = g * rstd + (normed(part, x + c, m) * slope + start);
                                  if (also) result += part.load(also + c);
                                  part.store(grad_x + c, result);
                                  result *= factor;
                                  if (kDropout) {
                                    fetch_to_write(grad_y + cols + c);
                                    part.store(grad_y + c, result);
                                  }
                                  if (kBias)
                                    part.store(add.bias + c, part.load(add.bias + c) + result);
                                });
}

}  // namespace
