// LayerNorm, alone and together with what comes before it: bias, dropout and the residual sum.
#include "layer_norm.h"

#include "api.h"

namespace {

// z = residual + (y + bias)·factors; returns the row's sum. z may be y.
template <bool kBias, bool kDropout>
float join_row(const float* y, const float* bias, const float* residual, float* z, int64_t cols,
               RowKey key, DropoutRate rate) {
  Vec sums[kChains] = {};
  for_columns_dropped<kDropout>(cols, key, rate,
                                [&](int64_t c, int j, auto part, Vec factor) INLINE_BODY {
                                  Vec v = part.load(y + c);
                                  if (kBias) v += part.load(bias + c);
                                  v = part.load(residual + c) + v * factor;
                                  part.store(z + c, v);
                                  sums[j] += v;
                                });
  return sum_of_chains(sums);
}

// Everything that the backward of some rows reads and writes; Z is float, or Bf16 for x̂.
template <class Z>
struct Backward {
  const float* grad_out;
  const Z* z;
  const float *mean, *rstd, *weight, *grad_sum;
  float *grad_z, *grad_y;
  int64_t cols;
  DropoutRate rate;
  uint64_t key;

  template <int kRows, bool kDropout, bool kBias>
  void rows(int64_t first, NormSums add) const {
    Moments moments[kRows];
    GradMeans means[kRows];
    for (int r = 0; r < kRows; r++) moments[r] = {mean[first + r], rstd[first + r]};
    const int64_t start = first * cols;
    grad_means<kRows>(grad_out + start, z + start, moments, weight, add, cols, means);
    for (int r = 0; r < kRows; r++) {
      const int64_t at = start + r * cols;
      norm_grad_row<kDropout, kBias>(
          grad_out + at, z + at, moments[r], means[r], weight, grad_sum ? grad_sum + at : nullptr,
          grad_z + at, grad_y ? grad_y + at : nullptr, add, cols, row_key(key, first + r), rate);
    }
  }

  template <bool kDropout, bool kBias>
  void chunk(int64_t first, int64_t last, NormSums add) const {
    int64_t r = first;
    for (; r + kRowsTogether <= last; r += kRowsTogether)
      rows<kRowsTogether, kDropout, kBias>(r, add);
    for (; r < last; r++) rows<1, kDropout, kBias>(r, add);
  }

  void chunk(int64_t first, int64_t last, NormSums add, bool bias) const {
    if (rate.threshold)
      bias ? chunk<true, true>(first, last, add) : chunk<true, false>(first, last, add);
    else
      bias ? chunk<false, true>(first, last, add) : chunk<false, false>(first, last, add);
  }
};

}  // namespace

void KERNEL(layer_norm)(const float* x, const float* weight, const float* bias, float* out,
                        void* kept, float* mean, float* rstd, int64_t rows, int64_t cols,
                        float eps) {
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) {
    const float* row = x + r * cols;
    const Moments m = moments(row, cols, row_sum(row, cols), eps, row + cols);
    mean[r] = m.mean;
    rstd[r] = m.rstd;
    normalise_row(row, m, weight, bias, out + r * cols, cols, {}, DropoutRate(0.f),
                  kept ? (Bf16*)kept + r * cols : nullptr);
  }
}

void KERNEL(residual_norm)(const float* y, const float* bias, const float* residual,
                           const float* weight, const float* beta, float* z, void* kept, float* out,
                           float* mean, float* rstd, int64_t rows, int64_t cols, float eps, float p,
                           uint64_t key) {
  const DropoutRate rate(p);
  const auto join = bias ? (p > 0 ? join_row<true, true> : join_row<true, false>)
                         : (p > 0 ? join_row<false, true> : join_row<false, false>);
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = r * cols;
    float* const row = kept ? out + at : z + at;  // the sum, which is then normalised
    const float total = join(y + at, bias, residual + at, row, cols, row_key(key, r), rate);
    const Moments m = moments(row, cols, total, eps, residual + at + cols);
    mean[r] = m.mean;
    rstd[r] = m.rstd;
    normalise_row(row, m, weight, beta, out + at, cols, {}, DropoutRate(0.f),
                  kept ? (Bf16*)kept + at : nullptr);
  }
}

void KERNEL(norm_backward)(const float* grad_out, const void* z, int64_t bf16, const float* mean,
                           const float* rstd, const float* weight, const float* grad_sum,
                           float* grad_z, float* grad_y, float* grad_weight, float* grad_beta,
                           float* grad_bias, int64_t rows, int64_t cols, float p, uint64_t key,
                           Scratch* scratch) {
  const RowChunks chunks(rows);
  Arena arena(scratch);
  const ColumnSums sums(arena, chunks, 4, cols);
  if (!arena.enough()) return;
  if (!weight && rows > 0) {
    float* ones = sums.row(0, 3);
    for (int64_t c = 0; c < cols; c++) ones[c] = 1.f;
    weight = ones;
  }
  const DropoutRate rate(p);
  const Backward<float> of_floats = {grad_out, (const float*)z, mean, rstd, weight, grad_sum,
                                     grad_z,   grad_y,          cols, rate, key};
  const Backward<Bf16> of_bf16 = {grad_out, (const Bf16*)z, mean, rstd, weight, grad_sum,
                                  grad_z,   grad_y,         cols, rate, key};
#pragma omp parallel if (rows * cols > kFewElements)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks.count; chunk++) {
      const NormSums add = {sums.row(chunk, 0), sums.row(chunk, 1), sums.row(chunk, 2)};
      sums.clear(chunk, 3);
      const int64_t first = chunks.first(chunk), last = chunks.last(chunk);
      bf16 ? of_bf16.chunk(first, last, add, grad_bias)
           : of_floats.chunk(first, last, add, grad_bias);
    }
    sums.total(0, grad_weight);
    sums.total(1, grad_beta);
    sums.total(2, grad_bias);
  }
}
