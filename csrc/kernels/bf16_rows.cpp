// Rows as they are kept in bf16: a product's result with its bias, and floats again.
#include "api.h"
#include "columns.h"

namespace {

template <bool kBias>
void round_row(const float* x, const float* bias, Bf16* out, int64_t cols) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    const Vec v = part.load(x + c);
    part.store(out + c, kBias ? v + part.load(bias + c) : v);
  });
}

void read_row(const Bf16* kept, const float* factor, const float* offset, float* out,
              int64_t cols) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(kept + cols + c);
    fetch_to_write(out + cols + c);
    part.store(out + c, part.load(kept + c) * part.load(factor + c) + part.load(offset + c));
  });
}

}  // namespace

void KERNEL(round_to_bf16)(const float* x, const float* bias, void* out, int64_t rows,
                           int64_t cols) {
  const auto round = bias ? round_row<true> : round_row<false>;
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++) round(x + r * cols, bias, (Bf16*)out + r * cols, cols);
}

void KERNEL(read_bf16)(const void* kept, const float* factor, const float* offset, float* out,
                       int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements)
  for (int64_t r = 0; r < rows; r++)
    read_row((const Bf16*)kept + r * cols, factor, offset, out + r * cols, cols);
}
