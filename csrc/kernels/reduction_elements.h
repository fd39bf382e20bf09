// What a reduction reads, computes and writes for one element: the dtypes, and the operations.
#pragma once

#include <cstdint>

#include "half_precision.h"

namespace {

template <class T>
struct Plain {  // integers, float, double
  typedef T Stored;
  typedef T Value;
  static Value read(Stored x) { return x; }
  static void write(Value x, Stored* out) { *out = x; }
};
template <class T>
struct Half {
  typedef T Stored;
  typedef float Value;
  static Value read(Stored x) { return widen(x); }
  static void write(Value x, Stored* out) { narrow(x, out); }
};

struct Boolean {
  typedef uint8_t Stored;
  typedef uint8_t Value;
  static Value read(Stored x) { return x != 0; }
  static void write(Value x, Stored* out) { *out = x != 0; }
};
template <class T>
struct Pair {
  T re, im;
};
template <class T>
struct Complex {
  typedef Pair<T> Stored;
  typedef Pair<T> Value;
  static Value read(Stored x) { return x; }
  static void write(Value x, Stored* out) { *out = x; }
};

// Signed integers wrap around as torch's do: computed without sign, where overflow is defined.
struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return (T)(a + b);
  }
  static int32_t apply(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
  static int64_t apply(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
  template <class T>
  static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return (T)(a * b);
  }
  static int32_t apply(int32_t a, int32_t b) { return (int32_t)((uint32_t)a * (uint32_t)b); }
  static int64_t apply(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }
  static uint16_t apply(uint16_t a, uint16_t b) { return (uint16_t)((uint32_t)a * b); }
  template <class T>
  static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
struct Minimum {  // as torch.minimum: a NaN wins
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Maximum {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct BitAnd {
  template <class T>
  static T apply(T a, T b) {
    return (T)(a & b);
  }
};
struct BitOr {
  template <class T>
  static T apply(T a, T b) {
    return (T)(a | b);
  }
};
struct BitXor {
  template <class T>
  static T apply(T a, T b) {
    return (T)(a ^ b);
  }
};

template <class T>
inline T divided(T x, int64_t n) {
  return (T)(x / (T)n);
}
template <class T>
inline Pair<T> divided(Pair<T> x, int64_t n) {
  return {x.re / (T)n, x.im / (T)n};
}

// What two ranks' mean needs no second pass for. Halving is exact, so this is the sum's division.
struct MeanOfTwo {
  template <class T>
  static T apply(T a, T b) {
    return divided(Sum::apply(a, b), 2);
  }
};

}  // namespace
