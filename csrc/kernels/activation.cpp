// Activations of h + bias, and their gradients: one pass, in which the bias' gradient is summed
// and, if wanted, the activation itself computed again.
#include "api.h"
#include "columns.h"
#include "normal.h"

namespace {

struct Both {
  Vec value, slope;
};

// 1 / (1 + e^-v) and its slope s·(1 - s), which from s alone would have no digits left for large v.
struct Sigmoid {
  Vec value, slope;
  explicit Sigmoid(Vec v) {
    const Vec e = exp(-abs(v)), d = 1.f / (1.f + e), ed = e * d;
    value = select(v < 0.f, ed, d);
    slope = ed * d;
  }
};

struct Identity {
  static Vec value(Vec x) { return x; }
  static Both both(Vec x) { return {x, splat(1.f)}; }
};

struct Relu {
  // As stock: NaN stays, and the slope at 0 is 0, at NaN 1.
  static Vec value(Vec x) { return select(x <= 0.f, Vec{}, x); }
  static Both both(Vec x) { return {value(x), select(x <= 0.f, Vec{}, splat(1.f))}; }
};

struct Silu {
  static Vec value(Vec x) { return x / (1.f + exp(-x)); }
  static Both both(Vec x) {
    const Sigmoid s(x);
    return {x * s.value, s.value + x * s.slope};
  }
};

struct Gelu {
  static Vec value(Vec x) { return x * normal(x).cumulative; }
  static Both both(Vec x) {
    const Normal n = normal(x);
    return {x * n.cumulative, n.cumulative + x * n.density};
  }
};

// x·(1 + tanh(u)) / 2 is x·sigmoid(2u), 2u = x·(a + b·x²).
struct GeluTanh {
  static constexpr float a = 1.59576912161f, b = 0.0713548162726f;  // 2·√(2/π), and that · 0.044715
  static Vec value(Vec x) { return x / (1.f + exp(-x * (a + b * (x * x)))); }
  static Both both(Vec x) {
    const Vec square = x * x;
    const Sigmoid s(x * (a + b * square));
    return {x * s.value, s.value + x * (a + 3.f * b * square) * s.slope};
  }
};

// The arithmetic of a vector takes about as long as its memory, and is long enough to fill the
// window in which a core looks ahead: without asking early the two take turns. 2 KB are some 400 ns
// of work.
constexpr int64_t kAhead = 512;

template <class Kind, bool kBias, bool kKeep>
void forward_row(const float* h, const float* bias, float* out, Bf16* kept, int64_t cols) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(h + c + kAhead);
    fetch_to_write(out + c + kAhead);
    if (kKeep) fetch_to_write(kept + c + kAhead);
    Vec x = part.load(h + c);
    if (kKeep) part.store(kept + c, x);
    if (kBias) x += part.load(bias + c);
    part.store(out + c, Kind::value(x));
  });
}

// add_bias is the row of sums that the bias' gradient goes to.
template <class Kind, class H, bool kBias, bool kValue>
void backward_row(const float* grad, const H* h, const float* bias, float* grad_h, float* value,
                  float* add_bias, int64_t cols) {
  for_columns(cols, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(h + c + kAhead);
    fetch_to_write(grad_h + c + kAhead);
    if (kValue) fetch_to_write(value + c + kAhead);
    Vec x = part.load(h + c);
    if (kBias) x += part.load(bias + c);
    const Both f = Kind::both(x);
    const Vec g = part.load(grad + c) * f.slope;
    part.store(grad_h + c, g);
    if (kValue) part.store(value + c, f.value);
    if (kBias) part.store(add_bias + c, part.load(add_bias + c) + g);
  });
}

using ForwardRow = void (*)(const float*, const float*, float*, Bf16*, int64_t);
template <class H>
using BackwardRow = void (*)(const float*, const H*, const float*, float*, float*, float*, int64_t);

template <class Kind>
ForwardRow forward_of(bool bias, bool keep) {
  return bias ? (keep ? forward_row<Kind, true, true> : forward_row<Kind, true, false>)
              : (keep ? forward_row<Kind, false, true> : forward_row<Kind, false, false>);
}

template <class Kind, class H>
BackwardRow<H> backward_of(bool bias, bool value) {
  return bias ? (value ? backward_row<Kind, H, true, true> : backward_row<Kind, H, true, false>)
              : (value ? backward_row<Kind, H, false, true> : backward_row<Kind, H, false, false>);
}

// The numbers are those of KINDS in ops/activation.py.
ForwardRow forward_of(int64_t kind, bool bias, bool keep) {
  switch (kind) {
    case 0:
      return forward_of<Identity>(bias, keep);
    case 1:
      return forward_of<Relu>(bias, keep);
    case 2:
      return forward_of<Silu>(bias, keep);
    case 3:
      return forward_of<Gelu>(bias, keep);
    default:
      return forward_of<GeluTanh>(bias, keep);
  }
}
template <class H>
BackwardRow<H> backward_of(int64_t kind, bool bias, bool value) {
  switch (kind) {
    case 0:
      return backward_of<Identity, H>(bias, value);
    case 1:
      return backward_of<Relu, H>(bias, value);
    case 2:
      return backward_of<Silu, H>(bias, value);
    case 3:
      return backward_of<Gelu, H>(bias, value);
    default:
      return backward_of<GeluTanh, H>(bias, value);
  }
}

// Without a bias the shape doesn't matter: all is one row, cut into pieces that keep every thread
// busy.
struct Pieces {
  int64_t rows, cols, total;
  Pieces(int64_t rows, int64_t cols, bool by_row) : rows(rows), cols(cols), total(rows * cols) {
    if (by_row) return;
    this->cols = 4096;  // 16 KB: two arrays of them in a first-level cache
    this->rows = (total + this->cols - 1) / this->cols;
  }
  int64_t width(int64_t r) const { return total - r * cols < cols ? total - r * cols : cols; }
};

constexpr int64_t kFewActivations = 4096;  // a dozen cycles for a vector of them: some microseconds

template <class H>
void activation_backward(const float* grad, const H* h, const float* bias, float* grad_h,
                         float* value, float* grad_bias, int64_t rows, int64_t cols, int64_t kind) {
  const Pieces pieces(rows, cols, bias);
  const BackwardRow<H> backward = backward_of<H>(kind, bias, value);
  const RowChunks chunks(pieces.rows, bias ? 32 : 1);
  const ColumnSums sums(chunks, 1, bias ? cols : 0);
#pragma omp parallel if (pieces.total > kFewActivations)
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks.count; chunk++) {
      sums.clear(chunk, 1);
      for (int64_t r = chunks.first(chunk); r < chunks.last(chunk); r++) {
        const int64_t at = r * pieces.cols;
        backward(grad + at, h + at, bias, grad_h + at, value ? value + at : nullptr,
                 sums.row(chunk, 0), pieces.width(r));
      }
    }
    if (bias) sums.total(0, grad_bias);
  }
}

}  // namespace

void KERNEL(activation)(const float* h, const float* bias, float* out, void* kept, int64_t rows,
                        int64_t cols, int64_t kind) {
  const Pieces pieces(rows, cols, bias);
  const ForwardRow forward = forward_of(kind, bias, kept);
#pragma omp parallel for schedule(static) if (pieces.total > kFewActivations)
  for (int64_t r = 0; r < pieces.rows; r++) {
    const int64_t at = r * pieces.cols;
    forward(h + at, bias, out + at, kept ? (Bf16*)kept + at : nullptr, pieces.width(r));
  }
}

void KERNEL(activation_backward)(const float* grad, const void* h, int64_t bf16, const float* bias,
                                 float* grad_h, float* value, float* grad_bias, int64_t rows,
                                 int64_t cols, int64_t kind) {
  if (bf16)
    activation_backward(grad, (const Bf16*)h, bias, grad_h, value, grad_bias, rows, cols, kind);
  else
    activation_backward(grad, (const float*)h, bias, grad_h, value, grad_bias, rows, cols, kind);
}
