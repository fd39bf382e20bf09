// Attention, forward and backward, against the formulas in double.
#include "guarded.h"

namespace {

struct Problem {
  int64_t heads, kv_heads, size, total = 0, longest = 0;
  bool causal, bf16, has_bias, bias_per_sequence, bias_per_head;
  int64_t window = -1;
  float p, scale = 0.3f, cap = 0.f;
  std::vector<float> sinks;
  uint64_t key;
  std::vector<int64_t> starts, lengths, order;

  explicit Problem(Random& random) {
    kv_heads = 1 + random.below(3), heads = kv_heads * (1 + random.below(2));
    size = random.pick<int64_t>({1, 3, 8, 16, 17, 32, 40, 64, 65});
    causal = random.coin(), bf16 = random.seldom(), has_bias = random.coin();
    bias_per_sequence = random.coin(), bias_per_head = random.coin();
    p = random.pick({0.f, 0.f, 0.2f}), key = random.bits();
    for (int64_t s = random.below(4); s > 0; s--) {
      starts.push_back(total + random.below(3));  // tokens of no sequence lie between
      lengths.push_back(random.seldom() ? random.pick<int64_t>({191, 192, 193, 230})
                                        : random.size(70));
      total = starts.back() + lengths.back();
      longest = lengths.back() > longest ? lengths.back() : longest;
      order.insert(order.begin(), (int64_t)order.size());
    }
    total += random.below(2);
    if (random.coin()) window = random.pick<int64_t>({0, 1, 5, 31, 64, 200});
    if (random.coin()) cap = 2.f;
    for (int64_t h = random.coin() ? heads : 0; h > 0; h--) sinks.push_back(random.normal());
    describe("attention", heads, kv_heads, size, total, longest, lengths.size(), causal, bf16,
             has_bias, bias_per_sequence, bias_per_head, p, window, cap, sinks.size());
  }
  // Whole copies of a gradient for those that share one.
  BiasTensor bias(float* data) const {
    const int64_t rows = longest * longest, heads_apart = bias_per_head ? rows : 0;
    return {data, bias_per_sequence ? (bias_per_head ? heads : 1) * rows : 0, heads_apart, longest};
  }
  int64_t bias_floats() const {
    const int64_t sequences = (int64_t)lengths.size();
    return (bias_per_sequence ? sequences : 1) * (bias_per_head ? heads : 1) * longest * longest;
  }
};

// (tokens, heads, size) with gaps between tokens, and no byte behind the last element.
template <class T>
struct Heads {
  int64_t heads, size, stride;
  Guarded<T> values;
  Heads(Random& random, int64_t total, int64_t heads, int64_t size)
      : heads(heads),
        size(size),
        stride(heads * size + random.below(20)),
        values(total ? (total - 1) * stride + heads * size : 0) {
    for (int64_t i = 0; i < values.size(); i++) set(values[i], random.normal());
  }
  static void set(float& to, float x) { to = x; }
  static void set(uint16_t& to, float x) { to = bf16_bits(x); }
  static double read(float x) { return x; }
  static double read(uint16_t x) { return bf16_value(x); }
  double at(int64_t token, int64_t head, int64_t c) {
    return read(values[token * stride + head * size + c]);
  }
  HeadTensor tensor() { return {values.data(), stride, size}; }
};

struct Expected {
  std::vector<double> out, q, k, v, bias;
};

template <class T>
Expected formulas(const Problem& problem, Heads<T>& q, Heads<T>& k, Heads<T>& v, Floats& bias,
                  Heads<float>& grad) {
  const int64_t size = problem.size, group = problem.heads / problem.kv_heads;
  const int64_t mine = problem.total * problem.heads * size;
  const int64_t kv = problem.total * problem.kv_heads * size;
  Expected all = {std::vector<double>(mine), std::vector<double>(mine), std::vector<double>(kv),
                  std::vector<double>(kv), std::vector<double>(problem.bias_floats())};
  for (size_t s = 0; s < problem.lengths.size(); s++)
    for (int64_t h = 0; h < problem.heads; h++)
      for (int64_t i = 0; i < problem.lengths[s]; i++) {
        const int64_t start = problem.starts[s], other = h / group, row = start + i;
        const int64_t length = problem.lengths[s], window = problem.window;
        const int64_t from = window < 0 || window > i ? 0 : i - window;
        const int64_t behind = window < 0 || i + window >= length ? length : i + window + 1;
        const int64_t keys = problem.causal ? i + 1 : behind;
        const BiasTensor where = problem.bias(nullptr);
        const int64_t first =
            (int64_t)s * where.sequence_stride + h * where.head_stride + i * where.row_stride;
        std::vector<double> weights(keys), slopes(keys), caps(keys, 1.);
        double largest = problem.sinks.empty() ? -1e300 : problem.sinks[h], total = 0, delta = 0;
        for (int64_t j = from; j < keys; j++) {
          for (int64_t c = 0; c < size; c++)
            weights[j] += q.at(row, h, c) * k.at(start + j, other, c) * problem.scale;
          if (problem.cap != 0) {
            const double x = std::tanh(weights[j] / problem.cap);
            weights[j] = x * problem.cap, caps[j] = 1 - x * x;
          }
          if (problem.has_bias) weights[j] += bias[first + j];
          largest = std::fmax(largest, weights[j]);
        }
        if (!problem.sinks.empty()) total = std::exp(problem.sinks[h] - largest);
        for (int64_t j = from; j < keys; j++) total += weights[j] = std::exp(weights[j] - largest);
        for (int64_t j = from; j < keys; j++) {
          weights[j] /= total;
          for (int64_t c = 0; c < size; c++) {
            const double g = grad.at(row, h, c), value = v.at(start + j, other, c);
            all.out[(row * problem.heads + h) * size + c] += weights[j] * value;
            all.v[((start + j) * problem.kv_heads + other) * size + c] += weights[j] * g;
            slopes[j] += g * value;
          }
          delta += weights[j] * slopes[j];
        }
        for (int64_t j = from; j < keys; j++) {
          double d = weights[j] * (slopes[j] - delta);
          if (problem.has_bias) all.bias[first + j] += d;
          d *= caps[j];
          for (int64_t c = 0; c < size; c++) {
            all.q[(row * problem.heads + h) * size + c] +=
                problem.scale * d * k.at(start + j, other, c);
            all.k[((start + j) * problem.kv_heads + other) * size + c] +=
                problem.scale * d * q.at(row, h, c);
          }
        }
      }
  return all;
}

// What belongs to a sequence must be right; all else must be as it was (NaN, or 0 for `zeros`).
void compare(const Problem& problem, Heads<float>& found, const std::vector<double>& expected,
             const char* what) {
  for (size_t s = 0; s < problem.lengths.size(); s++)
    for (int64_t t = problem.starts[s]; t < problem.starts[s] + problem.lengths[s]; t++)
      for (int64_t h = 0; h < found.heads; h++)
        for (int64_t c = 0; c < found.size; c++)
          expect(near(found.at(t, h, c), expected[(t * found.heads + h) * found.size + c], 2e-4, 5),
                 what);
}

template <class T>
void run(const Problem& problem, Random& random) {
  const int64_t sequences = (int64_t)problem.lengths.size();
  const uint64_t layout = random.bits();
  Heads<T> q(random, problem.total, problem.heads, problem.size);
  Heads<T> k(random, problem.total, problem.kv_heads, problem.size);
  Heads<T> v(random, problem.total, problem.kv_heads, problem.size);
  Heads<float> grad(random, problem.total, problem.heads, problem.size);
  Floats bias(random, problem.bias_floats());
  const Expected expected = formulas(problem, q, k, v, bias, grad);
  on_every_isa(1e-3, [&](Same& same) {
    Random strides(layout);  // the same for every instruction set
    Heads<float> out(strides, problem.total, problem.heads, problem.size);
    Heads<float> dq(strides, problem.total, problem.heads, problem.size);
    Heads<float> dk(strides, problem.total, problem.kv_heads, problem.size);
    Heads<float> dv(strides, problem.total, problem.kv_heads, problem.size);
    Floats lse(problem.heads * problem.total), dbias(problem.bias_floats());
    for (int64_t i = 0; i < dbias.size(); i++) dbias[i] = 0;
    const AttentionProblem given = {q.tensor(),
                                    k.tensor(),
                                    v.tensor(),
                                    out.tensor(),
                                    lse,
                                    problem.bias(problem.has_bias ? bias.data() : nullptr),
                                    problem.starts.data(),
                                    problem.lengths.data(),
                                    problem.order.data(),
                                    sequences,
                                    problem.total,
                                    problem.heads,
                                    problem.kv_heads,
                                    problem.size,
                                    problem.causal,
                                    problem.window,
                                    problem.bf16,
                                    problem.scale,
                                    problem.p,
                                    problem.cap,
                                    problem.sinks.empty() ? nullptr : problem.sinks.data(),
                                    problem.key};
    const AttentionGradients gradients = {grad.tensor(), dq.tensor(), dk.tensor(), dv.tensor(),
                                          problem.bias(problem.has_bias ? dbias.data() : nullptr)};
    with_scratch([&](Scratch* scratch) { CALL(attention_forward, &given, scratch); });
    with_scratch([&](Scratch* scratch) { CALL(attention_backward, &given, &gradients, scratch); });
    if (problem.p == 0) {
      compare(problem, out, expected.out, "attention");
      compare(problem, dq, expected.q, "gradient of queries");
      compare(problem, dk, expected.k, "gradient of keys");
      compare(problem, dv, expected.v, "gradient of values");
      for (int64_t i = 0; problem.has_bias && i < dbias.size(); i++)
        expect(near(dbias[i], expected.bias[i], 2e-4, 5), "gradient of attention's bias");
    }
    same.check(out.values), same.check(dq.values), same.check(dk.values), same.check(dv.values);
  });
}

}  // namespace

void check_attention(Random& random) {
  const Problem problem(random);
  problem.bf16 ? run<uint16_t>(problem, random) : run<float>(problem, random);
}
