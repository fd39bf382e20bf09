// SGD with momentum, weight decay and Nesterov's variant, in one pass; the arithmetic is that of
// torch.optim.sgd._single_tensor_sgd, operation by operation (see adam.cpp on rounding).
#include "api.h"
#include "multi_tensor.h"
#include "simd.h"

namespace {

struct SgdRates {
  float minus_lr, momentum, gradient_share, weight_decay;
  bool decay, nesterov;
};

// Without momentum `buffer` is null. A buffer exists already: stock makes it from the first
// gradient.
template <bool with_momentum>
inline void update(float* param, const float* grad, float* buffer, SgdRates rates, int n) {
  const bool whole = n == kWidth;
  const Vec before = whole ? load(param) : load_part(param, n);
  Vec direction = whole ? load(grad) : load_part(grad, n);
  if (rates.decay) direction = fused_multiply_add(before, splat(rates.weight_decay), direction);
  if (with_momentum) {
    Vec average = (whole ? load(buffer) : load_part(buffer, n)) * rates.momentum;
    average = fused_multiply_add(direction, splat(rates.gradient_share), average);
    whole ? store(buffer, average) : store_part(buffer, average, n);
    direction =
        rates.nesterov ? fused_multiply_add(average, splat(rates.momentum), direction) : average;
  }
  const Vec after = fused_multiply_add(direction, splat(rates.minus_lr), before);
  whole ? store(param, after) : store_part(param, after, n);
}

template <bool with_momentum>
void update_block(float* param, const float* grad, float* buffer, int64_t size, SgdRates rates) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth)
    update<with_momentum>(param + i, grad + i, with_momentum ? buffer + i : nullptr, rates, kWidth);
  if (i < size)
    update<with_momentum>(param + i, grad + i, with_momentum ? buffer + i : nullptr, rates,
                          (int)(size - i));
}

}  // namespace

void KERNEL(sgd)(int64_t count, const int64_t* sizes, float* const* params,
                 const float* const* grads, float* const* buffers, double lr, double momentum,
                 double dampening, double weight_decay, int64_t nesterov, Scratch* scratch) {
  const SgdRates rates = {(float)-lr,          (float)momentum,   (float)(1 - dampening),
                          (float)weight_decay, weight_decay != 0, nesterov != 0};
  Arena arena(scratch);
  const Blocks blocks(arena, count, sizes);
  if (!arena.enough()) return;
  for_each_block(blocks, [&](int64_t, int64_t t, int64_t begin, int64_t end) {
    const FlushDenormals mode(true);
    if (buffers)
      update_block<true>(params[t] + begin, grads[t] + begin, buffers[t] + begin, end - begin,
                         rates);
    else
      update_block<false>(params[t] + begin, grads[t] + begin, nullptr, end - begin, rates);
  });
}
