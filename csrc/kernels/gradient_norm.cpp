// The sum of squares of all gradients, and their scaling in place: the two halves of
// clip_grad_norm_.
#include "api.h"
#include "multi_tensor.h"

namespace {

typedef double VecD
    __attribute__((vector_size(kWidth * 8)));  // as many doubles as a Vec has floats

// In double, where the square of a float is exact and neither over- nor underflows.
double sum_of_squares(const float* x, int64_t size) {
  // Four sums, because a double addition takes 4 cycles and one can start every cycle.
  VecD sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth)
    for (int j = 0; j < 4; j++) {
      const VecD wide = __builtin_convertvector(load(x + i + j * kWidth), VecD);
      sums[j] += wide * wide;
    }
  for (; i < size; i += kWidth) {
    const int64_t left = size - i;
    const VecD wide =
        __builtin_convertvector(left >= kWidth ? load(x + i) : load_part(x + i, (int)left), VecD);
    sums[0] += wide * wide;
  }
  const VecD sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (int lane = 0; lane < kWidth; lane++) total += sum[lane];
  return total;
}

void scale(float* x, int64_t size, float factor) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(x + i, load(x + i) * factor);
  if (i < size) store_part(x + i, load_part(x + i, (int)(size - i)) * factor, (int)(size - i));
}

}  // namespace

void KERNEL(sum_of_squares)(int64_t count, const int64_t* sizes, const float* const* grads,
                            double* result) {
  const Blocks blocks(count, sizes);
  double* parts = static_cast<double*>(malloc(blocks.total() * sizeof(double)));
  for_each_block(blocks, [&](int64_t block, int64_t t, int64_t begin, int64_t end) {
    parts[block] = sum_of_squares(grads[t] + begin, end - begin);
  });
  double total = 0;  // in the order of the blocks, whoever computed them
  for (int64_t block = 0; block < blocks.total(); block++) total += parts[block];
  free(parts);
  *result = total;
}

void KERNEL(scale)(int64_t count, const int64_t* sizes, float* const* grads, float factor) {
  for_each_block(Blocks(count, sizes), [&](int64_t, int64_t t, int64_t begin, int64_t end) {
    scale(grads[t] + begin, end - begin, factor);
  });
}
