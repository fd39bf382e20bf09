// Kernels that follow ids (embeddings) or lists of tensors (optimizers).
#include "layer_norm.h"

namespace {

struct Table {
  int64_t rows;
  Floats values;
  Guarded<int64_t> ids;
  Table(Random& random, int64_t tokens, int64_t cols)
      : rows(1 + random.size(60)), values(random, rows * cols), ids(tokens) {
    for (int64_t t = 0; t < tokens; t++) ids[t] = random.below(rows);
  }
  // Adds each token's row.
  void add_to(Doubles& z, int64_t cols) {
    for (size_t i = 0; i < z.size(); i++) z[i] += values[ids[i / cols] * cols + i % cols];
  }
};

// A list of tensors as the optimizers get it.
struct List {
  std::vector<Floats*> tensors;
  std::vector<float*> pointers;
  List(Random& random, const std::vector<int64_t>& sizes) {
    for (int64_t size : sizes) {
      tensors.push_back(new Floats(random, size));
      pointers.push_back(tensors.back()->data());
    }
  }
  explicit List(const List& other) {
    for (Floats* x : other.tensors) {
      tensors.push_back(new Floats(x->size()));
      tensors.back()->copy(*x);
      pointers.push_back(tensors.back()->data());
    }
  }
  ~List() {
    for (Floats* x : tensors) delete x;
  }
  void make_positive() {
    for (Floats* x : tensors)
      for (int64_t i = 0; i < x->size(); i++) (*x)[i] = std::fabs((*x)[i]);
  }
  Floats& operator[](size_t t) { return *tensors[t]; }
  float** data() { return pointers.data(); }
};

std::vector<int64_t> list_of_sizes(Random& random) {
  std::vector<int64_t> sizes(random.below(6));
  for (int64_t& size : sizes)
    size = random.seldom() ? random.pick<int64_t>({16383, 16384, 16385, 40000}) : random.size(700);
  return sizes;
}

void adam(Random& random) {
  const std::vector<int64_t> sizes = list_of_sizes(random);
  const bool decoupled = random.coin();
  const double decay = random.pick({0., 0.01}), eps = 1e-8;
  describe("adam", sizes.size(), decoupled, decay);
  const List params(random, sizes), steps(random, std::vector<int64_t>(sizes.size(), 1));
  List grads(random, sizes), averages(random, sizes), squares(random, sizes);
  squares.make_positive();
  on_every_isa(1e-4, [&](Same& same) {
    List param(params), average(averages), square(squares), step(steps);
    for (size_t t = 0; t < sizes.size(); t++) step[t][0] = (float)t;
    with_scratch([&](Scratch* scratch) {
      CALL(adam, sizes.size(), sizes.data(), param.data(), grads.data(), average.data(),
           square.data(), step.data(), 1e-2, 0.9, 0.999, eps, decay, decoupled, scratch);
    });
    for (size_t t = 0; t < sizes.size(); t++) {
      expect(step[t][0] == t + 1, "adam's step counter");
      for (int64_t i = 0; i < sizes[t]; i++) {
        const double p = params.tensors[t]->data()[i];
        const double g = grads[t][i] + (decoupled ? 0 : decay * p);
        const double a = 0.9 * averages[t][i] + 0.1 * g, s = 0.999 * squares[t][i] + 0.001 * g * g;
        const double d = std::sqrt(s / (1 - std::pow(0.999, t + 1))) + eps;
        const double shrunk = p * (decoupled ? 1 - 1e-2 * decay : 1);
        expect(near(param[t][i], shrunk - 1e-2 * a / (1 - std::pow(0.9, t + 1)) / d, 1e-3), "adam");
      }
      same.check(param[t]), same.check(average[t]), same.check(square[t]);
    }
  });
}

void sgd(Random& random) {
  const std::vector<int64_t> sizes = list_of_sizes(random);
  const bool has_momentum = random.coin(), nesterov = has_momentum && random.coin();
  const double decay = random.pick({0., 0.01}), momentum = has_momentum ? 0.9 : 0;
  describe("sgd", sizes.size(), has_momentum, nesterov, decay);
  const List params(random, sizes), buffers(random, sizes);
  List grads(random, sizes);
  on_every_isa(1e-5, [&](Same& same) {
    List param(params), buffer(buffers);
    with_scratch([&](Scratch* scratch) {
      CALL(sgd, sizes.size(), sizes.data(), param.data(), grads.data(),
           has_momentum ? buffer.data() : nullptr, 0.1, momentum, 0., decay, nesterov, scratch);
    });
    for (size_t t = 0; t < sizes.size(); t++) {
      for (int64_t i = 0; i < sizes[t]; i++) {
        const double p = params.tensors[t]->data()[i], g = grads[t][i] + decay * p;
        const double b = has_momentum ? momentum * buffers.tensors[t]->data()[i] + g : g;
        expect(near(param[t][i], p - 0.1 * (nesterov ? g + momentum * b : b), 1e-4), "sgd");
      }
      same.check(param[t]);
    }
  });
}

void clipping(Random& random) {
  const std::vector<int64_t> sizes = list_of_sizes(random);
  describe("sum_of_squares", sizes.size());
  const List grads(random, sizes);
  on_every_isa(0, [&](Same&) {
    List grad(grads);
    double found = -1, expected = 0;
    with_scratch([&](Scratch* scratch) {
      CALL(sum_of_squares, sizes.size(), sizes.data(), grad.data(), &found, scratch);
    });
    with_scratch([&](Scratch* scratch) {
      CALL(scale, sizes.size(), sizes.data(), grad.data(), 0.5f, scratch);
    });
    for (size_t t = 0; t < sizes.size(); t++)
      for (int64_t i = 0; i < sizes[t]; i++) {
        expected += std::pow(grads.tensors[t]->data()[i], 2);
        expect(grad[t][i] == grads.tensors[t]->data()[i] * 0.5f, "scale");
      }
    expect(near(found, expected, 1e-9), "sum_of_squares");
  });
}

void find_outside(Random& random) {
  const int64_t count = random.size(100), limit = 1 + random.size(50);
  describe("find_outside", count, limit);
  Guarded<int64_t> ids(count);
  int64_t expected = -1;
  for (int64_t i = 0; i < count; i++) {
    ids[i] = random.seldom() ? random.pick<int64_t>({-1, limit, INT64_MIN}) : random.below(limit);
    if (expected < 0 && (ids[i] < 0 || ids[i] >= limit)) expected = i;
  }
  on_every_isa(0, [&](Same&) {
    int64_t place = -2;
    CALL(find_outside, ids, count, limit, &place);
    expect(place == expected, "find_outside");
  });
}

}  // namespace

void check_embeddings(Random& random) {
  const int64_t cols = random.size(400), rows = random.size(80), n = rows * cols;
  const bool has_position = random.coin(), has_type = random.coin();
  const float p = random.pick({0.f, 0.2f});
  const uint64_t key = random.bits();
  find_outside(random);
  describe("embed", rows, cols, has_position, has_type, p);
  Table word(random, rows, cols), place(random, rows, cols), type(random, rows, cols);
  Floats weight(random, cols), beta(random, cols), grad(random, n);
  float *const places = place.values.if_wanted(has_position), *const types =
                                                                  type.values.if_wanted(has_type);
  const int64_t skipped = random.coin() ? -1 : random.below(word.rows);
  on_every_isa(1e-3, [&](Same& same) {
    Floats out(n), mean(rows), rstd(rows), grad_sum(n), grad_weight(cols), grad_beta(cols);
    CALL(embed, word.values, word.ids, places, place.ids.if_wanted(has_position), types,
         type.ids.if_wanted(has_type), weight, beta, out, mean, rstd, rows, cols, 1e-5f, p, key);
    with_scratch([&](Scratch* scratch) {
      CALL(embed_backward, grad, word.values, word.ids, places, place.ids.if_wanted(has_position),
           types, type.ids.if_wanted(has_type), mean, rstd, weight, grad_sum, grad_weight,
           grad_beta, rows, cols, p, key, scratch);
    });
    Doubles z(n);
    word.add_to(z, cols);
    if (has_position) place.add_to(z, cols);
    if (has_type) type.add_to(z, cols);
    const LayerNormFormulas formulas(z, rows, cols);
    const Doubles factors = dropout_factors(rows, cols, p, key);
    const Doubles before_dropout = product(doubles(grad), factors);
    const double scale = 10 * formulas.largest_rstd(), sum_scale = scale * (rows + 1);
    for (int64_t i = 0; i < n; i++)
      expect(near(out[i], factors[i] * formulas.out(i, weight, beta), 1e-3), "embed");
    expect_near(grad_sum, formulas.gradient(before_dropout, weight), 1e-4, scale, "embed_backward");
    expect_near(grad_weight, formulas.weight_gradient(before_dropout), 1e-4, sum_scale,
                "gradient of embed's weight");
    expect_near(grad_beta, column_sums(before_dropout, cols), 1e-4, rows + 1,
                "gradient of embed's beta");
    Floats table(word.rows * cols);
    std::vector<double> expected(word.rows * cols);
    for (int64_t i = 0; i < table.size(); i++) table[i] = 0;
    CALL(embedding_grad, grad, word.ids, table, rows, cols, skipped);
    for (int64_t i = 0; i < n; i++)
      if (word.ids[i / cols] != skipped) expected[word.ids[i / cols] * cols + i % cols] += grad[i];
    for (int64_t i = 0; i < table.size(); i++)
      expect(near(table[i], expected[i], 1e-4), "embedding_grad");
    same.check(out);
    if (cols > 1) same.check(grad_sum), same.check(grad_weight), same.check(grad_beta);
  });
}

void check_optimizers(Random& random) { adam(random), sgd(random), clipping(random); }
