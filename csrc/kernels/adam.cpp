// Adam and AdamW: every parameter, its gradient and both moments are read once and written once.
//
// The arithmetic is that of torch.optim.adam._single_tensor_adam, operation by operation, so that a
// step rounds as stock's does: CMakeLists.txt switches the contraction of a*b+c off, and what stock
// fuses is fused here by name.
#include <cmath>

#include "api.h"
#include "multi_tensor.h"
#include "simd.h"

namespace {

struct AdamRates {  // the same for every tensor of a group
  float weight_decay, shrink, one_minus_beta1, beta2, one_minus_beta2, eps;
  bool decoupled;
};

struct AdamCorrections {  // by a tensor's own step count
  float minus_step_size, sqrt_correction2;
};

// By squaring: libm's pow is of glibc 2.29, newer than some systems that torch's wheels run on.
double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2) result *= base;
  return result;
}

AdamCorrections corrections_at(float step, double lr, double beta1, double beta2) {
  const double correction1 = 1 - power(beta1, (int64_t)step);
  const double correction2 = 1 - power(beta2, (int64_t)step);
  return {(float)-(lr / correction1), (float)std::sqrt(correction2)};
}

struct Element {
  Vec param, grad, average, square;
};

inline Element update(Element x, const AdamRates& rates, const AdamCorrections& at) {
  if (rates.decoupled)
    x.param = x.param * rates.shrink;
  else
    x.grad = fused_multiply_add(x.param, splat(rates.weight_decay), x.grad);
  // torch.lerp starts from whichever end is nearer.
  const Vec difference = x.grad - x.average;
  x.average = rates.one_minus_beta1 < 0.5f
                  ? fused_multiply_add(splat(rates.one_minus_beta1), difference, x.average)
                  : fused_multiply_add(splat(rates.one_minus_beta1 - 1), difference, x.grad);
  x.square = fused_multiply_add(rates.one_minus_beta2 * x.grad, x.grad, x.square * rates.beta2);
  const Vec denominator = sqrt(x.square) / at.sqrt_correction2 + rates.eps;
  x.param = x.param + (at.minus_step_size * x.average) / denominator;
  return x;
}

struct Pointers {
  float* param;
  const float* grad;
  float *average, *square;
};

// Rates come by value: behind a reference, the stores could change them and each would be read
// again.
inline void update_block(Pointers at, int64_t begin, int64_t end, AdamRates rates,
                         AdamCorrections corrections) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) {
    const Element x =
        update({load(at.param + i), load(at.grad + i), load(at.average + i), load(at.square + i)},
               rates, corrections);
    store(at.param + i, x.param);
    store(at.average + i, x.average);
    store(at.square + i, x.square);
  }
  if (i == end) return;
  const int n = (int)(end - i);
  const Element x = update({load_part(at.param + i, n), load_part(at.grad + i, n),
                            load_part(at.average + i, n), load_part(at.square + i, n)},
                           rates, corrections);
  store_part(at.param + i, x.param, n);
  store_part(at.average + i, x.average, n);
  store_part(at.square + i, x.square, n);
}

}  // namespace

void KERNEL(adam)(int64_t count, const int64_t* sizes, float* const* params,
                  const float* const* grads, float* const* averages, float* const* squares,
                  float* const* steps, double lr, double beta1, double beta2, double eps,
                  double weight_decay, int64_t decoupled, Scratch* scratch) {
  Arena arena(scratch);
  const Blocks blocks(arena, count, sizes);
  AdamCorrections* const corrections = arena.take<AdamCorrections>(count);
  if (!arena.enough()) return;
  // Without weight decay both kinds are one: the parameter is multiplied by 1.
  const AdamRates rates = {(float)weight_decay,
                           (float)(1 - lr * weight_decay),
                           (float)(1 - beta1),
                           (float)beta2,
                           (float)(1 - beta2),
                           (float)eps,
                           decoupled || weight_decay == 0};
  for (int64_t t = 0; t < count; t++) {
    *steps[t] += 1;
    corrections[t] = t > 0 && *steps[t] == *steps[t - 1]
                         ? corrections[t - 1]
                         : corrections_at(*steps[t], lr, beta1, beta2);
  }
  // The root of a flushed square is below 4e-18: with any usual eps it is lost in the denominator's
  // sum.
  const bool flush = eps >= 1e-10;
  for_each_block(blocks, [&](int64_t, int64_t t, int64_t begin, int64_t end) {
    const FlushDenormals mode(flush);
    update_block({params[t], grads[t], averages[t], squares[t]}, begin, end, rates, corrections[t]);
  });
}
