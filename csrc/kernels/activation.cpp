// Activations of h + bias, and their gradients: one pass, in which the bias' gradient is summed
// and, if wanted, the activation itself computed again.
#include "activation.h"

#include "api.h"

namespace {

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

template <class H>
using BackwardRow = void (*)(const float*, const H*, const float*, float*, float*, float*, int64_t);

template <class Kind, class H>
BackwardRow<H> backward_of(bool bias, bool value) {
  return bias ? (value ? backward_row<Kind, H, true, true> : backward_row<Kind, H, true, false>)
              : (value ? backward_row<Kind, H, false, true> : backward_row<Kind, H, false, false>);
}

// The numbers are those of KINDS in ops/activation.py.
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
                         float* value, float* grad_bias, int64_t rows, int64_t cols, int64_t kind,
                         Scratch* scratch) {
  const Pieces pieces(rows, cols, bias);
  const BackwardRow<H> backward = backward_of<H>(kind, bias, value);
  const RowChunks chunks(pieces.rows, bias ? 32 : 1);
  Arena arena(scratch);
  const ColumnSums sums(arena, chunks, 1, bias ? cols : 0);
  if (!arena.enough()) return;
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
                                 int64_t cols, int64_t kind, Scratch* scratch) {
  if (bf16)
    activation_backward(grad, (const Bf16*)h, bias, grad_h, value, grad_bias, rows, cols, kind,
                        scratch);
  else
    activation_backward(grad, (const float*)h, bias, grad_h, value, grad_bias, rows, cols, kind,
                        scratch);
}
