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

// Of d = z - largest: the sums of e^d and, if wanted, of d·e^d and e^2d.
struct Sums {
  float plain, times_d, squares;
};

template <bool kAll>
Sums sum_exponentials(const float* z, int64_t cols, float largest) {
  Vec plain[kChains] = {}, times_d[kChains] = {}, squares[kChains] = {};
  for_columns(cols, [&](int64_t c, int j, auto part) INLINE_BODY {
    const Vec d = part.load(z + c) - largest, e = part.only(exp(d));
    plain[j] += e;
    if (kAll) times_d[j] += e * d, squares[j] += e * e;
  });
  if (!kAll) return {sum_of_chains(plain), 0.f, 0.f};
  return {sum_of_chains(plain), sum_of_chains(times_d), sum_of_chains(squares)};
}

// What the gradient of a row takes. The slopes are the gradients of loss and entropy, times what
// capping does.
struct Row {
  float largest, log_sum, even, entropy;
  float slope, entropy_slope;
};

// z becomes slope · (softmax - even) - entropy_slope · softmax · (log softmax + entropy), through
// the cap; the label's own part comes afterwards.
template <bool kTanh>
void gradient_row(float* z, int64_t cols, Capping capping, Row row) {
  const bool of_entropy = row.entropy_slope != 0.f;
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    const Vec v = part.load(z + c), log_p = v - row.largest - row.log_sum, p = exp(log_p);
    Vec g = (p - row.even) * row.slope;
    if (of_entropy) g = g - p * (log_p + row.entropy) * row.entropy_slope;
    if (kTanh) {
      const Vec t = v * (1.f / capping.after);
      g = g * (1.f - t * t);
    }
    part.store(z + c, g);
  });
}

// Whether no logit is larger than the label's, and none before it as large.
bool is_top(const float* z, int64_t label, float largest) {
  bool found = z[label] >= largest;
  for (int64_t c = 0; found && c < label; c++) found = z[c] < largest;
  return found;
}

void describe_row(const float* z, int64_t cols, int64_t label, float total, float largest,
                  Sums sums, float* about) {
  const float log_sum = __builtin_logf(sums.plain);
  about[0] = log_sum - sums.times_d / sums.plain;
  about[1] = __builtin_logf(sums.squares) - 2.f * log_sum;
  about[2] = total / cols;
  about[3] = is_top(z, label, largest);
}

template <bool kTanh>
void loss_row(float* z, int64_t cols, int64_t label, Capping capping, float smoothing, float* loss,
              float* about, const float* grad, const float* entropy_grad) {
  float total, largest;
  cap_row<kTanh>(z, cols, capping, &total, &largest);
  const bool all = about || entropy_grad;
  const Sums sums =
      all ? sum_exponentials<true>(z, cols, largest) : sum_exponentials<false>(z, cols, largest);
  const float log_sum = __builtin_logf(sums.plain);  // of z - largest
  const float chosen = z[label];
  *loss = log_sum + (1.f - smoothing) * (largest - chosen);
  if (smoothing > 0.f) *loss += smoothing * (largest - total / cols);
  if (about) describe_row(z, cols, label, total, largest, sums, about);
  if (!grad) return;
  const float slope = capping.before * (kTanh ? capping.after : 1.f);
  const Row row = {largest,          log_sum,
                   smoothing / cols, log_sum - sums.times_d / sums.plain,
                   *grad * slope,    entropy_grad ? *entropy_grad * slope : 0.f};
  gradient_row<kTanh>(z, cols, capping, row);
  const float t = kTanh ? chosen / capping.after : 0.f;
  z[label] -= (1.f - smoothing) * row.slope * (1.f - t * t);
}

}  // namespace

void KERNEL(cross_entropy)(float* z, int64_t stride, const int64_t* labels, const float* grads,
                           const float* entropy_grads, float* losses, float* about, int64_t rows,
                           int64_t cols, float before, float after, int64_t tanh, float smoothing) {
  const Capping capping = {before, after, tanh != 0};
  const auto loss_of = tanh ? loss_row<true> : loss_row<false>;
#pragma omp parallel for schedule(static) if (rows * cols > kFewElements / 4)
  for (int64_t r = 0; r < rows; r++)
    loss_of(z + r * stride, cols, labels[r], capping, smoothing, losses + r,
            about ? about + 4 * r : nullptr, grads ? grads + r : nullptr,
            entropy_grads ? entropy_grads + r : nullptr);
}
