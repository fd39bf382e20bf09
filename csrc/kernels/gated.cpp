// What a gate lets through, activation(gate) · up, and the gradients of both.
#include "activation.h"
#include "api.h"

namespace {

constexpr int64_t kPiece = 2048;  // 8 KB of each: six arrays fit a second-level cache of 64 KB

template <class Kind>
void forward_piece(const float* gate, const float* up, float* out, int64_t n) {
  for_columns(n, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(gate + c + kAhead);
    fetch(up + c + kAhead);
    fetch_to_write(out + c + kAhead);
    part.store(out + c, Kind::value(part.load(gate + c)) * part.load(up + c));
  });
}

// grad is read before grad_gate, which may be the same memory, is written.
template <class Kind, bool kValue>
void backward_piece(const float* grad, const float* gate, const float* up, float* grad_gate,
                    float* grad_up, float* value, int64_t n) {
  for_columns(n, [&](int64_t c, int, auto part) INLINE_BODY {
    fetch(gate + c + kAhead);
    fetch(up + c + kAhead);
    fetch_to_write(grad_gate + c + kAhead);
    fetch_to_write(grad_up + c + kAhead);
    if (kValue) fetch_to_write(value + c + kAhead);
    const Vec g = part.load(grad + c), u = part.load(up + c);
    const Both f = Kind::both(part.load(gate + c));
    part.store(grad_gate + c, g * u * f.slope);
    part.store(grad_up + c, g * f.value);
    if (kValue) part.store(value + c, f.value * u);
  });
}

// body(first element, elements) for all pieces, in parallel.
template <class Body>
void in_pieces(int64_t count, Body body) {
#pragma omp parallel for schedule(static) if (count > kFewElements / 4)
  for (int64_t first = 0; first < count; first += kPiece)
    body(first, count - first < kPiece ? count - first : kPiece);
}

template <class Kind>
void forward_all(const float* gate, const float* up, float* out, int64_t count) {
  in_pieces(count,
            [&](int64_t at, int64_t n) { forward_piece<Kind>(gate + at, up + at, out + at, n); });
}

template <class Kind>
void backward_all(const float* grad, const float* gate, const float* up, float* grad_gate,
                  float* grad_up, float* value, int64_t count) {
  in_pieces(count, [&](int64_t at, int64_t n) {
    if (value)
      backward_piece<Kind, true>(grad + at, gate + at, up + at, grad_gate + at, grad_up + at,
                                 value + at, n);
    else
      backward_piece<Kind, false>(grad + at, gate + at, up + at, grad_gate + at, grad_up + at,
                                  nullptr, n);
  });
}

}  // namespace

// The numbers are those of KINDS in ops/activation.py.
#define OF_KIND(kind, function, ...)          \
  switch (kind) {                             \
    case 0:                                   \
      return function<Identity>(__VA_ARGS__); \
    case 1:                                   \
      return function<Relu>(__VA_ARGS__);     \
    case 2:                                   \
      return function<Silu>(__VA_ARGS__);     \
    case 3:                                   \
      return function<Gelu>(__VA_ARGS__);     \
    default:                                  \
      return function<GeluTanh>(__VA_ARGS__); \
  }

void KERNEL(gated)(const float* gate, const float* up, float* out, int64_t count, int64_t kind) {
  OF_KIND(kind, forward_all, gate, up, out, count)
}

void KERNEL(gated_backward)(const float* grad, const float* gate, const float* up, float* grad_gate,
                            float* grad_up, float* value, int64_t count, int64_t kind) {
  OF_KIND(kind, backward_all, grad, gate, up, grad_gate, grad_up, value, count)
}
