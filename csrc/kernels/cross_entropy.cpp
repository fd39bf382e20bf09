// The loss of each row of logits against its label, and the logits' gradient in their place.
#include "api.h"
#include "columns.h"
#include "tanh.h"

namespace {

// What the model makes of its logits before the loss: after · tanh(before · z), or before · z.
struct Capping {
  float before, after;
  bool tanh;
  bool is_nothing() const { return !tanh && before == 1.f; }
};

// Puts the capped logits in the place of the row; their sum and the largest.
template <bool kTanh>
void cap_row(float* z, int64_t cols, Capping capping, float* total, float* largest) {
  Vec sums[kChains] = {}, most = splat(-__builtin_inff());
  const bool as_it_is = capping.is_nothing();
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    Vec v = part.load(z + c);
    if (!as_it_is) {
      v = v * capping.before;
      if (kTanh) v = capping.after * tanh_of(v);
      part.store(z + c, v);
    }
    sums[j] += v;
    most = max(part.padded(v, -__builtin_inff()), most);
  });
  *total = sum_of_chains(sums);
  *largest = max_lane(most);
}

float sum_of_exponentials(const float* z, int64_t cols, float largest) {
  Vec sums[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part)
                        INLINE_BODY { sums[j] += part.only(exp(part.load(z + c) - largest)); });
  return sum_of_chains(sums);
}

// z becomes grad · slope · (softmax - smoothing / cols); the label's own part comes afterwards.
template <bool kTanh>
void gradient_row(float* z, int64_t cols, Capping capping, float largest, float log_sum, float even,
                  float grad) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    const Vec v = part.load(z + c);
    Vec g = (exp(v - largest - log_sum) - even) * grad;
    if (kTanh) {
      const Vec t = v * (1.f / capping.after);
      g = g * (1.f - t * t);
    }
    part.store(z + c, g);
  });
}

template <bool kTanh>
void loss_row(float* z, int64_t cols, int64_t label, Capping capping, float smoothing, float* loss,
              const float* grad) {
  float total, largest;
  cap_row<kTanh>(z, cols, capping, &total, &largest);
  const float log_sum = __builtin_logf(sum_of_exponentials(z, cols, largest));  // of z - largest
  const float chosen = z[label], even = smoothing / cols;
  *loss = log_sum + (1.f - smoothing) * (largest - chosen);
  if (smoothing > 0.f) *loss += smoothing * (largest - total / cols);
  if (!grad) return;
  const float slope = *grad * capping.before * (kTanh ? capping.after : 1.f);
  gradient_row<kTanh>(z, cols, capping, largest, log_sum, even, slope);
  const float t = kTanh ? chosen / capping.after : 0.f;
  z[label] -= (1.f - smoothing) * slope * (1.f - t * t);
}

}  // namespace

void KERNEL(cross_entropy)(float* z, int64_t stride, const int64_t* labels, const float* grads,
                           float* losses, int64_t rows, int64_t cols, float before, float after,
                           int64_t tanh, float smoothing) {
  const Capping capping = {before, after, tanh != 0};
  const auto loss_of = tanh ? loss_row<true> : loss_row<false>;
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements / 4)
  for (int64_t r = 0; r < rows; r++)
    loss_of(z + r * stride, cols, labels[r], capping, smoothing, losses + r,
            grads ? grads + r : nullptr);
}
