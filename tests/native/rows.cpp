// Kernels that work row by row: dropout, activations, bf16, LayerNorm, losses.
#include "layer_norm.h"

namespace {

void dropout(Random& random, int64_t rows, int64_t cols) {
  const float p = random.pick({0.f, 0.1f, 0.5f, 1.f});
  const uint64_t key = random.bits();
  describe("dropout", rows, cols, p);
  Floats x(random, rows * cols);
  const double scale = p < 1 ? 65536. / (65536 - std::lrint(p * 65536.0)) : 0;
  on_every_isa(0, [&](Same& same) {
    Floats y(rows * cols), in_place(rows * cols);
    in_place.copy(x);
    CALL(dropout, x, y, rows, cols, p, key);
    CALL(dropout, in_place, in_place, rows, cols, p, key);
    for (int64_t i = 0; i < y.size(); i++)
      expect((y[i] == 0 || near(y[i], x[i] * scale, 1e-3, 1)) && y[i] == in_place[i], "dropout");
    same.check(y);
  });
}

double activated(double x, int64_t kind) {
  switch (kind) {
    case 0:
      return x;
    case 1:
      return x > 0 ? x : 0;
    case 2:
      return x / (1 + std::exp(-x));
    case 3:
      return x * std::erfc(-x / std::sqrt(2.)) / 2;
    default:
      return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
  }
}
double slope(double x, int64_t kind) {
  if (kind == 1) return x > 0;
  return (activated(x + 1e-5, kind) - activated(x - 1e-5, kind)) / 2e-5;
}

void activation(Random& random, int64_t rows, int64_t cols) {
  const int64_t kind = random.below(5), n = rows * cols;
  const bool has_bias = random.coin(), keeps = random.coin(), wants_value = random.coin();
  describe("activation", rows, cols, kind, has_bias, keeps, wants_value);
  Floats h(random, n), bias(random, cols), grad(random, n);
  on_every_isa(1e-5, [&](Same& same) {
    Floats out(n), grad_h(n), value(n), grad_bias(cols);
    Guarded<uint16_t> kept(n);
    CALL(activation, h, bias.if_wanted(has_bias), out, kept.if_wanted(keeps), rows, cols, kind);
    const auto backward = [&](Scratch* scratch) {
      CALL(activation_backward, grad, keeps ? (const void*)kept.data() : h.data(), keeps,
           bias.if_wanted(has_bias), grad_h, value.if_wanted(wants_value),
           grad_bias.if_wanted(has_bias), rows, cols, kind, scratch);
    };
    with_scratch(backward);
    std::vector<double> sums(cols);
    for (int64_t i = 0; i < n; i++) {
      const double b = has_bias ? bias[i % cols] : 0;
      expect(near(out[i], activated(h[i] + b, kind), 2e-5), "activation");
      if (keeps) expect(kept[i] == bf16_bits(h[i]), "activation: what is kept");
      const double x = (keeps ? bf16_value(kept[i]) : h[i]) + b;
      expect(near(grad_h[i], grad[i] * slope(x, kind), 1e-4), "gradient of an activation");
      if (wants_value) expect(near(value[i], activated(x, kind), 2e-5), "activation, again");
      sums[i % cols] += grad_h[i];
    }
    for (int64_t c = 0; has_bias && c < cols; c++)
      expect(near(grad_bias[c], sums[c], 1e-4, rows + 1), "gradient of an activation's bias");
    same.check(out), same.check(grad_h);
  });
}

void gated(Random& random, int64_t rows, int64_t cols) {
  const int64_t kind = random.below(5), n = rows * cols;
  const bool wants_value = random.coin();
  describe("gated", n, kind, wants_value);
  Floats gate(random, n), up(random, n), grad(random, n);
  on_every_isa(1e-5, [&](Same& same) {
    Floats out(n), grad_gate(n), grad_up(n), value(n);
    grad_gate.copy(grad);
    CALL(gated, gate, up, out, n, kind);
    CALL(gated_backward, grad_gate, gate, up, grad_gate, grad_up, value.if_wanted(wants_value), n,
         kind);
    for (int64_t i = 0; i < n; i++) {
      const double a = activated(gate[i], kind);
      expect(near(out[i], a * up[i], 2e-5), "gated");
      expect(near(grad_gate[i], grad[i] * up[i] * slope(gate[i], kind), 1e-4), "gate's gradient");
      expect(near(grad_up[i], grad[i] * a, 2e-5), "gradient of what is gated");
      if (wants_value) expect(near(value[i], a * up[i], 2e-5), "gated, again");
    }
    same.check(out), same.check(grad_gate), same.check(grad_up);
  });
}

void bf16(Random& random, int64_t rows, int64_t cols) {
  const bool has_bias = random.coin();
  const int64_t n = rows * cols;
  describe("bf16", rows, cols, has_bias);
  Floats x(random, n), bias(random, cols), factor(random, cols);
  on_every_isa(0, [&](Same& same) {
    Guarded<uint16_t> kept(n);
    Floats out(n);
    CALL(round_to_bf16, x, bias.if_wanted(has_bias), kept, rows, cols);
    CALL(read_bf16, kept, factor, bias, out, rows, cols);
    for (int64_t i = 0; i < n; i++) {
      expect(kept[i] == bf16_bits(has_bias ? x[i] + bias[i % cols] : x[i]), "rounding to bf16");
      const double wide = bf16_value(kept[i]);
      expect(near(out[i], wide * factor[i % cols] + bias[i % cols], 1e-5), "reading bf16");
    }
    (void)same;
  });
}

void int16(Random& random, int64_t rows, int64_t cols) {
  constexpr int64_t kBlock = 64;
  const int64_t n = rows * cols, blocks = (cols + kBlock - 1) / kBlock;
  describe("int16", rows, cols, 0);
  Floats x(random, n);
  on_every_isa(0, [&](Same& same) {
    Guarded<int16_t> kept(rows * blocks * (kBlock + 2));
    Floats out(n);
    CALL(round_to_int16, x, kept, rows, cols);
    CALL(read_int16, kept, out, rows, cols);
    for (int64_t i = 0; i < n; i++) {
      const int64_t row = i / cols * cols, first = row + (i - row) / kBlock * kBlock;
      double largest = 0;
      for (int64_t j = first; j < row + cols && j < first + kBlock; j++)
        largest = std::max(largest, std::fabs((double)x.data()[j]));
      expect(std::fabs((double)out[i] - x[i]) <= largest * (0.505 / 32767) + 1e-30,
             "rounding to 16-bit integers");
    }
    same.check(out);
  });
}

// What is normalised: y itself, or residual + dropout(y + bias).
Doubles normed_values(const Floats& y, const float* bias, const Floats& residual, bool joins,
                      const Doubles& factors, int64_t cols) {
  Doubles z = doubles(y);
  for (int64_t i = 0; joins && i < y.size(); i++)
    z[i] = residual.data()[i] + factors[i] * (z[i] + (bias ? bias[i % cols] : 0));
  return z;
}

// Results and moments; `kept` (or null) has what was normalised, which then takes its place.
void expect_normed(LayerNormFormulas& formulas, const Floats& out, const Floats& mean,
                   const Floats& rstd, const float* weight, const float* beta,
                   const uint16_t* kept) {
  if (!formulas.cols) return;
  expect_near(mean, formulas.mean, 1e-4, 1, "means");
  expect_near(rstd, formulas.rstd, 1e-3, 1, "reciprocals of deviations");
  for (int64_t i = 0; i < out.size(); i++) {
    expect(near(out.data()[i], formulas.out(i, weight, beta), 1e-3), "LayerNorm");
    if (!kept) continue;
    expect(near(bf16_value(kept[i]), formulas.normal[i], 1e-2), "LayerNorm: what is kept");
    formulas.normal[i] = bf16_value(kept[i]);
  }
}

void norm(Random& random, int64_t rows, int64_t cols) {
  const bool has_weight = random.coin(), has_beta = random.coin(), has_bias = random.coin();
  const bool keeps = random.coin(), joins = random.coin(), has_sum = random.coin();
  const float p = joins ? random.pick({0.f, 0.3f}) : 0.f;
  const uint64_t key = random.bits();
  const int64_t n = rows * cols;
  describe("norm", rows, cols, has_weight, has_beta, has_bias, keeps, joins, has_sum, p);
  Floats y(random, n), residual(random, n), bias(random, cols), weight(random, cols);
  Floats beta(random, cols), grad(random, n), also(random, n);
  float *const w = weight.if_wanted(has_weight), *const b = beta.if_wanted(has_beta);
  on_every_isa(1e-3, [&](Same& same) {
    Floats z(n), out(n), mean(rows), rstd(rows);
    Guarded<uint16_t> kept(n);
    if (joins)
      CALL(residual_norm, y, bias.if_wanted(has_bias), residual, w, b, z.if_wanted(!keeps),
           kept.if_wanted(keeps), out, mean, rstd, rows, cols, 1e-5f, p, key);
    else
      CALL(layer_norm, y, w, b, out, kept.if_wanted(keeps), mean, rstd, rows, cols, 1e-5f);
    const Doubles factors = dropout_factors(rows, cols, p, key);
    LayerNormFormulas formulas(
        normed_values(y, bias.if_wanted(has_bias), residual, joins, factors, cols), rows, cols);
    expect_normed(formulas, out, mean, rstd, w, b, kept.if_wanted(keeps));
    Floats grad_z(n), grad_y(n), grad_weight(cols), grad_beta(cols), grad_bias(cols);
    const bool wants_bias = joins;
    with_scratch([&](Scratch* scratch) {
      CALL(norm_backward, grad, keeps ? (const void*)kept.data() : (joins ? z : y).data(), keeps,
           mean, rstd, w, also.if_wanted(has_sum), grad_z, grad_y.if_wanted(p > 0), grad_weight,
           grad_beta, grad_bias.if_wanted(wants_bias), rows, cols, p, key, scratch);
    });
    Doubles expected = formulas.gradient(doubles(grad), w);
    const double scale = 10 * formulas.largest_rstd(), sum_scale = scale * (rows + 1);
    for (int64_t i = 0; has_sum && i < n; i++) expected[i] += also[i];
    const Doubles expected_y = product(expected, factors);
    expect_near(grad_z, expected, 1e-4, scale, "gradient of LayerNorm");
    if (p > 0) expect_near(grad_y, expected_y, 1e-4, scale, "gradient behind dropout");
    if (wants_bias)
      expect_near(grad_bias, column_sums(expected_y, cols), 1e-4, sum_scale, "gradient of a bias");
    expect_near(grad_weight, formulas.weight_gradient(doubles(grad)), 1e-4, sum_scale,
                "gradient of weight");
    expect_near(grad_beta, column_sums(doubles(grad), cols), 1e-4, rows + 1, "gradient of beta");
    same.check(out);
    if (cols > 1) same.check(grad_z), same.check(grad_weight);
    if (p > 0 && cols > 1) same.check(grad_y);
    if (wants_bias && cols > 1) same.check(grad_bias);
  });
}

void rms_norm(Random& random, int64_t rows, int64_t cols) {
  const bool has_weight = random.coin();
  const float offset = random.pick({0.f, 1.f});
  const int64_t n = rows * cols;
  describe("rms_norm", rows, cols, has_weight, offset);
  Floats x(random, n), weight(random, cols), grad(random, n);
  float* const w = weight.if_wanted(has_weight);
  on_every_isa(1e-3, [&](Same& same) {
    Floats out(n), rstd(rows), grad_x(n), grad_weight(cols);
    grad_x.copy(grad);
    CALL(rms_norm, x, w, offset, out, rstd, rows, cols, 1e-5f);
    with_scratch([&](Scratch* scratch) {
      Floats again(n);
      again.copy(grad);
      CALL(rms_norm_backward, again, x, rstd, w, offset, again, grad_weight.if_wanted(has_weight),
           rows, cols, scratch);
      grad_x.copy(again);
    });
    Doubles for_weight(cols);
    for (int64_t r = 0; r < rows; r++) {
      const auto factor = [&](int64_t c) { return w ? (double)w[c] + offset : 1.; };
      const auto at = [&](int64_t c) { return r * cols + c; };
      double squares = 0, along = 0;
      for (int64_t c = 0; c < cols; c++) squares += std::pow(x[at(c)], 2) / cols;
      const double scale = 1 / std::sqrt(squares + 1e-5);
      for (int64_t c = 0; c < cols; c++) along += grad[at(c)] * factor(c) * x[at(c)] * scale / cols;
      for (int64_t c = 0; c < cols; c++) {
        expect(near(out[at(c)], x[at(c)] * scale * factor(c), 1e-4), "RMSNorm");
        const double expected = scale * (grad[at(c)] * factor(c) - x[at(c)] * scale * along);
        expect(near(grad_x[at(c)], expected, 1e-4, 10 * scale), "gradient of RMSNorm");
        for_weight[c] += grad[at(c)] * x[at(c)] * scale;
      }
    }
    if (w) expect_near(grad_weight, for_weight, 1e-4, 10 * (rows + 1), "gradient of its weight");
    same.check(out);
  });
}

struct RowInDouble {
  double loss = 0, entropy = 0, squares = 0, mean = 0;
};

// What one row loses, and the gradient of loss · grad + entropy · entropy_grad in the place of z.
RowInDouble loss_in_double(Doubles& z, int64_t label, float before, float after, bool tanh,
                           double smoothing, double grad, double entropy_grad) {
  Doubles slope(z.size(), before);
  double largest = -INFINITY, sum = 0;
  RowInDouble row;
  for (size_t c = 0; c < z.size(); c++) {
    const double t = std::tanh(before * z[c]);
    z[c] = tanh ? after * t : before * z[c];
    if (tanh) slope[c] *= after * (1 - t * t);
    largest = std::fmax(largest, z[c]);
  }
  for (double one : z) sum += std::exp(one - largest);
  for (double one : z) {
    const double log_p = one - largest - std::log(sum), p = std::exp(log_p);
    row.entropy -= p * log_p, row.squares += p * p, row.mean += one / z.size();
  }
  for (size_t c = 0; c < z.size(); c++) {
    const double log_p = z[c] - largest - std::log(sum), p = std::exp(log_p);
    const double q = smoothing / z.size() + ((int64_t)c == label ? 1 - smoothing : 0);
    row.loss -= q * log_p;
    z[c] = ((p - q) * grad - p * (log_p + row.entropy) * entropy_grad) * slope[c];
  }
  return row;
}

void cross_entropy(Random& random, int64_t rows, int64_t cols) {
  if (!cols) return;
  const bool tanh = random.coin(), has_grads = random.coin();
  const bool has_about = random.coin(), of_entropy = random.coin();
  const float before = random.pick({1.f, 0.3f}), after = random.pick({1.f, 5.f});
  const float smoothing = random.pick({0.f, 0.1f});
  const int64_t stride = cols + random.below(5);
  describe("cross_entropy", rows, cols, stride, tanh, has_grads, has_about, of_entropy, before,
           after, smoothing);
  Floats logits(random, rows * stride), grads(random, rows), entropy_grads(random, rows);
  Guarded<int64_t> labels(rows);
  for (int64_t r = 0; r < rows; r++) labels[r] = random.below(cols);
  on_every_isa(1e-4, [&](Same& same) {
    Floats z(rows * stride), losses(rows), about(4 * rows);
    z.copy(logits);
    CALL(cross_entropy, z, stride, labels, grads.if_wanted(has_grads),
         entropy_grads.if_wanted(of_entropy), losses, about.if_wanted(has_about), rows, cols,
         before, after, tanh, smoothing);
    for (int64_t r = 0; r < rows; r++) {
      Doubles row(logits.data() + r * stride, logits.data() + r * stride + cols);
      const RowInDouble is = loss_in_double(row, labels[r], before, after, tanh, smoothing,
                                            grads[r], of_entropy ? entropy_grads[r] : 0);
      expect(near(losses[r], is.loss, 1e-5, 5), "cross entropy");
      const float* said = about.data() + 4 * r;
      if (has_about) {
        expect(near(said[0], is.entropy, 1e-5, 5), "entropy");
        expect(near(said[1], std::log(is.squares), 1e-5, 5), "squares of probabilities");
        expect(near(said[2], is.mean, 1e-5, 5), "mean logit");
      }
      for (int64_t c = 0; c < stride; c++) {
        const float found = z[r * stride + c];
        if (c >= cols) expect(found == logits[r * stride + c], "cross entropy: beyond a row");
        if (c < cols && has_grads) expect(near(found, row[c], 1e-5, 20), "gradient of logits");
      }
    }
    same.check(losses);
  });
}

}  // namespace

void check_rows(Random& random) {
  const auto sizes = [&](auto kernel) {
    const int64_t cols = random.size(600), rows = random.size(cols > 100 ? 40 : 200);
    kernel(random, rows, cols);
  };
  sizes(dropout), sizes(activation), sizes(gated), sizes(bf16), sizes(int16), sizes(norm),
      sizes(rms_norm), sizes(cross_entropy);
}
