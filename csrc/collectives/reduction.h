// Element-wise reductions of several ranks' data, for every dtype of torch that can be reduced.
//
// The loops are plain: the compiler makes vectors of them for the instruction set it compiles for.
// 16-bit floats are widened, reduced in fp32 and rounded once.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "api.h"

namespace {

typedef const char* const* Sources;
constexpr int64_t kMostRanks = 1024;

// --- 16-bit floats -----------------------------------------------------------------------------

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Bfloat16 {
  uint16_t bits;
};
inline float widen(Bfloat16 x) { return from_bits((uint32_t)x.bits << 16); }
inline void narrow(float x, Bfloat16* out) {  // to nearest even, NaN stays NaN
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

struct Float16 {
  uint16_t bits;
};
#if defined(__F16C__)
inline float widen(Float16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, Float16* out) { out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float widen(Float16 x) {
  // Multiplying by 2^112 moves the exponent and makes subnormals normal.
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = (uint32_t)(x.bits & 0x7fff) << 13;
  const float scaled = from_bits(rest) * from_bits(0x77800000);
  const uint32_t bits = rest >= 0x0f800000 ? rest | 0x7f800000 : bits_of(scaled);
  return from_bits(bits | sign);
}
inline void narrow(float x, Float16* out) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000)
    half = 0x7e00;
  else if (rest >= 0x477ff000)  // from 65520 on, infinity
    half = 0x7c00;
  else if (rest < 0x38800000)  // subnormal: adding 0.5 leaves the rounded value in the low bits
    half = bits_of(from_bits(rest) + 0.5f) - 0x3f000000;
  else
    half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  out->bits = (uint16_t)(half | sign);
}
#endif

// --- Elements: how one is read, computed with and written --------------------------------------

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
#if defined(__F16C__)
// The compiler makes no vectors of fp16 conversions: eight at a time, by hand.
inline void widen_all(const Float16* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
  for (; i < count; i++) out[i] = widen(x[i]);
}
inline void narrow_all(const float* x, int64_t count, Float16* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128((__m128i*)(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; i++) narrow(x[i], out + i);
}
#endif
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

// --- Loops -------------------------------------------------------------------------------------

// 16 KB of widened values at most: stays in the L1 cache from source to source.
constexpr int64_t kBlockElements = 2048;

// out[i] = reduction over the sources' element i. out may be one of the sources.
template <class Element, class Op>
void reduce_elements(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                     int64_t divisor) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Value Value;
  Stored* out = reinterpret_cast<Stored*>(out_bytes);
  if (ranks == 2 && !divisor) {
    const Stored *a = reinterpret_cast<const Stored*>(sources[0]),
                 *b = reinterpret_cast<const Stored*>(sources[1]);
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
      Element::write(Op::apply(Element::read(a[i]), Element::read(b[i])), out + i);
    return;
  }
  alignas(64) Value sum[kBlockElements];
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = count - begin < kBlockElements ? count - begin : kBlockElements;
    const Stored* first = reinterpret_cast<const Stored*>(sources[0]) + begin;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) sum[i] = Element::read(first[i]);
    for (int64_t r = 1; r < ranks; r++) {
      const Stored* next = reinterpret_cast<const Stored*>(sources[r]) + begin;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = Op::apply(sum[i], Element::read(next[i]));
    }
    if (divisor)
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = divided(sum[i], divisor);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) Element::write(sum[i], out + begin + i);
  }
}

#if defined(__F16C__)
template <class Op>
void reduce_float16(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  alignas(64) float sum[kBlockElements], next[kBlockElements];
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = count - begin < kBlockElements ? count - begin : kBlockElements;
    widen_all(reinterpret_cast<const Float16*>(sources[0]) + begin, size, sum);
    for (int64_t r = 1; r < ranks; r++) {
      widen_all(reinterpret_cast<const Float16*>(sources[r]) + begin, size, next);
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = Op::apply(sum[i], next[i]);
    }
    if (divisor)
#pragma omp simd
      for (int64_t i = 0; i < size; i++) sum[i] = divided(sum[i], divisor);
    narrow_all(sum, size, reinterpret_cast<Float16*>(out_bytes) + begin);
  }
}
#endif

// Two bf16 numbers are read and written as one word: its halves need shifts and masks only, where
// single numbers would be shuffled apart and together again (64 MB, two ranks, AVX2: 17.1 -> 14.1
// ms).
typedef uint32_t __attribute__((aligned(2), may_alias)) Bfloat16Pair;
inline float lower(uint32_t pair) { return from_bits(pair << 16); }
inline float upper(uint32_t pair) { return from_bits(pair & 0xffff0000); }
// A bf16 in the upper half; the lower one is anything. NaN needs no care: it comes from operands
// whose lower half is zero, or is the CPU's own, and nothing is carried into its upper half.
inline uint32_t rounded(float x) {
  const uint32_t bits = bits_of(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}
inline uint32_t paired(float low, float high) {
  return rounded(low) >> 16 | (rounded(high) & 0xffff0000);
}

template <class Op>
void reduce_bfloat16(char* out_bytes, Sources sources, int64_t ranks, int64_t count,
                     int64_t divisor) {
  alignas(64) float low[kBlockElements], high[kBlockElements];
  Bfloat16Pair* out = reinterpret_cast<Bfloat16Pair*>(out_bytes);
  const Bfloat16Pair* first = reinterpret_cast<const Bfloat16Pair*>(sources[0]);
  const int64_t pairs = count / 2;
  if (ranks == 2 && !divisor) {
    const Bfloat16Pair* second = reinterpret_cast<const Bfloat16Pair*>(sources[1]);
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
      const uint32_t a = first[i], b = second[i];
      out[i] = paired(Op::apply(lower(a), lower(b)), Op::apply(upper(a), upper(b)));
    }
  } else {
    for (int64_t begin = 0; begin < pairs; begin += kBlockElements) {
      const int64_t size = pairs - begin < kBlockElements ? pairs - begin : kBlockElements;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) {
        low[i] = lower(first[begin + i]);
        high[i] = upper(first[begin + i]);
      }
      for (int64_t r = 1; r < ranks; r++) {
        const Bfloat16Pair* next = reinterpret_cast<const Bfloat16Pair*>(sources[r]) + begin;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
          low[i] = Op::apply(low[i], lower(next[i]));
          high[i] = Op::apply(high[i], upper(next[i]));
        }
      }
      if (divisor)
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
          low[i] = divided(low[i], divisor);
          high[i] = divided(high[i], divisor);
        }
#pragma omp simd
      for (int64_t i = 0; i < size; i++) out[begin + i] = paired(low[i], high[i]);
    }
  }
  if (count % 2) {
    const char* last[kMostRanks] = {};
    for (int64_t r = 0; r < ranks; r++) last[r] = sources[r] + 4 * pairs;
    reduce_elements<Half<Bfloat16>, Op>(out_bytes + 4 * pairs, last, ranks, 1, divisor);
  }
}

template <class Element, class Op>
struct Reduce {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_elements<Element, Op>(out, sources, ranks, count, divisor);
  }
};
template <class Op>
struct Reduce<Half<Bfloat16>, Op> {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_bfloat16<Op>(out, sources, ranks, count, divisor);
  }
};
#if defined(__F16C__)
template <class Op>
struct Reduce<Half<Float16>, Op> {
  static void run(char* out, Sources sources, int64_t ranks, int64_t count, int64_t divisor) {
    reduce_float16<Op>(out, sources, ranks, count, divisor);
  }
};
#endif

template <class Element>
bool reduce_numbers(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  switch (reduction) {
    case kCclSum:
    case kCclPartOfMean:
      Reduce<Element, Sum>::run(out, sources, ranks, count, 0);
      return true;
    case kCclMean:
      if (ranks == 2 && divisor == 2)
        Reduce<Element, MeanOfTwo>::run(out, sources, ranks, count, 0);
      else
        Reduce<Element, Sum>::run(out, sources, ranks, count, divisor);
      return true;
    case kCclProduct:
      Reduce<Element, Product>::run(out, sources, ranks, count, 0);
      return true;
  }
  return false;
}
template <class Element>
bool reduce_ordered(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                    int64_t divisor) {
  switch (reduction) {
    case kCclMin:
      Reduce<Element, Minimum>::run(out, sources, ranks, count, 0);
      return true;
    case kCclMax:
      Reduce<Element, Maximum>::run(out, sources, ranks, count, 0);
      return true;
  }
  return reduce_numbers<Element>(reduction, out, sources, ranks, count, divisor);
}
template <class Element>
bool reduce_bits(int64_t reduction, char* out, Sources sources, int64_t ranks, int64_t count,
                 int64_t divisor) {
  switch (reduction) {
    case kCclAnd:
      Reduce<Element, BitAnd>::run(out, sources, ranks, count, 0);
      return true;
    case kCclOr:
      Reduce<Element, BitOr>::run(out, sources, ranks, count, 0);
      return true;
    case kCclXor:
      Reduce<Element, BitXor>::run(out, sources, ranks, count, 0);
      return true;
  }
  return reduce_ordered<Element>(reduction, out, sources, ranks, count, divisor);
}
// Truth values: the sum is "any", the product "all".
inline bool reduce_truths(int64_t reduction, char* out, Sources sources, int64_t ranks,
                          int64_t count, int64_t divisor) {
  switch (reduction) {
    case kCclSum:
    case kCclMax:
      return reduce_bits<Boolean>(kCclOr, out, sources, ranks, count, divisor);
    case kCclProduct:
    case kCclMin:
      return reduce_bits<Boolean>(kCclAnd, out, sources, ranks, count, divisor);
    case kCclMean:
      return false;
  }
  return reduce_bits<Boolean>(reduction, out, sources, ranks, count, divisor);
}

// Bytes of an element, or 0 for a dtype that can't be reduced.
inline int64_t element_bytes(int64_t dtype) {
  static const int8_t bytes[] = {1, 1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return dtype >= 0 && dtype < (int64_t)sizeof bytes ? bytes[dtype] : 0;
}

// A mean is the sum divided by `divisor`. False if the dtype has no such reduction.
inline bool reduce(int64_t dtype, int64_t reduction, char* out, Sources sources, int64_t ranks,
                   int64_t count, int64_t divisor) {
  switch (dtype) {
    case 0:
      return reduce_truths(reduction, out, sources, ranks, count, divisor);
    case 1:
      return reduce_bits<Plain<uint8_t>>(reduction, out, sources, ranks, count, divisor);
    case 2:
      return reduce_bits<Plain<int8_t>>(reduction, out, sources, ranks, count, divisor);
    case 3:
      return reduce_bits<Plain<int16_t>>(reduction, out, sources, ranks, count, divisor);
    case 4:
      return reduce_bits<Plain<int32_t>>(reduction, out, sources, ranks, count, divisor);
    case 5:
      return reduce_bits<Plain<int64_t>>(reduction, out, sources, ranks, count, divisor);
    case 6:
      return reduce_bits<Plain<uint16_t>>(reduction, out, sources, ranks, count, divisor);
    case 7:
      return reduce_bits<Plain<uint32_t>>(reduction, out, sources, ranks, count, divisor);
    case 8:
      return reduce_bits<Plain<uint64_t>>(reduction, out, sources, ranks, count, divisor);
    case 9:
      return reduce_ordered<Half<Float16>>(reduction, out, sources, ranks, count, divisor);
    case 10:
      return reduce_ordered<Half<Bfloat16>>(reduction, out, sources, ranks, count, divisor);
    case 11:
      return reduce_ordered<Plain<float>>(reduction, out, sources, ranks, count, divisor);
    case 12:
      return reduce_ordered<Plain<double>>(reduction, out, sources, ranks, count, divisor);
    case 13:
      return reduce_numbers<Complex<float>>(reduction, out, sources, ranks, count, divisor);
    case 14:
      return reduce_numbers<Complex<double>>(reduction, out, sources, ranks, count, divisor);
  }
  return false;
}

}  // namespace
