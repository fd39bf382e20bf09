// RMSNorm of rows: x · rstd · (offset + weight), where 1 / rstd² is the mean of x² plus eps.
#include <cmath>

#include "api.h"
#include "columns.h"

namespace {

float rstd_of(const float* x, int64_t cols, float eps, const float* next) {
  Vec squares[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    fetch(next + c);
    const Vec v = part.load(x + c);
    squares[j] += v * v;
  });
  return 1.f / std::sqrt(sum_of_chains(squares) / (float)cols + eps);
}

void normalise(const float* x, float rstd, const float* weight, float offset, float* out,
               int64_t cols) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch_to_write(out + cols + c);
    Vec y = part.load(x + c) * rstd;
    if (weight) y *= part.load(weight + c) + offset;
    part.store(out + c, y);
  });
}

// Adds grad · x̂ to the weight's gradient, and returns the mean of grad · (offset + weight) · x̂.
float mean_product(const float* grad, const float* x, float rstd, const float* weight, float offset,
                   float* add_weight, int64_t cols) {
  Vec sums[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    const Vec product = part.load(grad + c) * part.load(x + c) * rstd;
    if (weight) {
      part.store(add_weight + c, part.load(add_weight + c) + product);
      sums[j] += product * (part.load(weight + c) + offset);
    } else {
      sums[j] += product;
    }
  });
  return sum_of_chains(sums) / (float)cols;
}

void gradient(const float* grad, const float* x, float rstd, float mean, const float* weight,
              float offset, float* grad_x, int64_t cols) {
  const float slope = -rstd * rstd * mean;
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(grad + cols + c);
    fetch(x + cols + c);
    fetch_to_write(grad_x + cols + c);
    Vec g = part.load(grad + c) * rstd;
    if (weight) g *= part.load(weight + c) + offset;
    part.store(grad_x + c, g + part.load(x + c) * slope);
  });
}

}  // namespace

void KERNEL(rms_norm)(const float* x, const float* weight, float offset, float* out, float* rstd,
                      int64_t rows, int64_t cols, float eps) {
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) {
    const float* const row = x + r * cols;
    rstd[r] = rstd_of(row, cols, eps, row + cols);
    normalise(row, rstd[r], weight, offset, out + r * cols, cols);
  }
}

void KERNEL(rms_norm_backward)(const float* grad, const float* x, const float* rstd,
                               const float* weight, float offset, float* grad_x, float* grad_weight,
                               int64_t rows, int64_t cols, Scratch* scratch) {
  const RowChunks chunks(rows);
  Arena arena(scratch);
  const ColumnSums sums(arena, chunks, 1, weight ? cols : 0);
  if (!arena.enough()) return;
#pragma omp parallel if (rows * cols > kFewElements)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks.count; chunk++) {
      sums.clear(chunk, 1);
      for (int64_t r = chunks.first(chunk); r < chunks.last(chunk); r++) {
        const int64_t at = r * cols;
        const float mean =
            mean_product(grad + at, x + at, rstd[r], weight, offset, sums.row(chunk, 0), cols);
        gradient(grad + at, x + at, rstd[r], mean, weight, offset, grad_x + at, cols);
      }
    }
    if (weight) sums.total(0, grad_weight);
  }
}
