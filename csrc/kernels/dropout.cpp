// Dropout: one read, one write, the mask drawn on the way.
#include "api.h"
#include "random.h"

namespace {

void dropout_row(const float* x, float* y, int64_t cols, RowKey key, DropoutRate rate) {
  Vec factors[kDropoutVecs];
  for (int64_t first = 0; first < cols; first += kDropoutBlock) {
    dropout_block(key, rate, first, factors);
    for (int i = 0; i < kDropoutVecs; i++) {
      const int64_t c = first + i * kWidth, left = cols - c;
      if (left >= kWidth)
        store(y + c, load(x + c) * factors[i]);
      else if (left > 0)
        store_part(y + c, load_part(x + c, (int)left) * factors[i], (int)left);
    }
  }
}

}  // namespace

void KERNEL(dropout)(const float* x, float* y, int64_t rows, int64_t cols, float p, uint64_t key) {
  const DropoutRate rate(p);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
  for (int64_t r = 0; r < rows; r++)
    dropout_row(x + r * cols, y + r * cols, cols, row_key(key, r), rate);
}
