// Activations of h + bias: the kinds, and one row.
#pragma once

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

using ForwardRow = void (*)(const float*, const float*, float*, Bf16*, int64_t);

template <class Kind>
ForwardRow forward_of(bool bias, bool keep) {
  return bias ? (keep ? forward_row<Kind, true, true> : forward_row<Kind, true, false>)
              : (keep ? forward_row<Kind, false, true> : forward_row<Kind, false, false>);
}

// The numbers are those of KINDS in ops/activation.py.
inline ForwardRow forward_of(int64_t kind, bool bias, bool keep) {
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

}  // namespace
