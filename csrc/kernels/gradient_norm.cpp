// The sum of squares of all gradients, and their scaling in place: the two halves of
// clip_grad_norm_.
#include "api.h"
#include "multi_tensor.h"
#include "simd.h"

namespace {

// In double, where the square of a float is exact and neither over- nor underflows.
double sum_of_squares(const float* x, int64_t size) {
  // Four sums, because a double addition takes 4 cycles and one can start every cycle.
  constexpr int kSums = 4;
  Doubles sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kDoubles <= size; i += kSums * kDoubles)
    for (int j = 0; j < kSums; j++) {
      const Doubles wide = load_wide(x + i + j * kDoubles);
      sums[j] += wide * wide;
    }
  const Doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (int lane = 0; lane < kDoubles; lane++) total += sum[lane];
  for (; i < size; i++) total += (double)x[i] * x[i];
  return total;
}

void scale(float* x, int64_t size, float factor) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(x + i, load(x + i) * factor);
  if (i < size) store_part(x + i, load_part(x + i, (int)(size - i)) * factor, (int)(size - i));
}

}  // namespace

void KERNEL(sum_of_squares)(int64_t count, const int64_t* sizes, const float* const* grads,
                            double* result, Scratch* scratch) {
  Arena arena(scratch);
  const Blocks blocks(arena, count, sizes);
  double* const parts = arena.take<double>(blocks.total);
  if (!arena.enough()) return;
  for_each_block(blocks, [&](int64_t block, int64_t t, int64_t begin, int64_t end) {
    parts[block] = sum_of_squares(grads[t] + begin, end - begin);
  });
  double total = 0;  // in the order of the blocks, whichever thread computed them
  for (int64_t block = 0; block < blocks.total; block++) total += parts[block];
  *result = total;
}

void KERNEL(scale)(int64_t count, const int64_t* sizes, float* const* grads, float factor,
                   Scratch* scratch) {
  Arena arena(scratch);
  const Blocks blocks(arena, count, sizes);
  if (!arena.enough()) return;
  for_each_block(blocks, [&](int64_t, int64_t t, int64_t begin, int64_t end) {
    scale(grads[t] + begin, end - begin, factor);
  });
}
